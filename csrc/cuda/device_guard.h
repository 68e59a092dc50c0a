// Makes a device the current one until the end of the scope.
#pragma once

#include <cstdint>

namespace fusedacc::cuda {

// By torch's own guard, which leaves devices alone that the process does not use: cudaSetDevice would make a
// context on the one that was current, hundreds of megabytes large. Throws where torch has no CUDA.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device_index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  void* guard_ = nullptr;
};

}  // namespace fusedacc::cuda
