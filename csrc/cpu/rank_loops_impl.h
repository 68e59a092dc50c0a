// The loops that add a product of few tokens to a matrix, at the cost of one pass over it. Included like
// loops_impl.h.
#pragma once

#include "gemm.h"
#include "loops_impl.h"

namespace fusedacc::cpu {
namespace {

// Products of rows of the accumulator, summed for a block of its columns: a long one, since
// memory is fetched ahead where it is walked through.
template <typename Compute>
struct RankSums {
  static constexpr int64_t kColumns = 1024, kRows = 4, kGroup = 4;
  // Rows that are no power of two apart, which would have them all in the same few places of the cache.
  static constexpr int64_t kStride = kColumns + 32;
  alignas(kLineBytes) Compute sums[kRows][kStride];

  // The sum over all tokens of factors[token * rows + row] * right[token * stride + column].
  template <int rows>
  void make(const Compute* factors, const Compute* right, int64_t stride, int64_t tokens, int64_t columns) {
    group<rows, true>(factors, right, stride, tokens, columns);
    for (int64_t token = kGroup; token < tokens; token += kGroup) {
      group<rows, false>(factors + token * rows, right + token * stride, stride, tokens - token, columns);
    }
  }

 private:
  // Of the first tokens, a group's at most.
  template <int rows, bool first>
  void group(const Compute* factors, const Compute* right, int64_t stride, int64_t tokens, int64_t columns) {
    if (tokens >= kGroup) return join<rows, kGroup, first>(sums[0], factors, right, stride, columns);
    if (tokens == 3) return join<rows, 3, first>(sums[0], factors, right, stride, columns);
    if (tokens == 2) return join<rows, 2, first>(sums[0], factors, right, stride, columns);
    join<rows, 1, first>(sums[0], factors, right, stride, columns);
  }

  // Apart, so that the sums are seen to be no one else's.
  template <int rows, int tokens, bool first>
  static __attribute__((noinline)) void join(Compute* sums, const Compute* factors, const Compute* right,
                                             int64_t stride, int64_t columns) {
    Compute by[tokens * rows];
    for (int i = 0; i < tokens * rows; ++i) by[i] = factors[i];
    FUSEDACC_INDEPENDENT
    for (int64_t column = 0; column < columns; ++column) {
      // Read before any sum is written, which for all that the compiler knows might change them.
      Compute values[tokens];
#pragma GCC unroll 4
      for (int token = 0; token < tokens; ++token) values[token] = right[token * stride + column];
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row) {
        Compute& sum = sums[row * kStride + column];
        Compute added = first ? by[row] * values[0] : multiply_add(by[row], values[0], sum);
#pragma GCC unroll 4
        for (int token = 1; token < tokens; ++token) {
          added = multiply_add(by[token * rows + row], values[token], added);
        }
        sum = added;
      }
    }
  }

  static FUSEDACC_INLINE Compute multiply_add(Compute a, Compute b, Compute c) {
#if defined(FUSEDACC_SLOW_FMA)
    return a * b + c;
#else
    return fused_multiply_add(a, b, c);
#endif
  }
};

template <int32_t pair>
struct RankLoops {
  using Operand = GradientOf<pair>;
  using Accumulator = AccumulatorOf<pair>;
  using Compute = ComputeOf<Accumulator>;
  using Sums = RankSums<Compute>;
  static constexpr Dtype kCompute = std::is_same_v<Compute, double> ? Dtype::kFloat64 : Dtype::kFloat32;
  using Into = PairLoops<find_pair(kCompute, kPairs[pair].accumulator)>;
  // Elements of right that are kept converted, in the second-level cache.
  static constexpr int64_t kConverted = 16384;

  // Of no more than kRankTokens tokens.
  static void add(const GemmRequest& all) {
    if (std::is_same_v<Operand, Compute> && all.right.col_stride == 1) {
      add_all_rows(all, static_cast<const Compute*>(all.right.data), all.right.row_stride);
      return;
    }
    const int64_t tokens = all.left.rows, cols = all.accumulator.cols;
    alignas(kLineBytes) Compute converted[kConverted];
    const int64_t width = kConverted / tokens / kLineBytes * kLineBytes - kLineBytes;
    for (int64_t first = 0; first < cols; first += width) {
      const int64_t count = cols - first < width ? cols - first : width;
      // As RankSums::kStride: no power of two.
      const int64_t stride = (count + kLineBytes - 1) / kLineBytes * kLineBytes + kLineBytes / 4;
      const GemmRequest part = all.cols_part(first, count);
      for (int64_t token = 0; token < tokens; ++token) convert(converted + token * stride, part.right, token);
      add_all_rows(part, converted, stride);
    }
  }

 private:
  static void convert(Compute* to, const Matrix& right, int64_t token) {
    const auto* from = static_cast<const Operand*>(right.data) + token * right.row_stride;
    if (right.col_stride == 1) {
      for (int64_t i = 0; i < right.cols; ++i) to[i] = widen(from[i]);
    } else {
      for (int64_t i = 0; i < right.cols; ++i) to[i] = widen(from[i * right.col_stride]);
    }
  }

  static Accumulator* row_of(const Matrix& accumulator, int64_t row) {
    return static_cast<Accumulator*>(accumulator.data) + row * accumulator.row_stride;
  }

  static void fetch(const Accumulator* from, int64_t count) {
    for (int64_t i = 0; i < count; i += kLineBytes / static_cast<int64_t>(sizeof(Accumulator))) {
      __builtin_prefetch(from + i, 1);
    }
  }

  static void add_all_rows(const GemmRequest& part, const Compute* right, int64_t stride) {
    int64_t row = 0;
    for (; row + Sums::kRows <= part.accumulator.rows; row += Sums::kRows) {
      add_rows<Sums::kRows>(part, row, right, stride);
    }
    for (; row < part.accumulator.rows; ++row) add_rows<1>(part, row, right, stride);
  }

  template <int rows>
  static void add_rows(const GemmRequest& part, int64_t first, const Compute* right, int64_t stride) {
    const Matrix &left = part.left, &accumulator = part.accumulator;
    const ScaleAccumulate<Compute, Accumulator> functor(Multipliers{part.scale, part.beta, part.noise});
    Compute factors[kRankTokens * rows];
    for (int64_t token = 0; token < left.rows; ++token) {
      const auto* own = static_cast<const Operand*>(left.data) + token * left.row_stride;
      for (int row = 0; row < rows; ++row) {
        factors[token * rows + row] = widen(own[(first + row) * left.col_stride]);
      }
    }
    Sums sums;
    for (int64_t column = 0; column < accumulator.cols; column += Sums::kColumns) {
      const int64_t left_over = accumulator.cols - column;
      const int64_t count = left_over < Sums::kColumns ? left_over : Sums::kColumns;
      // Sums that take longer would leave the memory idle.
      for (int row = 0; left.rows > Sums::kGroup && row < rows; ++row) {
        fetch(row_of(accumulator, first + row) + column, count);
      }
      sums.template make<rows>(factors, right + column, stride, left.rows, count);
      for (int row = 0; row < rows; ++row) {
        const int64_t offset = (first + row) * accumulator.row_stride + column;
        Into::row(row_of(accumulator, first + row) + column, sums.sums[row], count, functor.from(offset),
                  part.beta == 0);
      }
    }
  }
};

}  // namespace
}  // namespace fusedacc::cpu
