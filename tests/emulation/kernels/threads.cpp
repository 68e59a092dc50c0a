#include "threads.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <vector>

namespace emulation {

Index thread_index, block_index, grid_size;
int block_threads = 0;
alignas(1024) char shared_memory[kSharedBytes];

namespace {

constexpr size_t kStackBytes = 96 << 10;
constexpr int kLanes = 32;

enum class State { kReady, kAtBarrier, kExchanging, kDone };

struct Fiber {
  ucontext_t context;
  State state;
  uint64_t brought;
};

std::vector<Fiber> fibers;
std::vector<char> stacks;
ucontext_t scheduler;
int running = 0;  // the index of the running fiber
const std::function<void()>* body = nullptr;
std::mt19937_64 random_order;
std::mutex one_grid;

void give_way(State state) {
  const int self = running;
  fibers[self].state = state;
  swapcontext(&fibers[self].context, &scheduler);
}

void run_fiber() {
  (*body)();
  give_way(State::kDone);
}

void prepare_fibers(int threads) {
  if (static_cast<int>(fibers.size()) < threads) {
    fibers.resize(threads);
    stacks.resize(kStackBytes * threads);
  }
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.state = State::kReady;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.data() + kStackBytes * i;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_fiber, 0);
  }
}

int count(int first, int threads, State state) {
  return static_cast<int>(std::count_if(fibers.begin() + first, fibers.begin() + first + threads,
                                        [&](const Fiber& fiber) { return fiber.state == state; }));
}

void set_ready(int first, int threads) {
  for (int i = first; i < first + threads; ++i) fibers[i].state = State::kReady;
}

// Let a random part of a block's warps rest until all others wait for them. So warps meet only at barriers.
void choose_resting(std::vector<bool>& rests) {
  for (size_t warp = 0; warp < rests.size(); ++warp) rests[warp] = random_order() % 2 == 0;
}

// Call this when every fiber is done, waiting or resting. Wake the fibers whose whole warp waits for an
// exchange, else those that rest, else those whose whole block waits at a barrier. Return false if all fibers
// are done.
bool release_waiting(int threads, std::vector<bool>& rests) {
  bool exchanged = false;
  for (int warp = 0; warp < threads; warp += kLanes) {
    const int lanes = std::min(kLanes, threads - warp);
    const int waiting = count(warp, lanes, State::kExchanging);
    if (waiting == lanes) {
      set_ready(warp, lanes);
      exchanged = true;
    } else if (waiting > 0) {
      fail("not all lanes of a warp take part in an exchange");
    }
  }
  if (exchanged) return true;
  if (count(0, threads, State::kReady) > 0) {
    std::fill(rests.begin(), rests.end(), false);
    return true;
  }
  const int done = count(0, threads, State::kDone);
  if (done == threads) return false;
  if (done > 0) fail("not all threads of a block reach a barrier");
  set_ready(0, threads);
  choose_resting(rests);
  return true;
}

void run_block(int threads) {
  prepare_fibers(threads);
  std::vector<int> order(threads);
  std::iota(order.begin(), order.end(), 0);
  std::vector<bool> rests((threads + kLanes - 1) / kLanes);
  choose_resting(rests);
  do {
    std::shuffle(order.begin(), order.end(), random_order);
    for (const int i : order) {
      if (fibers[i].state != State::kReady || rests[i / kLanes]) continue;
      running = i;
      thread_index = {static_cast<unsigned>(i), 0, 0};
      swapcontext(&scheduler, &fibers[i].context);
    }
  } while (release_waiting(threads, rests));
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "EMULATION: %s (thread %u, block %u)\n", what, thread_index.x, block_index.x);
  std::abort();
}

void set_seed(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(one_grid);
  random_order.seed(seed);
}

void run_grid(Index grid, int threads, const std::function<void()>& kernel) {
  // Kernels that do nothing leave the host's time, which benchmarks/suites/host_time.py measures.
  static const bool kernels_are_empty = std::getenv("EMULATION_EMPTY_KERNELS") != nullptr;
  if (kernels_are_empty) return;
  const std::lock_guard<std::mutex> lock(one_grid);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) fail("a launch of no blocks");
  body = &kernel;
  grid_size = grid;
  block_threads = threads;
  std::vector<uint64_t> order(static_cast<uint64_t>(grid.x) * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_order);
  for (const uint64_t block : order) {
    block_index = {static_cast<unsigned>(block % grid.x), static_cast<unsigned>(block / grid.x % grid.y),
                   static_cast<unsigned>(block / grid.x / grid.y)};
    run_block(threads);
  }
}

void barrier() { give_way(State::kAtBarrier); }

uint64_t exchange_from(uint64_t value, int source) {
  const int self = running;
  fibers[self].brought = value;
  give_way(State::kExchanging);
  const uint64_t got = fibers[self / kLanes * kLanes + source].brought;
  // No thread may store its next value before all threads have read this one.
  give_way(State::kExchanging);
  return got;
}

uint64_t exchange(uint64_t value, int other) { return exchange_from(value, running % kLanes ^ other); }

}  // namespace emulation

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void emu_set_seed(uint64_t seed) { emulation::set_seed(seed); }
