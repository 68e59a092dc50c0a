// The arithmetic of a norm: a chunk's partial, and how partials join.
//
// A partial is the norm of a chunk in float64, and not finite only where an element is not. So a partial is
// itself a number to take the norm of: partials of partials need no arithmetic of their own.
//
// Squares are summed as they are, because that is right nearly always. Where the sum says that some may have
// overflowed or vanished, the chunk is read once more, from the cache, scaled by its largest magnitude.
// Multiplication and addition are rounded each for itself, on every device.
#pragma once

#include <cmath>

#include "functors.h"

namespace fusedacc {

enum class NormKind : int32_t { kTwo, kInfinity };
constexpr int32_t kNormKinds = 2;

FUSEDACC_INLINE double double_from_bits(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<long long>(bits));
#else
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

FUSEDACC_INLINE uint64_t bits_of(double value) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint64_t>(__double_as_longlong(value));
#else
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

template <typename Compute>
struct Magnitude;

template <>
struct Magnitude<float> {
  using Bits = int32_t;
  static constexpr Bits kInfinity = 0x7f800000;
  static constexpr float kMost = 0x1.fffffep127f;
  static FUSEDACC_INLINE Bits of(float value) { return static_cast<Bits>(bits_of(value) & 0x7fffffffu); }
  static FUSEDACC_INLINE float value(Bits bits) { return float_from_bits(static_cast<uint32_t>(bits)); }
  // A power of two that brings the magnitude to about 1. Its inverse is finite too.
  static FUSEDACC_INLINE float scale_of(Bits bits) {
    const Bits exponent = bits >> 23;
    return value((254 - (exponent < 1 ? 1 : exponent > 253 ? 253 : exponent)) << 23);
  }
};

template <>
struct Magnitude<double> {
  using Bits = int64_t;
  static constexpr Bits kInfinity = 0x7ff0000000000000;
  static constexpr double kMost = 0x1.fffffffffffffp1023;
  static FUSEDACC_INLINE Bits of(double value) {
    return static_cast<Bits>(bits_of(value) & 0x7fffffffffffffffu);
  }
  static FUSEDACC_INLINE double value(Bits bits) { return double_from_bits(static_cast<uint64_t>(bits)); }
  static FUSEDACC_INLINE double scale_of(Bits bits) {
    const Bits exponent = bits >> 52;
    return value((2046 - (exponent < 1 ? 1 : exponent > 2045 ? 2045 : exponent)) << 52);
  }
};

// The largest magnitude, by its bits: infinity is above all numbers, nan above infinity.
template <typename Compute>
struct Largest {
  using State = typename Magnitude<Compute>::Bits;

  FUSEDACC_INLINE State add(State state, Compute value) const {
    return join(state, Magnitude<Compute>::of(value));
  }
  static FUSEDACC_INLINE State join(State a, State b) { return a > b ? a : b; }
};

template <typename Compute>
struct SumOfSquares {
  using State = Compute;

  FUSEDACC_INLINE State add(State state, Compute value) const { return state + value * value; }
  static FUSEDACC_INLINE State join(State a, State b) { return a + b; }
  // Whether all squares of a chunk were in range, those that count: 8192 subnormal steps are below half a
  // unit in the last place of the lower bound.
  static FUSEDACC_INLINE bool in_range(State sum) {
    constexpr bool single = sizeof(Compute) == 4;
    return sum >= static_cast<Compute>(single ? 0x1p-110 : 0x1p-1000) && sum <= Magnitude<Compute>::kMost;
  }
};

template <typename Compute>
struct ScaledSumOfSquares {
  using State = Compute;

  Compute scale;

  FUSEDACC_INLINE State add(State state, Compute value) const {
    return state + value * scale * (value * scale);
  }
  static FUSEDACC_INLINE State join(State a, State b) { return a + b; }
};

// The norm of some values: `first` and `again` give reduce(functor), a functor's state after all of them.
// `first` is called once, before any `again`.
template <NormKind kind, typename Compute, typename First, typename Again>
FUSEDACC_INLINE double norm_of(First&& first, Again&& again) {
  using Bits = Magnitude<Compute>;
  if constexpr (kind == NormKind::kInfinity) {
    return static_cast<double>(Bits::value(first(Largest<Compute>{})));
  } else {
    const Compute plain = first(SumOfSquares<Compute>{});
    if (SumOfSquares<Compute>::in_range(plain)) return std::sqrt(static_cast<double>(plain));
    const auto largest = again(Largest<Compute>{});
    if (largest == 0 || largest >= Bits::kInfinity) return static_cast<double>(Bits::value(largest));
    const Compute scale = Bits::scale_of(largest);
    const Compute sum = again(ScaledSumOfSquares<Compute>{scale});
    const double norm = std::sqrt(static_cast<double>(sum)) / static_cast<double>(scale);
    // Infinity would say that an element is not finite.
    return norm < Magnitude<double>::kMost ? norm : Magnitude<double>::kMost;
  }
}

}  // namespace fusedacc
