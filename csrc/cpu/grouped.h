// Products of groups of rows, each into an accumulator of its own: those of a mixture of experts. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "gemm.h"

namespace fusedacc::cpu {

// Of expert e the accumulator is `all.accumulator`, e times `stride` elements further, and the rows of left
// and right are those from ends[e - 1] (or 0) to ends[e].
struct GroupedRequest {
  GemmRequest all;
  int64_t stride;
  const std::vector<int64_t>& ends;
  int64_t rank_k_tokens;   // with so many tokens at most: by the loops of rank_loops_impl.h; <= kRankTokens
  int64_t rounded_tokens;  // of bfloat16 with so many at least: by Way::kRounded

  int64_t experts() const { return static_cast<int64_t>(ends.size()); }
  int64_t first_token(int64_t expert) const { return expert == 0 ? 0 : ends[expert - 1]; }
  int64_t tokens(int64_t expert) const { return ends[expert] - first_token(expert); }
  bool rounds(int64_t tokens) const { return all.left.dtype == Dtype::kBFloat16 && tokens >= rounded_tokens; }
  bool is_rank_k(int64_t tokens) const { return tokens <= rank_k_tokens && !rounds(tokens); }
  GemmRequest product(int64_t expert) const {
    const int64_t first = first_token(expert), count = tokens(expert);
    Matrix accumulator = all.accumulator;
    accumulator.data =
        static_cast<char*>(accumulator.data) + expert * stride * element_size(accumulator.dtype);
    return {accumulator,
            all.left.part(first, count, 0, all.left.cols),
            all.right.part(first, count, 0, all.right.cols),
            all.scale,
            all.beta,
            all.noise.from(expert * stride)};
  }
};

}  // namespace fusedacc::cpu
