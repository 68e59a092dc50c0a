// What the operators share: where to run, new tensors, numbers from the stack.
#pragma once

#include "../common/chunk_plan.h"
#include "arguments.h"
#include "tensor_checks.h"

namespace fusedacc {

struct Device {
  int32_t type, index;

  bool holds(const TensorView& view) const { return view.device_type == type && view.device_index == index; }
  std::string name() const { return device_name(type, index); }
};

// For what a build without CUDA has to leave out.
[[noreturn]] inline void refuse_cuda() {
  throw std::runtime_error("fusedacc: this build has no CUDA kernels; build it again where nvcc is found");
}

// Runs on_cpu() or on_cuda(), or says why neither.
template <typename OnCpu, typename OnCuda>
void run_on(const Device& device, OnCpu&& on_cpu, OnCuda&& on_cuda) {
  if (device.type == aoti_torch_device_type_cpu()) {
    on_cpu();
  } else if (device.type == aoti_torch_device_type_cuda()) {
    on_cuda();
  } else {
    throw std::runtime_error("fusedacc: tensors are on " + device.name() +
                             "; only cpu and cuda are supported");
  }
}

AtenTensorHandle empty(int64_t dims, int64_t size, int32_t dtype, const Device& device);
void* data_of(const OwnedTensor& tensor);

inline double number(StableIValue argument) { return torch::stable::detail::to<double>(argument); }
NormKind norm_kind(StableIValue norm_type);

}  // namespace fusedacc
