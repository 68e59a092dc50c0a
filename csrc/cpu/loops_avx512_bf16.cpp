#include "loops_impl.h"

namespace fusedacc::cpu {
namespace {

template <int32_t pair>
void multiply_pairs(Loops& loops) {
  if constexpr (RankLoops<pair>::kPaired) loops.add_rank_k[pair] = RankLoops<pair>::add;
}

template <int32_t... pairs>
void multiply_pairs(Loops& loops, std::integer_sequence<int32_t, pairs...>) {
  (multiply_pairs<pairs>(loops), ...);
}

}  // namespace

Loops avx512_bf16_loops(int64_t norm_ahead_bytes) {
  Loops loops = kAvx512Loops;
  loops.name = "avx512_bf16";
  loops.norm_ahead_bytes = norm_ahead_bytes;
  multiply_pairs(loops, std::make_integer_sequence<int32_t, kNearestPairCount>());
  return loops;
}

}  // namespace fusedacc::cpu
