// The arithmetic of one element: acc <- keep*acc + s*g or acc <- s*g, rounded once to the accumulator's
// dtype.
//
// keep*acc is rounded to the arithmetic's type before s*g is added, as a pass of its own would have rounded
// it into a float32 or float64 sum: a sum may wait for its multiplication until it is added to, and has the
// same bits.
//
// Torch-free, for host and device. The CPU loops are compiled several times for different vector instructions
// and linked together, so everything here is always inlined: a copy emitted by the AVX-512 file must never be
// the one that the baseline file calls. All branches are selects, so that compilers vectorise the loops
// around them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define FUSEDACC_INLINE __host__ __device__ __forceinline__
#else
#define FUSEDACC_INLINE inline __attribute__((always_inline))
#endif

namespace fusedacc {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

FUSEDACC_INLINE float float_from_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

FUSEDACC_INLINE uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

// Arithmetic is in float32; in float64 for float64 accumulators.
template <typename Accumulator>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};

FUSEDACC_INLINE double widen(double value) { return value; }
FUSEDACC_INLINE float widen(float value) { return value; }
FUSEDACC_INLINE float widen(BFloat16 value) {
  return float_from_bits(static_cast<uint32_t>(value.bits) << 16);
}
FUSEDACC_INLINE float widen(Float16 value) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(value.bits));
#else
  const uint32_t magnitude = value.bits & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t inf_or_nan = (magnitude << 13) | 0x7f800000u;
  const uint32_t finite = magnitude < 0x400u ? subnormal : normal;
  return float_from_bits(sign | (magnitude >= 0x7c00u ? inf_or_nan : finite));
#endif
}

// narrow<T>: round to nearest, ties to even; a nan stays a nan.
template <typename T, typename Compute>
FUSEDACC_INLINE T narrow(Compute value);

template <>
FUSEDACC_INLINE double narrow<double, double>(double value) {
  return value;
}

template <>
FUSEDACC_INLINE float narrow<float, float>(float value) {
  return value;
}

template <>
FUSEDACC_INLINE BFloat16 narrow<BFloat16, float>(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const uint32_t quiet = bits | 0x400000u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>((is_nan ? quiet : rounded) >> 16)};
}

template <>
FUSEDACC_INLINE Float16 narrow<Float16, float>(float value) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(value))};
#else
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // One unit in the last place of 0.5 is the smallest float16, so the addition does the rounding.
  const uint32_t subnormal = bits_of(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const uint32_t small = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t finite = magnitude >= 0x477ff000u ? 0x7c00u : small;
  return {static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? nan : finite))};
#endif
}

// Where the compiler may not use such an instruction, it would call a function for each element.
#if defined(__x86_64__) && !defined(__FMA__)
#define FUSEDACC_SLOW_FMA
#endif

// a * b + c with one rounding, where there is no instruction for it: the product of two floats is a double,
// and a sum that is rounded to odd keeps what the rounding to float has to know.
FUSEDACC_INLINE float multiply_add_by_doubles(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b), addend = c;
  const double sum = product + addend, part = sum - product;
  const double error = (product - (sum - part)) + (addend - part);
  int64_t bits;
  std::memcpy(&bits, &sum, sizeof(bits));
  // All ones or none: selects that plain SSE2 has instructions for.
  const int64_t above = error > 0 ? -1 : 0, below = error < 0 ? -1 : 0, positive = sum > 0 ? -1 : 0;
  const int64_t away = 1 + 2 * (above ^ positive), is_even = (bits & 1) - 1;
  bits += away & (above | below) & is_even;
  double odd;
  std::memcpy(&odd, &bits, sizeof(odd));
  return static_cast<float>(odd);
}

// One rounding. Spelled out, so that every backend rounds alike whatever its compiler's habits.
FUSEDACC_INLINE float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(FUSEDACC_SLOW_FMA)
  return multiply_add_by_doubles(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
FUSEDACC_INLINE double fused_multiply_add(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

// By what a pass multiplies: gradients by `scale`, and sums that are not overwritten by `keep`.
struct Multipliers {
  double scale, keep;
};

template <typename Gradient, typename Accumulator>
struct ScaleAccumulate {
  using Compute = typename ComputeType<Accumulator>::type;

  Compute scale, keep;

  FUSEDACC_INLINE explicit ScaleAccumulate(Multipliers by)
      : scale(static_cast<Compute>(by.scale)), keep(static_cast<Compute>(by.keep)) {}

  // Where `keep` is 1, multiplying by it changes nothing, and keeps = false saves the time.
  template <bool keeps = true>
  FUSEDACC_INLINE Accumulator add(Gradient gradient, Accumulator accumulator) const {
    const Compute kept = keeps ? keep * widen(accumulator) : widen(accumulator);
    return narrow<Accumulator, Compute>(fused_multiply_add(scale, widen(gradient), kept));
  }
  // The same where scale * gradient is known, and not rounded.
  template <bool keeps>
  FUSEDACC_INLINE Accumulator add_product(Compute product, Accumulator accumulator) const {
    const Compute kept = keeps ? keep * widen(accumulator) : widen(accumulator);
    return narrow<Accumulator, Compute>(product + kept);
  }
  FUSEDACC_INLINE Accumulator overwrite(Gradient gradient) const {
    return narrow<Accumulator, Compute>(scale * widen(gradient));
  }
};

}  // namespace fusedacc
