// Runs the torch-free description of a BLAS call on the host, by a plain product over columns, against the
// product of the matrices as they are. Prints what fails and exits with 1.
#include "cuda/device/blas_call.h"

#include <cstdio>
#include <vector>

#include "check.h"

using namespace fusedacc;

namespace {

// Room for a matrix whose rows (or columns) lie without gaps, `extra` elements apart; whole numbers, so that
// products are exact.
struct Room {
  std::vector<float> memory;
  Matrix matrix;

  Room(int64_t rows, int64_t cols, bool by_rows, int64_t extra) {
    const int64_t inner = by_rows ? cols : rows, outer = by_rows ? rows : cols;
    memory.resize((inner + extra) * outer + 1);
    for (float& value : memory) value = static_cast<float>(random_below(17) - 8);
    matrix = {memory.data(),  rows, cols, by_rows ? inner + extra : 1, by_rows ? 1 : inner + extra,
              Dtype::kFloat32};
  }
};

float at(const Matrix& matrix, int64_t row, int64_t col) {
  return static_cast<const float*>(matrix.data)[row * matrix.row_stride + col * matrix.col_stride];
}

// op(operand)[row, col] of a matrix by columns.
float at(const cuda::BlasOperand& operand, int64_t row, int64_t col) {
  if (operand.operation == cuda::Operation::kTranspose) std::swap(row, col);
  return static_cast<const float*>(operand.data)[row + col * operand.leading];
}

// What BLAS demands of leading dimensions, and the product as BLAS defines it.
void run_blas(const cuda::BlasCall& call, float alpha, float beta) {
  const bool a_turned = call.a.operation == cuda::Operation::kTranspose;
  const bool b_turned = call.b.operation == cuda::Operation::kTranspose;
  CHECK(call.a.leading >= (a_turned ? call.k : call.m) && call.a.leading >= 1);
  CHECK(call.b.leading >= (b_turned ? call.n : call.k) && call.b.leading >= 1);
  CHECK(call.c_leading >= call.m && call.c_leading >= 1);
  for (int64_t row = 0; row < call.m; ++row) {
    for (int64_t col = 0; col < call.n; ++col) {
      float sum = 0;
      for (int64_t i = 0; i < call.k; ++i) sum += at(call.a, row, i) * at(call.b, i, col);
      float& c = static_cast<float*>(call.c)[row + col * call.c_leading];
      c = beta * c + alpha * sum;
    }
  }
}

void check_products() {
  for (int round = 0; round < 20000; ++round) {
    const int64_t m = 1 + random_below(5), n = 1 + random_below(5), tokens = 1 + random_below(5);
    Room left(tokens, m, random_below(2), random_below(3)),
        right(tokens, n, random_below(2), random_below(3));
    Room sum(m, n, true, random_below(3));
    const std::vector<float> before = sum.memory;
    Matrix old = sum.matrix;
    old.data = const_cast<float*>(before.data());
    // A single row or column may have any stride in the other direction.
    if (left.matrix.rows == 1 && random_below(2)) left.matrix.row_stride = random_below(9);
    if (right.matrix.cols == 1 && random_below(2)) right.matrix.col_stride = random_below(9);
    if (sum.matrix.rows == 1 && random_below(2)) sum.matrix.row_stride = random_below(9);
    const auto usable = [](const Matrix& matrix) {
      return rows_are_dense(matrix) || rows_are_dense(matrix.transposed());
    };
    CHECK(rows_are_dense(sum.matrix));
    if (!usable(left.matrix) || !usable(right.matrix)) continue;
    run_blas(cuda::blas_call({sum.matrix, left.matrix, right.matrix, {}, {}}), 2, 3);
    std::vector<float> expected = before;
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t col = 0; col < n; ++col) {
        float product = 0;
        for (int64_t i = 0; i < tokens; ++i) product += at(left.matrix, i, row) * at(right.matrix, i, col);
        expected[row * sum.matrix.row_stride + col] = 3 * at(old, row, col) + 2 * product;
      }
    }
    CHECK(sum.memory == expected);
  }
}

void check_layouts() {
  const auto matrix = [](int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
    return Matrix{nullptr, rows, cols, row_stride, col_stride, Dtype::kFloat32};
  };
  CHECK(rows_are_dense(matrix(3, 4, 4, 1)) && rows_are_dense(matrix(3, 4, 9, 1)));
  CHECK(!rows_are_dense(matrix(3, 4, 1, 3)) && rows_are_dense(matrix(3, 4, 1, 3).transposed()));
  CHECK(!rows_are_dense(matrix(3, 4, 0, 1)) && !rows_are_dense(matrix(3, 4, 3, 1)));
  CHECK(!rows_are_dense(matrix(3, 4, 8, 2)) && !rows_are_dense(matrix(3, 4, 8, 2).transposed()));
  CHECK(leading_dimension(matrix(1, 4, 0, 1)) == 4);
}

void check_sizes() {
  const int64_t large = int64_t{1} << 31;
  CHECK(cuda::blas_size(large - 1) == large - 1);
  bool refused = false;
  try {
    cuda::blas_size(large);
  } catch (const std::runtime_error&) {
    refused = true;
  }
  CHECK(refused);
}

void check_parts() {
  Room room(6, 5, true, 2);
  const Matrix part = room.matrix.part(1, 3, 2, 2);
  CHECK(part.rows == 3 && part.cols == 2 && at(part, 2, 1) == at(room.matrix, 3, 3));
}

}  // namespace

int main() {
  check_layouts();
  check_parts();
  check_sizes();
  check_products();
  std::printf("products agree\n");
}
