// One flat sum, for hooks that add a gradient the moment it comes.
#include "../common/dtypes.h"
#include "parallel.h"

namespace fusedacc::cpu {
namespace {

struct Context {
  Loops::Flat add;
  void* sum;
  const void* gradient;
  Multipliers by;
};

void add_part(int64_t begin, int64_t end, void* opaque) {
  const Context& context = *static_cast<const Context*>(opaque);
  context.add(context.sum, context.gradient, begin, end, context.by, false);
}

}  // namespace
}  // namespace fusedacc::cpu

// sum = keep * sum + scale * gradient, elements in the order of memory; dtypes as in dtypes.h, a pair of
// kPairs.
extern "C" __attribute__((visibility("default"))) void fusedacc_add_flat(void* sum, const void* gradient,
                                                                         int64_t numel,
                                                                         int32_t gradient_dtype,
                                                                         int32_t sum_dtype, double scale,
                                                                         double keep) {
  using namespace fusedacc;
  if (numel == 0) return;
  const int32_t pair = find_pair(static_cast<Dtype>(gradient_dtype), static_cast<Dtype>(sum_dtype));
  cpu::Context context{cpu::loops().flat[pair], sum, gradient, {scale, keep}};
  cpu::parallel_for(numel, cpu::grain(), cpu::add_part, context);
}
