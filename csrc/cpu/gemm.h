// A product that is added into an accumulator, the ways to multiply, and which of them may be chosen for how
// many tokens. Torch-free.
#pragma once

#include <cstdint>

#include "../common/dtypes.h"

namespace fusedacc::cpu {

// As in fusedacc/kernels/constants.py, which says what the ways are.
enum class Way : int64_t { kWhole, kSplit, kRounded, kRankK };
constexpr int64_t kTokenClasses[] = {16, 47, 100};
constexpr int kClasses = sizeof(kTokenClasses) / sizeof(*kTokenClasses) + 1;

constexpr int class_of(int64_t tokens) {
  int number = 0;
  while (number < kClasses - 1 && tokens > kTokenClasses[number]) ++number;
  return number;
}

// Strides in elements. Always inlined, as in common/functors.h: loops for several instruction sets use them.
struct Matrix {
  void* data;
  int64_t rows, cols;
  int64_t row_stride, col_stride;
  Dtype dtype;

  FUSEDACC_INLINE Matrix transposed() const { return {data, cols, rows, col_stride, row_stride, dtype}; }
  FUSEDACC_INLINE Matrix part(int64_t row, int64_t row_count, int64_t col, int64_t col_count) const {
    const int64_t first = row * row_stride + col * col_stride;
    return {static_cast<char*>(data) + first * element_size(dtype),
            row_count,
            col_count,
            row_stride,
            col_stride,
            dtype};
  }
  // Whether rows lie one after another, each without gaps, as BLAS needs them: of the matrix or of its
  // transpose.
  bool rows_are_dense() const {
    return (cols == 1 || col_stride == 1) && (rows == 1 || row_stride >= (cols > 0 ? cols : 1));
  }
};

// accumulator <- beta * accumulator + scale * left^T right, for left [n, M], right [n, N] and accumulator
// [M, N]. The rows of the accumulator are dense, and rows or columns of left and of right. Where beta is 0,
// the accumulator is not read. noise: where the accumulator is rounded stochastically.
struct GemmRequest {
  Matrix accumulator, left, right;
  double scale, beta;
  Noise noise{};

  // The product of some rows of the accumulator, or of some of its columns.
  FUSEDACC_INLINE GemmRequest rows_part(int64_t first, int64_t count) const {
    return {accumulator.part(first, count, 0, accumulator.cols),
            left.part(0, left.rows, first, count),
            right,
            scale,
            beta,
            noise.from(first * accumulator.row_stride)};
  }
  FUSEDACC_INLINE GemmRequest cols_part(int64_t first, int64_t count) const {
    return {accumulator.part(0, accumulator.rows, first, count),
            left,
            right.part(0, right.rows, first, count),
            scale,
            beta,
            noise.from(first)};
  }
};

}  // namespace fusedacc::cpu
