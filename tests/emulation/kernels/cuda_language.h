// The part of CUDA's language and headers that csrc/cuda/*.cu needs, for g++. It is included first and
// defines __CUDA_ARCH__, so that g++ compiles the device code and not the host code.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "threads.h"

#define __CUDACC__ 1
#define __CUDA_ARCH__ 900
#define CUDART_VERSION 13000
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx ::emulation::thread_index
#define blockIdx ::emulation::block_index

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaErrorInsufficientDriver = 35;
inline const char* cudaGetErrorString(int error) {
  return error == cudaErrorInsufficientDriver ? "CUDA driver version is insufficient for CUDA runtime version"
                                              : "an emulated error";
}
inline int cudaGetLastError() { return cudaSuccess; }

struct cudaFuncAttributes {};
extern "C" int emu_driver_error;  // tests set it to the error of a driver that is too old
template <typename Kernel>
int cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return emu_driver_error;
}

inline void __syncthreads() { ::emulation::barrier(); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int other) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  if (mask != 0xffffffffu) ::emulation::fail("an exchange of a part of a warp");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = ::emulation::exchange(bits, other);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

namespace emulation {
// A GPU traps if an address is not a multiple of the access size. The assembly keeps g++ from assuming that
// the pointer is aligned.
inline void check_alignment(const void* address, unsigned bytes) {
  uintptr_t at = reinterpret_cast<uintptr_t>(address);
  __asm__("" : "+r"(at));
  if (at % bytes != 0) fail("a misaligned access");
}
}  // namespace emulation

// Vectors that a GPU loads or stores in one access.
template <int words>
struct EmulatedVector {
  unsigned values[words];

  EmulatedVector& operator=(const EmulatedVector& other) {
    ::emulation::check_alignment(this, sizeof(values));
    ::emulation::check_alignment(&other, sizeof(values));
    std::memcpy(values, other.values, sizeof(values));
    return *this;
  }
};
using uint2 = EmulatedVector<2>;
using uint4 = EmulatedVector<4>;

// A launch, kernel<<<blocks, threads, 0, stream>>>(arguments), as build.py rewrites it.
extern "C" {
void emu_begin_launch(const char* name, int64_t raw_stream, int device);
void emu_access(const void* data, int writes);
int emu_current_device();
int emu_is_recording();
void emu_write_down(void (*run)(void*), void* data);
}

namespace emulation {

// Find the PTX that replaces a kernel, by the kernel's address. The function that it returns runs one thread.
// It takes the addresses of the kernel's arguments. If it is null, the kernel itself runs.
using PtxThread = void (*)(const uint64_t* arguments);
PtxThread find_ptx(const void* kernel);

template <typename Kernel, typename Arguments>
void run_kernel(Kernel kernel, uint32_t blocks, int threads, const Arguments& arguments) {
  if (const PtxThread ptx = find_ptx(reinterpret_cast<const void*>(kernel))) {
    const uint64_t address = reinterpret_cast<uint64_t>(&arguments);
    run_grid({blocks, 1, 1}, threads, [&] { ptx(&address); });
  } else {
    run_grid({blocks, 1, 1}, threads, [&] { kernel(arguments); });
  }
}

template <typename Kernel, typename Arguments>
void launch(const char* name, Kernel kernel, uint32_t blocks, int threads, cudaStream_t stream,
            const Arguments& arguments) {
  // The limit since CUDA 12.1.
  static_assert(sizeof(Arguments) <= 32764, "more arguments than a launch takes");
  emu_begin_launch(name, reinterpret_cast<int64_t>(stream), emu_current_device());
  // Argument-dependent lookup finds for_each_access: accesses.h declares it in the arguments' namespace.
  for_each_access(arguments, [](const void* data, bool writes) { emu_access(data, writes); });
  // Copy the arguments, because a replay may run after the caller has changed them. Copy them to the heap,
  // because the fibers have small stacks.
  auto copy = std::make_unique<Arguments>(arguments);
  run_kernel(kernel, blocks, threads, *copy);
  if (emu_is_recording()) {
    struct Launch {
      Kernel kernel;
      uint32_t blocks;
      int threads;
      std::unique_ptr<Arguments> arguments;
    };
    // Never freed, because the tape may exist until the process ends.
    emu_write_down(
        [](void* data) {
          const auto* launch = static_cast<Launch*>(data);
          run_kernel(launch->kernel, launch->blocks, launch->threads, *launch->arguments);
        },
        new Launch{kernel, blocks, threads, std::move(copy)});
  }
}

}  // namespace emulation
