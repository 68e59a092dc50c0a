// Products that are added into accumulators, one or one per expert of a mixture; the methods, and the classes
// of tokens for which fusedacc/kernels/cpu_rules.py chooses them. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "../common/dtypes.h"

namespace fusedacc::cpu {

// As documented in fusedacc/kernels/constants.py.
enum class GemmMethod : int64_t { kWhole, kOnednn, kRankK, kMkl };
constexpr int64_t kGemmMethods = 4;
constexpr int64_t kTokenClasses[] = {16, 47, 100};
constexpr int kClasses = sizeof(kTokenClasses) / sizeof(*kTokenClasses) + 1;

constexpr int class_of(int64_t tokens) {
  int number = 0;
  while (number < kClasses - 1 && tokens > kTokenClasses[number]) ++number;
  return number;
}

// Strides in elements. Always inlined, as in common/functors.h, because loops for several instruction sets
// use them.
struct Matrix {
  void* data;
  int64_t rows, cols;
  int64_t row_stride, col_stride;
  Dtype dtype;

  FUSEDACC_INLINE Matrix transposed() const { return {data, cols, rows, col_stride, row_stride, dtype}; }
  FUSEDACC_INLINE Matrix rows_part(int64_t first, int64_t count) const {
    char* begin = static_cast<char*>(data) + first * row_stride * element_size(dtype);
    return {begin, count, cols, row_stride, col_stride, dtype};
  }
  FUSEDACC_INLINE Matrix cols_part(int64_t first, int64_t count) const {
    return transposed().rows_part(first, count).transposed();
  }
  // Whether rows follow each other and are dense, as BLAS requires of a matrix or its transpose.
  bool rows_are_dense() const {
    return (cols == 1 || col_stride == 1) && (rows == 1 || row_stride >= (cols > 0 ? cols : 1));
  }
};

// accumulator <- beta * accumulator + scale * left^T right, for left [n, M], right [n, N] and accumulator [M,
// N]. The accumulator's rows are dense; so are rows or columns of left and of right. If beta is 0, the
// accumulator is not read.
struct GemmRequest {
  Matrix accumulator, left, right;
  double scale, beta;

  // Returns the product for some rows, or some columns, of the accumulator.
  FUSEDACC_INLINE GemmRequest rows_part(int64_t first, int64_t count) const {
    return {accumulator.rows_part(first, count), left.cols_part(first, count), right, scale, beta};
  }
  FUSEDACC_INLINE GemmRequest cols_part(int64_t first, int64_t count) const {
    return {accumulator.cols_part(first, count), left, right.cols_part(first, count), scale, beta};
  }
  // Returns the product of some tokens. Those of all parts are to be added in order.
  FUSEDACC_INLINE GemmRequest tokens_part(int64_t first, int64_t count) const {
    const double beta_of_part = first == 0 ? beta : 1.0;
    return {accumulator, left.rows_part(first, count), right.rows_part(first, count), scale, beta_of_part};
  }
};

// Products of groups of rows, each into a separate accumulator, as in a mixture of experts. The accumulator
// of expert e is `all.accumulator`, moved by e * stride elements; its rows of left and right are those from
// ends[e - 1] (or 0) to ends[e].
struct GroupedRequest {
  GemmRequest all;
  int64_t stride;
  const std::vector<int64_t>& ends;
  int64_t rank_k_tokens;  // GemmMethod::kRankK adds experts with at most so many tokens
  GemmMethod method;      // adds experts with more

  int64_t experts() const { return static_cast<int64_t>(ends.size()); }
  int64_t first_token(int64_t expert) const { return expert == 0 ? 0 : ends[expert - 1]; }
  int64_t tokens(int64_t expert) const { return ends[expert] - first_token(expert); }
  GemmMethod method_for(int64_t tokens) const {
    return tokens <= rank_k_tokens ? GemmMethod::kRankK : method;
  }
  GemmRequest product(int64_t expert) const {
    GemmRequest product = all.tokens_part(first_token(expert), tokens(expert));
    const int64_t offset = expert * stride * element_size(product.accumulator.dtype);
    product.accumulator.data = static_cast<char*>(product.accumulator.data) + offset;
    product.beta = all.beta;  // tokens_part() keeps it for the first token only
    return product;
  }
};

}  // namespace fusedacc::cpu
