// A product that is added into a sum, as the devices get it after all checks. Torch-free.
#pragma once

#include <cstdint>

#include "chunk_plan.h"
#include "dtypes.h"

namespace fusedacc {

// Strides in elements.
struct Matrix {
  void* data;
  int64_t rows, cols;
  int64_t row_stride, col_stride;
  Dtype dtype;

  Matrix transposed() const { return {data, cols, rows, col_stride, row_stride, dtype}; }
  Matrix part(int64_t row, int64_t row_count, int64_t col, int64_t col_count) const {
    const int64_t first = row * row_stride + col * col_stride;
    return {static_cast<char*>(data) + first * element_size(dtype),
            row_count,
            col_count,
            row_stride,
            col_stride,
            dtype};
  }
  int64_t bytes() const { return rows * cols * element_size(dtype); }
};

// Whether rows lie one after another, each without gaps: what BLAS calls a leading dimension is then
// leading_dimension(). The transpose of a matrix is one whose columns lie so.
inline bool rows_are_dense(const Matrix& matrix) {
  return (matrix.cols == 1 || matrix.col_stride == 1) &&
         (matrix.rows == 1 || matrix.row_stride >= (matrix.cols > 0 ? matrix.cols : 1));
}

inline int64_t leading_dimension(const Matrix& dense) {
  const int64_t least = dense.cols > 0 ? dense.cols : 1;
  return dense.rows == 1 ? least : dense.row_stride;
}

// accumulator <- keep * accumulator + scale * left^T right, for left [n, M], right [n, N] and accumulator
// [M, N]. The rows of the accumulator are dense, and rows or columns of left and of right. Where keep is 0,
// the accumulator is not read.
struct GemmRequest {
  Matrix accumulator, left, right;
  ScaleArgument scale, keep;
};

}  // namespace fusedacc
