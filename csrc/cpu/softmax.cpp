#include <algorithm>

#include "cpu.h"

namespace fusedacc::cpu {
namespace {

// An exponential takes as long as so many additions.
constexpr int64_t kCost = 4;

int64_t least_tokens(const SoftmaxSlice& slice) {
  return std::max<int64_t>(1, grain() / kCost / std::max<int64_t>(1, slice.classes));
}

template <typename Run, typename Numbers>
struct Context {
  Run run;
  const SoftmaxSlice& slice;
  Numbers* numbers;

  static void part(int64_t begin, int64_t end, void* opaque) {
    const Context& own = *static_cast<const Context*>(opaque);
    own.run(own.slice, own.numbers, begin, end);
  }
};

template <typename Run, typename Numbers>
void run(Run run, const SoftmaxSlice& slice, Numbers* numbers) {
  Context<Run, Numbers> context{run, slice, numbers};
  parallel_for(slice.tokens, least_tokens(slice), Context<Run, Numbers>::part, context);
}

}  // namespace

void softmax_statistics(const SoftmaxSlice& slice, Dtype dtype, void* statistics) {
  run(loops().softmax_statistics[static_cast<int32_t>(dtype)], slice, statistics);
}

void softmax_gradient(const SoftmaxSlice& slice, Dtype dtype, const void* factors) {
  run(loops().softmax_gradient[static_cast<int32_t>(dtype)], slice, factors);
}

}  // namespace fusedacc::cpu
