#include <algorithm>

#include "cpu.h"

namespace fusedacc::cpu {
namespace {

// An exponential takes as long as so many additions.
constexpr int64_t kCost = 4;

struct Context {
  Loops::Softmax run;
  const SoftmaxSlice& slice;
};

}  // namespace

void softmax(const SoftmaxSlice& slice, Dtype dtype) {
  Context context{loops().softmax[static_cast<int32_t>(dtype)], slice};
  const auto part = [](int64_t begin, int64_t end, void* opaque) {
    const Context& own = *static_cast<const Context*>(opaque);
    own.run(own.slice, begin, end);
  };
  const int64_t least = std::max<int64_t>(1, grain() / kCost / std::max<int64_t>(1, slice.classes));
  parallel_for(slice.tokens, least, +part, context);
}

}  // namespace fusedacc::cpu
