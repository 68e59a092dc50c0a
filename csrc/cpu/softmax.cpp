#include <algorithm>

#include "cpu.h"

namespace fusedacc::cpu {

// An exponential takes as long as so many additions.
constexpr int64_t kCost = 4;

void softmax(const SoftmaxSlice& slice, Dtype dtype) {
  const Loops::Softmax run = loops().softmax[static_cast<int32_t>(dtype)];
  const int64_t least = std::max<int64_t>(1, kGrain / kCost / std::max<int64_t>(1, slice.classes));
  parallel_for(slice.tokens, least, [&](int64_t begin, int64_t end) { run(slice, begin, end); });
}

}  // namespace fusedacc::cpu
