// Runs blocks of threads on a CPU. Blocks run in random order. A block's threads are fibers that are resumed
// in random order. A fiber yields only at a barrier and at an exchange within its warp. After each barrier
// some of the warps, chosen at random, rest until all others have ended or wait at the next barrier.
//
// Only one block runs at a time, even if several host threads launch kernels, so no data race can occur. This
// finds results that depend on the order of threads or blocks, barriers that not all threads reach, and
// exchanges without all lanes of a warp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>

// Visible, because translated PTX is in another library, which finds these functions and variables by name.
namespace emulation __attribute__((visibility("default"))) {

  struct Index {
    unsigned x = 0, y = 0, z = 0;
  };

  // Set the seed that determines the order of blocks and threads in all later launches.
  void set_seed(uint64_t seed);

  // Run `body` for each thread of each block, and return when all threads are done.
  void run_grid(Index grid, int threads, const std::function<void()>& body);

  // The indices and sizes that the running thread sees.
  extern Index thread_index, block_index, grid_size;
  extern int block_threads;

  void barrier();
  // Return the value that lane `lane ^ other` of this warp passes to the same exchange.
  uint64_t exchange(uint64_t value, int other);
  // Return the value that lane `source` of this warp passes to the same exchange.
  uint64_t exchange_from(uint64_t value, int source);

  // The shared memory of translated PTX, which addresses it by offset.
  constexpr size_t kSharedBytes = 228 << 10;
  extern char shared_memory[kSharedBytes];

  // Abort the process, because the program would hang or have undefined behavior on a GPU.
  [[noreturn]] void fail(const char* what);

}  // namespace emulation
