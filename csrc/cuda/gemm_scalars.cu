#include "cuda.h"

#include "launch.h"

namespace fusedacc::cuda {
namespace {

template <typename Compute>
__global__ void scalars_kernel(ScaleArgument scale, ScaleArgument keep, Compute* out) {
  out[0] = read_scale<Compute>(scale);
  out[1] = read_scale<Compute>(keep);
}

}  // namespace

void on_device(int32_t device_index, const std::function<void()>& work) {
  const DeviceGuard guard(device_index);
  work();
}

void launch_scalars(const ScaleArgument& scale, const ScaleArgument& keep, bool wide, void* out,
                    void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (wide) {
    scalars_kernel<<<1, 1, 0, on>>>(scale, keep, static_cast<double*>(out));
  } else {
    scalars_kernel<<<1, 1, 0, on>>>(scale, keep, static_cast<float*>(out));
  }
  check(cudaGetLastError(), "launch of scalars_kernel");
}

}  // namespace fusedacc::cuda
