// The arithmetic of a norm: the partial norm of a chunk, and how partials are combined.
//
// A partial is the norm of a chunk in float64; it is finite unless an element is not. Partials of partials
// use the same arithmetic.
//
// Squares are first summed as they are, which is nearly always right. If the sum shows that some may have
// overflowed or underflowed, the chunk is read again, from the cache, and scaled by its largest magnitude.
// Multiplication and addition are rounded separately on every device.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "functors.h"

namespace fusedacc {

// The kinds of norm, and their numbers.
enum class NormKind : int32_t { kTwo, kInfinity };
constexpr double kNormTypes[] = {2, std::numeric_limits<double>::infinity()};
constexpr int32_t kNormKinds = sizeof(kNormTypes) / sizeof(*kNormTypes);

// Finds the kind of a norm_type. Returns false if there is none.
inline bool find_norm_kind(double norm_type, NormKind& kind) {
  for (int32_t i = 0; i < kNormKinds; ++i) {
    if (kNormTypes[i] == norm_type) {
      kind = static_cast<NormKind>(i);
      return true;
    }
  }
  return false;
}

// Calls visit(kind) with the kind as a constant.
template <typename Visit>
inline void with_norm_kind(NormKind kind, Visit&& visit) {
  switch (kind) {
    case NormKind::kTwo:
      return visit(std::integral_constant<NormKind, NormKind::kTwo>());
    case NormKind::kInfinity:
      return visit(std::integral_constant<NormKind, NormKind::kInfinity>());
  }
}

template <typename Compute>
struct Magnitude {
  static constexpr bool kSingle = sizeof(Compute) == 4;
  using Bits = std::conditional_t<kSingle, int32_t, int64_t>;
  static constexpr int32_t kFraction = kSingle ? 23 : 52;
  static constexpr Bits kMaxExponent = kSingle ? 255 : 2047;
  static constexpr Bits kInfinity = kMaxExponent << kFraction;
  static constexpr Bits kUnsigned = std::numeric_limits<Bits>::max();
  static constexpr Compute kMost = std::numeric_limits<Compute>::max();

  static FUSEDACC_INLINE Bits of(Compute value) { return bits_as<Bits>(value) & kUnsigned; }
  static FUSEDACC_INLINE Compute value(Bits bits) { return bits_as<Compute>(bits); }
  // A power of two that scales the magnitude to about 1. Its inverse is finite too.
  static FUSEDACC_INLINE Compute scale_of(Bits bits) {
    constexpr Bits most = kMaxExponent - 1;
    const Bits exponent = bits >> kFraction;
    return value((most - (exponent < 1 ? 1 : exponent > most - 1 ? most - 1 : exponent)) << kFraction);
  }
};

// The largest magnitude, compared by its bits: infinity is above all numbers, nan above infinity.
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
  // Whether all relevant squares of a chunk were in range: 8192 subnormal steps are below half a unit in the
  // last place of the lower bound.
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

// Returns the norm of some values. `pass(functor)` returns the functor's state after all values.
template <NormKind kind, typename Compute, typename Pass>
FUSEDACC_INLINE double norm_of(Pass&& pass) {
  using Bits = Magnitude<Compute>;
  if constexpr (kind == NormKind::kInfinity) {
    return static_cast<double>(Bits::value(pass(Largest<Compute>{})));
  } else {
    static_assert(kind == NormKind::kTwo);
    const Compute plain = pass(SumOfSquares<Compute>{});
    if (SumOfSquares<Compute>::in_range(plain)) return std::sqrt(static_cast<double>(plain));
    const auto largest = pass(Largest<Compute>{});
    if (largest == 0 || largest >= Bits::kInfinity) return static_cast<double>(Bits::value(largest));
    const Compute scale = Bits::scale_of(largest);
    const Compute sum = pass(ScaledSumOfSquares<Compute>{scale});
    const double norm = std::sqrt(static_cast<double>(sum)) / static_cast<double>(scale);
    // Infinity would mean that an element is not finite.
    return norm < Magnitude<double>::kMost ? norm : Magnitude<double>::kMost;
  }
}

}  // namespace fusedacc
