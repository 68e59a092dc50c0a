// What launchers share. Torch-free.
#pragma once

#include "cuda.h"

namespace fusedacc::cuda {

// Launches the kernel that joins at most kMostPartials partial norms.
void launch_finish(const FinishRequest& finish, int32_t device_index);

int32_t toolkit_version();  // as CUDART_VERSION: 13000 for 13.0

// Returns CUDA's message if no kernel can be launched on a device, else "". A driver may be too old for the
// toolkit whose runtime is linked into this library.
std::string launch_problem(int32_t device_index);

// Returns torch's current stream of that device.
void* current_stream(int32_t device_index);

// Makes a device the current one until the end of the scope, by torch's own guard, which does not touch
// devices that the process does not use. cudaSetDevice would create a context on the former device, hundreds
// of megabytes large. Throws if torch has no CUDA.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device_index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  void* guard_ = nullptr;
};

#if defined(__CUDACC__)
// Since CUDA 12.1, Volta and later take 32,764 bytes of arguments.
#if CUDART_VERSION >= 12010
constexpr int32_t kArgumentBytes = 32764;
#else
constexpr int32_t kArgumentBytes = 4096;
#endif

// Minimum blocks per multiprocessor. Without it, the compiler minimizes registers and waits for the first
// loads before it issues the others.
constexpr int32_t kBlocks = 4;

inline cudaStream_t stream_of(int32_t device_index) {
  return static_cast<cudaStream_t>(current_stream(device_index));
}

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("fusedacc: ") + what + ": " + cudaGetErrorString(error));
  }
}
#endif

}  // namespace fusedacc::cuda
