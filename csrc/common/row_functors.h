// The arithmetic of one row of a table: acc <- acc + s * (g1 + g2 + ...), the sum in the order of the
// gradients, and where it is asked for a mean instead.
//
// Gradients are summed in runs of kRowRun, and then the runs' sums, both from the first on: long sums lose
// less, and a GPU can work on a row's runs at once.
#pragma once

#include "functors.h"

namespace fusedacc {

constexpr int64_t kRowRun = 64;

FUSEDACC_INLINE float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
FUSEDACC_INLINE double divide(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

template <typename Gradient, typename Accumulator>
struct RowAccumulate {
  using Compute = typename ComputeType<Accumulator>::type;

  ScaleAccumulate<Compute, Accumulator> into;

  FUSEDACC_INLINE explicit RowAccumulate(double scale) : into(Multipliers{scale, 1}) {}

  static FUSEDACC_INLINE Compute first(Gradient gradient) { return widen(gradient); }
  static FUSEDACC_INLINE Compute join(Compute sum, Gradient gradient) { return sum + widen(gradient); }
  static FUSEDACC_INLINE Compute mean(Compute sum, int64_t count) {
    return divide(sum, static_cast<Compute>(count));
  }
  FUSEDACC_INLINE Accumulator add(Compute sum, Accumulator accumulator) const {
    return into.template add<false>(sum, accumulator);
  }
};

}  // namespace fusedacc
