// The part of CUDA's cuda_bf16.h that csrc/ uses.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }

// A GPU turns every NaN into this one.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (value != value) return {0x7fff};
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
