// The arithmetic of a softmax over a slice of the vocabulary, of one logit. Torch-free, always inlined, as
// functors.h.
#pragma once

#include <cstdint>

#include "functors.h"

namespace fusedacc {

// Not spelled out as fused where there is no instruction for it: an exponential need not have the same bits.
template <typename Compute>
FUSEDACC_INLINE Compute multiply_add(Compute a, Compute b, Compute c) {
#if defined(FUSEDACC_SLOW_FMA)
  return a * b + c;
#else
  return fused_multiply_add(a, b, c);
#endif
}

// A polynomial of r, by its factors from the highest power down.
template <typename Compute, typename... Factors>
FUSEDACC_INLINE Compute polynomial(Compute r, Compute first, Factors... factors) {
  ((first = multiply_add(first, r, factors)), ...);
  return first;
}

// e^x, within two units in the last place, for x of at most about 0: a logit less the largest, or less the
// logarithm of the sum. What has no normal number is 0; a nan stays a nan. Compilers vectorise loops around
// it, which they do not around a call of exp().
template <typename Compute>
FUSEDACC_INLINE Compute exponential(Compute x) {
  constexpr bool kWide = sizeof(Compute) == 8;
  using Bits = std::conditional_t<kWide, uint64_t, uint32_t>;
  constexpr Bits kBias = kWide ? 1023 : 127, kMantissa = kWide ? 52 : 23;
  constexpr Compute kLeast = kWide ? -708 : -87, kMost = kWide ? 709 : 88;
  constexpr auto kHighOfLog2 = static_cast<Compute>(kWide ? 0.693147180369123816490 : 0.693359375);
  constexpr auto kLowOfLog2 = static_cast<Compute>(kWide ? 1.90821492927058770002e-10 : -2.12194440e-4);
  // 1.5 * 2^mantissa: the sum with it has the nearest whole number in the lowest bits.
  constexpr Compute kShift = kWide ? 6755399441055744 : 12582912;
  Compute inside = x < kLeast ? kLeast : x;
  inside = inside > kMost ? kMost : inside;
  const Compute shifted = multiply_add(inside, static_cast<Compute>(1.4426950408889634), kShift);
  const Compute whole = shifted - kShift;
  const Compute r = multiply_add(whole, -kLowOfLog2, multiply_add(whole, -kHighOfLog2, inside));
  Compute p;
  if constexpr (kWide) {
    p = polynomial(r, 1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                   1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0);
  } else {
    p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                   1.6666665459e-1f, 5.0000001201e-1f);
    p = multiply_add(p, r * r, r) + 1.0f;
  }
  const auto power = bits_as<Compute>((bits_as<Bits>(shifted) + kBias) << kMantissa);
  return x < kLeast ? 0 : p * power;
}

// A sum over a row of logits has the same bits with any vector instructions. Each block of `kSoftmaxBlock`
// classes is summed in `kSoftmaxLanes` lanes, whose halves are added until one is left. Then the blocks are
// added in order.
constexpr int32_t kSoftmaxBlock = 512, kSoftmaxLanes = 32;

// A pass over a slice of the logits, a row for each token: it joins them to the statistics of the tokens, or
// turns them into their gradients.
//
// Statistics: the largest logit so far, the sum of e^(logit - largest), the target's logit, and the weighted
// sum of the logits.
struct SoftmaxSlice {
  void* logits;      // [tokens, classes], contiguous
  void* numbers;     // statistics [3 or 4, tokens], or the fields of TokenFactors, [4, tokens]
  bool is_gradient;  // which pass
  int64_t tokens, classes;
  const int64_t* target;      // [tokens]: a class of the whole vocabulary; others are ignored
  int64_t first;              // the slice's first class
  const void* class_weights;  // of the slice, in the dtype of the arithmetic; null: all are 1
  bool smooths;               // whether the weighted sum of the logits is wanted too

  // Where the token's target is in the slice, or -1.
  FUSEDACC_INLINE int64_t target_of(int64_t token) const {
    const int64_t place = target[token] - first;
    return place >= 0 && place < classes ? place : -1;
  }
  template <typename Compute>
  FUSEDACC_INLINE Compute weight_of(int64_t i) const {
    return class_weights == nullptr ? Compute(1) : static_cast<const Compute*>(class_weights)[i];
  }
};

// The larger number; nan if one is nan.
template <typename Compute>
FUSEDACC_INLINE Compute larger(Compute a, Compute b) {
  return a >= b || a != a ? a : b;
}

// The gradient of a token's logit: by * e^(logit - log_sum) - spread * class weight, and - hit at the target.
template <typename Compute>
struct TokenFactors {
  Compute log_sum, by, hit, spread;

  FUSEDACC_INLINE TokenFactors(const SoftmaxSlice& slice, int64_t token) {
    const auto* of_token = static_cast<const Compute*>(slice.numbers) + token;
    log_sum = of_token[0];
    by = of_token[slice.tokens];
    hit = of_token[2 * slice.tokens];
    spread = of_token[3 * slice.tokens];
  }
  FUSEDACC_INLINE Compute gradient(Compute logit, Compute class_weight) const {
    return multiply_add(exponential(logit - log_sum), by, -(spread * class_weight));
  }
};

}  // namespace fusedacc
