// What the launchers share: the size of a launch's arguments, the check of its error.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "device/accumulate_block.h"
#include "device_guard.h"

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

}  // namespace fusedacc::cuda
