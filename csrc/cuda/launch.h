// What the launchers share: the size of a launch's arguments, the check of its error, the device's guard.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "multi_tensor.h"

namespace fusedacc::cuda {

// From CUDA 12.1 on, Volta and later take 32,764 bytes of arguments; all that is built for here is later.
#if CUDART_VERSION >= 12010
constexpr int32_t kArgumentBytes = 32764;
#else
constexpr int32_t kArgumentBytes = 4096;
#endif

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("fusedacc: ") + what + ": " + cudaGetErrorString(error));
  }
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace fusedacc::cuda
