// Blocks of threads on a CPU: blocks run in random order, and a block's threads are fibers that are resumed
// in random order. A fiber gives way at a barrier and at an exchange within its warp, and nowhere else.
//
// One block runs at a time, whichever thread of the host launches it, so there are no data races to find by
// chance. What is found: results that depend on the order of threads or blocks, barriers that not all threads
// reach, and exchanges that not all lanes of a warp take part in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>

// Translated PTX, which is another library, finds them by their names.
namespace emulation __attribute__((visibility("default"))) {

  struct Index {
    unsigned x = 0, y = 0, z = 0;
  };

  // The order of blocks and threads follows from it, as do all later orders.
  void set_seed(uint64_t seed);

  // Run `body` for each thread of each block, to the end. `shared_bytes` of shared memory are filled with
  // garbage before each block.
  void run_grid(Index grid, int threads, const std::function<void()>& body);

  // Of the thread that runs.
  extern Index thread_index, block_index, grid_size;
  extern int block_threads;

  void barrier();
  // What lane `lane ^ other` of this warp has brought to the same exchange.
  uint64_t exchange(uint64_t value, int other);
  // What lane `source` has brought.
  uint64_t exchange_from(uint64_t value, int source);

  // Shared memory that kernels address by offsets.
  constexpr size_t kSharedBytes = 228 << 10;
  extern char shared_memory[kSharedBytes];

  // Stop the process: the program would hang or be undefined on a GPU.
  [[noreturn]] void fail(const char* what);

}  // namespace emulation
