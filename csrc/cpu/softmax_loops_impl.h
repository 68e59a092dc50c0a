// The loops of a softmax over slices of the vocabulary: rows of logits, of which each is some thousand
// elements and stays in the first-level cache. Included like loops_impl.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "../common/softmax.h"
#include "loops_impl.h"

namespace fusedacc::cpu {
namespace {

template <Dtype dtype>
struct SoftmaxLoops {
  using Element = ElementOf<dtype>;
  using Compute = ComputeOf<Element>;
  static constexpr int64_t kBlock = kSoftmaxBlock, kLanes = kSoftmaxLanes;

  // Elements that are converted at a time: compilers vectorise that loop, and not one that does both.
  struct Block {
    alignas(kLineBytes) Compute values[kBlock];

    FUSEDACC_INLINE const Compute* load(const Element* from, int64_t count) {
      if constexpr (std::is_same_v<Element, Compute>) return from;
      FUSEDACC_INDEPENDENT
      for (int64_t i = 0; i < count; ++i) values[i] = widen(from[i]);
      return values;
    }
  };

  // Joins elements by `join`, in lanes, so that compilers may vectorise it.
  template <typename Join>
  static FUSEDACC_INLINE Compute joined(const Compute* values, int64_t count, Compute start, Join&& join) {
    Compute lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = start;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = join(lanes[lane], values[i + lane]);
    }
    for (int64_t lane = 0; i < count; ++i, ++lane) lanes[lane] = join(lanes[lane], values[i]);
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
      for (int64_t lane = 0; lane < half; ++lane) lanes[lane] = join(lanes[lane], lanes[lane + half]);
    }
    return lanes[0];
  }

  template <typename Visit>
  static FUSEDACC_INLINE void for_blocks(int64_t count, Visit&& visit) {
    for (int64_t i = 0; i < count; i += kBlock) visit(i, count - i < kBlock ? count - i : kBlock);
  }

  static void run(const SoftmaxSlice& slice, int64_t begin, int64_t end) {
    slice.is_gradient ? gradient(slice, begin, end) : statistics(slice, begin, end);
  }

 private:
  static void statistics(const SoftmaxSlice& slice, int64_t begin, int64_t end) {
    auto* statistics = static_cast<Compute*>(slice.numbers);
    const auto* class_weights = static_cast<const Compute*>(slice.class_weights);
    const auto sum = [](Compute a, Compute b) { return a + b; };
    const auto most_of = [](Compute a, Compute b) { return larger(a, b); };
    Block block;
    for (int64_t token = begin; token < end; ++token) {
      const Element* row = row_of(slice, token);
      Compute& top = statistics[token];
      Compute most = top, total = 0, weighted = 0;
      for_blocks(slice.classes, [&](int64_t i, int64_t count) {
        const Compute* values = block.load(row + i, count);
        most = joined(values, count, most, most_of);
        if (!slice.smooths) return;
        Compute* products = block.values;
        FUSEDACC_INDEPENDENT
        for (int64_t k = 0; k < count; ++k) {
          products[k] = class_weights == nullptr ? values[k] : values[k] * class_weights[i + k];
        }
        weighted += joined(products, count, Compute(0), sum);
      });
      if (slice.smooths) statistics[3 * slice.tokens + token] += weighted;
      const int64_t target = slice.target_of(token);
      if (target >= 0) statistics[2 * slice.tokens + token] = widen(row[target]);
      if (most == -INFINITY) continue;  // the sum is still that of nothing
      for_blocks(slice.classes, [&](int64_t i, int64_t count) {
        const Compute* values = block.load(row + i, count);
        FUSEDACC_INDEPENDENT
        for (int64_t k = 0; k < count; ++k) block.values[k] = exponential(values[k] - most);
        total += joined(block.values, count, Compute(0), sum);
      });
      Compute& sum = statistics[slice.tokens + token];
      sum = sum * exponential(top - most) + total;
      top = most;
    }
  }

  static void gradient(const SoftmaxSlice& slice, int64_t begin, int64_t end) {
    const auto* class_weights = static_cast<const Compute*>(slice.class_weights);
    Compute ones[kBlock];
    std::fill(ones, ones + kBlock, Compute(1));
    Block block;
    for (int64_t token = begin; token < end; ++token) {
      Element* row = row_of(slice, token);
      const TokenFactors<Compute> factors(slice, token);
      const int64_t target = slice.target_of(token);
      Compute of_target = 0;
      if (target >= 0) {
        of_target = factors.gradient(widen(row[target]), slice.weight_of<Compute>(target)) - factors.hit;
      }
      for_blocks(slice.classes, [&](int64_t i, int64_t count) {
        const Compute* values = block.load(row + i, count);
        const Compute* weights = class_weights == nullptr ? ones : class_weights + i;
        FUSEDACC_INDEPENDENT
        for (int64_t k = 0; k < count; ++k) block.values[k] = factors.gradient(values[k], weights[k]);
        FUSEDACC_INDEPENDENT
        for (int64_t k = 0; k < count; ++k) row[i + k] = narrow<Element, Compute>(block.values[k]);
      });
      if (target >= 0) row[target] = narrow<Element, Compute>(of_target);
    }
  }

  static Element* row_of(const SoftmaxSlice& slice, int64_t token) {
    return static_cast<Element*>(slice.logits) + token * slice.classes;
  }
};

}  // namespace
}  // namespace fusedacc::cpu
