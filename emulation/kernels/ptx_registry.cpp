// Which kernels run as PTX.
#include <unordered_map>

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

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void emu_use_ptx(const void* kernel, emulation::PtxThread thread) { registry()[kernel] = thread; }
