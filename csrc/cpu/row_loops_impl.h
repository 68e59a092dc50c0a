// The loop that adds to one row of a table. Included like loops_impl.h.
#pragma once

#include "../common/row_work.h"
#include "loops_impl.h"

namespace fusedacc::cpu {
namespace {

// Columns whose sums stay in the first-level cache while the row's gradients pass.
constexpr int64_t kRowBlock = 2048;

template <int32_t pair>
struct RowLoops {
  using Gradient = GradientOf<pair>;
  using Accumulator = AccumulatorOf<pair>;
  using Functor = RowAccumulate<Gradient, Accumulator>;
  using Compute = typename Functor::Compute;
  static constexpr Dtype kCompute = std::is_same_v<Compute, double> ? Dtype::kFloat64 : Dtype::kFloat32;
  using Into = PairLoops<find_pair(kCompute, kPairs[pair].accumulator)>;

  static void add(void* row, const RowGradients& gradients, int64_t begin, int64_t end, const Multipliers& by,
                  bool by_frequency) {
    auto* target = static_cast<Accumulator*>(row);
    if (gradients.count == 1) {
      const ScaleAccumulate<Gradient, Accumulator> functor(by);
      PairLoops<pair>::row(target + begin, at(gradients, 0) + begin, end - begin, functor.from(begin), false);
      return;
    }
    const Functor functor(by);
    for (int64_t column = begin; column < end; column += kRowBlock) {
      const int64_t length = end - column < kRowBlock ? end - column : kRowBlock;
      alignas(kLineBytes) Compute sums[kRowBlock];
      sum(sums, gradients, column, length);
      if (by_frequency) {
        for (int64_t i = 0; i < length; ++i) sums[i] = Functor::mean(sums[i], gradients.count);
      }
      Into::with_bits(target + column, sums, length, functor.into.from(column),
                      [&](int64_t first, int64_t count, auto bits) {
                        Accumulator* into = target + column + first;
                        FUSEDACC_INDEPENDENT
                        for (int64_t i = 0; i < count; ++i)
                          into[i] = functor.add(sums[first + i], into[i], bits[i]);
                      });
    }
  }

 private:
  static const Gradient* at(const RowGradients& gradients, int64_t i) {
    return static_cast<const Gradient*>(gradients.data) + gradients.places[i].position * gradients.stride;
  }

  static void sum(Compute* sums, const RowGradients& gradients, int64_t column, int64_t length) {
    sum_run(sums, gradients, 0, column, length);
    for (int64_t first = kRowRun; first < gradients.count; first += kRowRun) {
      alignas(kLineBytes) Compute run[kRowBlock];
      sum_run(run, gradients, first, column, length);
      for (int64_t i = 0; i < length; ++i) sums[i] += run[i];
    }
  }

  static void sum_run(Compute* sums, const RowGradients& gradients, int64_t first, int64_t column,
                      int64_t length) {
    const int64_t left = gradients.count - first;
    const Gradient* gradient = at(gradients, first) + column;
    FUSEDACC_INDEPENDENT
    for (int64_t i = 0; i < length; ++i) sums[i] = Functor::first(gradient[i]);
    for (int64_t k = 1; k < (left < kRowRun ? left : kRowRun); ++k) {
      join(sums, at(gradients, first + k) + column, length);
    }
  }

  // On its own: where compilers see the loop around it they join its rounds by twos, and then vectorise none.
  static __attribute__((noinline)) void join(Compute* sums, const Gradient* gradient, int64_t length) {
    FUSEDACC_INDEPENDENT
    for (int64_t i = 0; i < length; ++i) sums[i] = Functor::join(sums[i], gradient[i]);
  }
};

}  // namespace
}  // namespace fusedacc::cpu
