// The part of CUDA's cuda_fp16.h that csrc/ uses.
#pragma once

#include <cstdint>
#include <cstring>

struct __half {
  uint16_t bits;
};

inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half value) { return value.bits; }

inline float __half2float(__half value) {
  _Float16 half;
  std::memcpy(&half, &value.bits, sizeof(half));
  return static_cast<float>(half);
}

// A GPU turns every NaN into this one.
inline __half __float2half_rn(float value) {
  if (value != value) return {0x7fff};
  const auto half = static_cast<_Float16>(value);
  __half result;
  std::memcpy(&result.bits, &half, sizeof(half));
  return result;
}
