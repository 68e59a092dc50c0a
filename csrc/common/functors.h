// The arithmetic of one element: acc <- beta*acc + s*g or acc <- s*g, rounded once to the accumulator's
// dtype.
//
// beta*acc is rounded to the arithmetic's type before s*g is added, as a separate pass would round it into a
// float32 or float64 accumulator. So a deferred scale may wait until the next addition without changing bits.
//
// Torch-free, for host and device. The CPU loops are compiled several times for different vector instructions
// and linked together. Everything here is always inlined: otherwise the linker could keep the AVX-512 copy of
// a function for baseline code (one-definition rule). All branches are selects, so that compilers vectorise
// the loops.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#define FUSEDACC_INLINE __host__ __device__ __forceinline__
#else
#define FUSEDACC_INLINE inline __attribute__((always_inline))
#endif

namespace fusedacc {

// Random bits for stochastic rounding. They depend only on seed, tensor, addition and element, so they are
// the same for every launch shape, number of threads and backend.
//
// Philox 4x32 with 7 rounds, the fewest that pass BigCrush (Salmon, Moraes, Dror, Shaw: Parallel Random
// Numbers: As Easy as 1, 2, 3; 2011). One counter gives the bits of 8 neighbouring elements.

// The random bits of a pass. stream: the parameter's number, and above its 32 bits the number of the
// addition. first: the current element's number, which is its offset in memory from the tensor's first
// element.
struct Noise {
  uint64_t seed = 0;
  uint64_t stream = 0;
  int64_t first = 0;

  FUSEDACC_INLINE Noise from(int64_t offset) const { return {seed, stream, first + offset}; }
};

namespace random {

constexpr int32_t kRounds = 7;
constexpr uint32_t kMultipliers[] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32_t kWeyl[] = {0x9E3779B9u, 0xBB67AE85u};
constexpr int64_t kElements = 8;  // of one counter

struct Words {
  uint32_t values[4];
};

// Evaluates counter number `block` of a stream.
FUSEDACC_INLINE Words philox(const Noise& noise, uint64_t block) {
  uint32_t a = static_cast<uint32_t>(block), b = static_cast<uint32_t>(block >> 32);
  uint32_t c = static_cast<uint32_t>(noise.stream), d = static_cast<uint32_t>(noise.stream >> 32);
  constexpr uint32_t kX = kWeyl[0], kY = kWeyl[1];  // device code has no such arrays
  uint32_t x = static_cast<uint32_t>(noise.seed), y = static_cast<uint32_t>(noise.seed >> 32);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int32_t round = 0; round < kRounds; ++round) {
    const uint64_t p = static_cast<uint64_t>(a) * kMultipliers[0];
    const uint64_t q = static_cast<uint64_t>(c) * kMultipliers[1];
    a = static_cast<uint32_t>(q >> 32) ^ b ^ x;
    b = static_cast<uint32_t>(q);
    c = static_cast<uint32_t>(p >> 32) ^ d ^ y;
    d = static_cast<uint32_t>(p);
    x += kX;
    y += kY;
  }
  return {{a, b, c, d}};
}

// Returns the 16 bits of one of a counter's elements, by selects: a GPU cannot index registers.
FUSEDACC_INLINE uint32_t bits_of(const Words& words, int32_t element) {
  const uint32_t* values = words.values;
  const uint32_t lower = element & 2 ? values[1] : values[0];
  const uint32_t upper = element & 2 ? values[3] : values[2];
  return (element & 4 ? upper : lower) >> (element & 1 ? 16 : 0) & 0xffffu;
}

// Returns the bits of the element that is `offset` further.
FUSEDACC_INLINE uint32_t bits_at(const Noise& noise, int64_t offset) {
  const uint64_t number = static_cast<uint64_t>(noise.first + offset);
  return bits_of(philox(noise, number / kElements), static_cast<int32_t>(number % kElements));
}

}  // namespace random

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
// Has the memory layout of BFloat16; only the rounding differs.
struct StochasticBFloat16 {
  uint16_t bits;
};
template <typename T>
constexpr bool kIsStochastic = std::is_same_v<T, StochasticBFloat16>;

// Returns the same bits in another type of that size.
template <typename To, typename From>
FUSEDACC_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Arithmetic is in float32, or in float64 for float64 accumulators.
template <typename Accumulator>
using ComputeOf = std::conditional_t<std::is_same_v<Accumulator, double>, double, float>;

FUSEDACC_INLINE double widen(double value) { return value; }
FUSEDACC_INLINE float widen(float value) { return value; }
FUSEDACC_INLINE float widen(BFloat16 value) {
  return bits_as<float>(static_cast<uint32_t>(value.bits) << 16);
}
FUSEDACC_INLINE float widen(StochasticBFloat16 value) { return widen(BFloat16{value.bits}); }
FUSEDACC_INLINE float widen(Float16 value) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(value.bits));
#else
  const uint32_t magnitude = value.bits & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t subnormal =
      bits_as<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t inf_or_nan = (magnitude << 13) | 0x7f800000u;
  const uint32_t finite = magnitude < 0x400u ? subnormal : normal;
  return bits_as<float>(sign | (magnitude >= 0x7c00u ? inf_or_nan : finite));
#endif
}

// narrow<T> rounds to nearest, ties to even; nan stays nan. noise: 16 random bits for stochastic rounding.
template <typename T, typename Compute>
FUSEDACC_INLINE T narrow(Compute value, uint32_t noise = 0);

template <>
FUSEDACC_INLINE double narrow<double, double>(double value, uint32_t) {
  return value;
}

template <>
FUSEDACC_INLINE float narrow<float, float>(float value, uint32_t) {
  return value;
}

// Rounds up in magnitude with probability (discarded bits / 2^16), so that the expected value is exact and
// values of bfloat16 do not change. Finite values stay finite: 0x7f7f0000 is the largest finite bfloat16.
template <>
FUSEDACC_INLINE StochasticBFloat16 narrow<StochasticBFloat16, float>(float value, uint32_t noise) {
  const uint32_t bits = bits_as<uint32_t>(value);
#if defined(__CUDA_ARCH__)
  // One comparison, which is false for nan. A GPU's arithmetic produces one nan, whose upper half is a nan
  // too.
  const uint32_t added = fabsf(value) < bits_as<float>(0x7f7f0000u) ? noise : 0;
  return {static_cast<uint16_t>((bits + added) >> 16)};
#else
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = bits + (magnitude >= 0x7f7f0000u ? 0 : noise);
  const uint32_t quiet = bits | 0x400000u;
  return {static_cast<uint16_t>((magnitude > 0x7f800000u ? quiet : rounded) >> 16)};
#endif
}

template <>
FUSEDACC_INLINE BFloat16 narrow<BFloat16, float>(float value, uint32_t) {
#if defined(__CUDA_ARCH__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#else
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const uint32_t quiet = bits | 0x400000u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>((is_nan ? quiet : rounded) >> 16)};
#endif
}

template <>
FUSEDACC_INLINE Float16 narrow<Float16, float>(float value, uint32_t) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(value))};
#else
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // One unit in the last place of 0.5 is the smallest float16, so the addition rounds.
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const uint32_t small = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t finite = magnitude >= 0x477ff000u ? 0x7c00u : small;
  return {static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? nan : finite))};
#endif
}

// Without -mfma, __builtin_fmaf would be a library call for each element.
#if defined(__x86_64__) && !defined(__FMA__)
#define FUSEDACC_SLOW_FMA
#endif

// a * b + c with one rounding, without the instruction. The product of two floats is exact in double; the sum
// is rounded to odd, which avoids double rounding (Boldo and Melquiond: Emulation of FMA and correctly
// rounded sums; 2008).
FUSEDACC_INLINE float multiply_add_by_doubles(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double addend = c;
  const double sum = product + addend;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (addend - part);
  int64_t bits = bits_as<int64_t>(sum);
  // All ones or all zeros: SSE2 has instructions for these selects.
  const int64_t above = error > 0 ? -1 : 0;
  const int64_t below = error < 0 ? -1 : 0;
  const int64_t positive = sum > 0 ? -1 : 0;
  const int64_t away = 1 + 2 * (above ^ positive);
  const int64_t is_even = (bits & 1) - 1;
  bits += away & (above | below) & is_even;
  return static_cast<float>(bits_as<double>(bits));
}

// One rounding. Explicit, so that every backend rounds alike with any compiler.
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

// The factors of a pass: `scale` for gradients, `beta` for accumulators that are not overwritten; and the
// noise of stochastically rounded sums.
struct Multipliers {
  double scale, beta;
  Noise noise{};
};

template <typename Gradient, typename Accumulator>
struct ScaleAccumulate {
  using Compute = ComputeOf<Accumulator>;

  static constexpr bool kStochastic = kIsStochastic<Accumulator>;

  Compute scale, beta;
  Noise noise;  // if Accumulator is stochastic

  FUSEDACC_INLINE explicit ScaleAccumulate(Multipliers by)
      : scale(static_cast<Compute>(by.scale)), beta(static_cast<Compute>(by.beta)), noise(by.noise) {}

  // Returns the functor of the elements that begin `offset` further.
  FUSEDACC_INLINE ScaleAccumulate from(int64_t offset) const {
    ScaleAccumulate further = *this;
    if constexpr (kStochastic) further.noise = noise.from(offset);
    return further;
  }
  // Returns the random bits of one element, if they are needed.
  FUSEDACC_INLINE uint32_t bits_at(int64_t offset) const {
    if constexpr (kStochastic) return random::bits_at(noise, offset);
    return 0;
  }

  // has_beta = false saves the multiplication if `beta` is 1.
  template <bool has_beta = true>
  FUSEDACC_INLINE Accumulator add(Gradient gradient, Accumulator accumulator, uint32_t bits = 0) const {
    const Compute old = has_beta ? beta * widen(accumulator) : widen(accumulator);
    return narrow<Accumulator, Compute>(fused_multiply_add(scale, widen(gradient), old), bits);
  }
  // The same for a known product scale * gradient that was not rounded.
  template <bool has_beta>
  FUSEDACC_INLINE Accumulator add_product(Compute product, Accumulator accumulator, uint32_t bits = 0) const {
    const Compute old = has_beta ? beta * widen(accumulator) : widen(accumulator);
    return narrow<Accumulator, Compute>(product + old, bits);
  }
  FUSEDACC_INLINE Accumulator overwrite(Gradient gradient, uint32_t bits = 0) const {
    return narrow<Accumulator, Compute>(scale * widen(gradient), bits);
  }
};

}  // namespace fusedacc
