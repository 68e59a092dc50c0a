// What one call on the rows of a table has to do, after all checks, and the arithmetic of one row:
// acc <- acc + s * (g1 + g2 + ...), the sum in the order of the gradients, and where it is asked for a mean
// instead. Torch-free.
//
// Gradients are summed in runs of kRowRun, and then the runs' sums, both from the first on: long sums lose
// less, and a GPU can work on a row's runs at once.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace fusedacc {

constexpr int64_t kRowRun = 64;

// Strides in elements; the elements of a row lie side by side.
struct Table {
  void* data;
  int64_t stride;
  int64_t rows;
  int64_t columns;
  int32_t pair;  // an index into kPairs
};

// Row numbers, int64 or int32. On a GPU they are sorted, and `order` says where each stood.
struct RowNumbers {
  const void* data;
  int64_t stride;
  int64_t count;
  bool wide;
  const int64_t* order;

  FUSEDACC_INLINE int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i * stride]
                : static_cast<const int32_t*>(data)[i * stride];
  }
};

// Gradient i belongs to row numbers[i], unless that is `padding`, which is -1 for none.
struct RowWork {
  Table table;
  RowNumbers numbers;
  const void* gradients;
  int64_t gradient_stride;
  int64_t padding;
  bool by_frequency;  // a row takes the mean of its gradients
  Noise noise{};      // where the table's pair is stochastic
};

template <typename Gradient, typename Accumulator>
struct RowAccumulate {
  using Compute = ComputeOf<Accumulator>;

  ScaleAccumulate<Compute, Accumulator> into;

  FUSEDACC_INLINE explicit RowAccumulate(const Multipliers& by) : into(by) {}

  static FUSEDACC_INLINE Compute first(Gradient gradient) { return widen(gradient); }
  static FUSEDACC_INLINE Compute join(Compute sum, Gradient gradient) { return sum + widen(gradient); }
  static FUSEDACC_INLINE Compute mean(Compute sum, int64_t count) {
    return sum / static_cast<Compute>(count);
  }
  FUSEDACC_INLINE Accumulator add(Compute sum, Accumulator accumulator, uint32_t bits = 0) const {
    return into.template add<false>(sum, accumulator, bits);
  }
};

}  // namespace fusedacc
