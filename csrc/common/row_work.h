// What one call on the rows of a table has to do, after all checks. Torch-free.
#pragma once

#include <cstdint>

#include "dtypes.h"
#include "row_functors.h"

namespace fusedacc {

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
};

}  // namespace fusedacc
