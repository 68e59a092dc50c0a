// The kernel that clears memory where a flag says so, and its launcher.
#include "clear_thread.h"
#include "launch.h"
#include "row_launch.h"

namespace fusedacc::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) clear_kernel(const ClearWork work) {
  clear_thread(work, static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
               static_cast<int64_t>(gridDim.x) * kThreads);
}

}  // namespace

void launch_clear(const ClearWork& work, int32_t device_index, void* stream) {
  if (work.bytes == 0) return;
  const DeviceGuard guard(device_index);
  const auto blocks = static_cast<uint32_t>(clear_blocks(work.bytes));
  clear_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(work);
  check(cudaGetLastError(), "launch of clear_kernel");
}

}  // namespace fusedacc::cuda
