// Registers the kernels that run as PTX, and launches kernels that exist only as PTX.
#include <unordered_map>
#include <vector>

#include "cuda_language.h"

namespace {
std::unordered_map<const void*, emulation::PtxThread>& registry() {
  static std::unordered_map<const void*, emulation::PtxThread> kernels;
  return kernels;
}
}  // namespace

namespace emulation {
PtxThread find_ptx(const void* kernel) {
  const auto found = registry().find(kernel);
  return found == registry().end() ? nullptr : found->second;
}
}  // namespace emulation

// Tests set this variable.
extern "C" __attribute__((visibility("default"))) int emu_driver_error = cudaSuccess;

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void emu_use_ptx(const void* kernel, emulation::PtxThread thread) { registry()[kernel] = thread; }

namespace {
struct Launch {
  emulation::PtxThread thread;
  emulation::Index grid;
  int threads;
  std::vector<uint64_t> values;

  void run() const {
    std::vector<uint64_t> addresses;
    for (const uint64_t& value : values) addresses.push_back(reinterpret_cast<uint64_t>(&value));
    emulation::run_grid(grid, threads, [&] { thread(addresses.data()); });
  }
};
}  // namespace

// Each of the `count` values holds an argument in the lower bytes of 64 bits.
EXPORT void emu_launch_ptx(const char* name, int64_t raw_stream, emulation::PtxThread thread,
                           const unsigned* grid, int threads, const uint64_t* values, int count) {
  emu_begin_launch(name, raw_stream, emu_current_device());
  auto* launch = new Launch{thread, {grid[0], grid[1], grid[2]}, threads, {values, values + count}};
  launch->run();
  if (emu_is_recording()) {
    emu_write_down([](void* data) { static_cast<Launch*>(data)->run(); }, launch);
  } else {
    delete launch;
  }
}
