// What one thread does of clearing memory where a flag says so. Host and device, torch-free, like
// multi_tensor.h.
#pragma once

#include "../clear_work.h"
#include "multi_tensor.h"

namespace fusedacc::cuda {

// Blocks of a launch at most: enough to fill a GPU, and few that find out that there is nothing to do.
constexpr int64_t kClearBlocks = 1024;

inline int64_t clear_blocks(int64_t bytes) {
  constexpr int64_t share = kThreads * kVectorBytes;
  const int64_t blocks = (bytes + share - 1) / share;
  return blocks < kClearBlocks ? blocks : kClearBlocks;
}

// Thread number `thread` of `threads`, which share the vectors of 16 bytes, and the bytes around them.
FUSEDACC_INLINE void clear_thread(const ClearWork& work, int64_t thread, int64_t threads) {
  if (!is_set(work.flag)) return;
  char* data = static_cast<char*>(work.data);
  const int64_t before = (kVectorBytes - misalignment(data)) % kVectorBytes;
  const int64_t head = before < work.bytes ? before : work.bytes;
  const int64_t vectors = (work.bytes - head) / kVectorBytes;
  constexpr Packed<char, kVectorBytes> zeros{};
  for (int64_t i = thread; i < vectors; i += threads) store(data + head + i * kVectorBytes, zeros);
  // Fewer than two vectors' bytes: a block has more threads.
  if (thread < work.bytes - vectors * kVectorBytes) {
    data[thread < head ? thread : thread + vectors * kVectorBytes] = 0;
  }
}

}  // namespace fusedacc::cuda
