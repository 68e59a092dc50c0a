// The arguments of one BLAS call for a GemmRequest. Torch-free, pure host.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "../../common/gemm.h"

namespace fusedacc::cuda {

// As BLAS numbers them.
enum class Operation : int32_t { kNone = 0, kTranspose = 1 };

struct BlasOperand {
  const void* data;
  Operation operation;
  int32_t leading;
};

// c <- beta * c + alpha * op(a) op(b), all by columns; c is m x n, op(a) m x k, op(b) k x n.
struct BlasCall {
  int32_t m, n, k;
  BlasOperand a, b;
  void* c;
  int32_t c_leading;
};

inline int32_t blas_size(int64_t size) {
  if (size > std::numeric_limits<int32_t>::max()) {
    throw std::runtime_error("fusedacc: a matrix has a size or stride of " + std::to_string(size) +
                             "; cuBLAS takes at most 2147483647");
  }
  return static_cast<int32_t>(size);
}

// `matrix` by columns is its own transpose, whose columns are the matrix's rows.
inline BlasOperand blas_operand(const Matrix& matrix, bool transposed) {
  const bool by_rows = rows_are_dense(matrix);
  return {matrix.data, by_rows == transposed ? Operation::kTranspose : Operation::kNone,
          blas_size(leading_dimension(by_rows ? matrix : matrix.transposed()))};
}

// By columns, the memory of the accumulator [M, N] is its transpose: right^T left.
inline BlasCall blas_call(const GemmRequest& request) {
  const Matrix& sum = request.accumulator;
  return {blas_size(sum.cols),
          blas_size(sum.rows),
          blas_size(request.left.rows),
          blas_operand(request.right, false),
          blas_operand(request.left, true),
          sum.data,
          blas_size(leading_dimension(sum))};
}

}  // namespace fusedacc::cuda
