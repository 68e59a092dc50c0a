// The operator grouped_accumulate_: its arguments, checked, for a CPU.
#include "../cpu/grouped.h"

#include <utility>
#include <vector>

#include "../cpu/cpu.h"
#include "products.h"

namespace fusedacc {
namespace {

using cpu::GroupedRequest;

// Where each expert's rows end. `tokens`: the rows that there are.
std::vector<int64_t> read_ends(const OwnedTensor& tensor, const TensorView& accumulator, int64_t tokens) {
  const TensorView view = view_of(tensor.get(), "offsets", 1);
  if (view.dtype != aoti_torch_dtype_int32()) {
    const bool wide = view.dtype == aoti_torch_dtype_int64();
    fail("offsets",
         std::string("has ") + (wide ? "int64" : dtype_name(dtype_of(view))) + "; it must be int32");
  }
  check_beside("offsets", view, {"accumulator is", accumulator.device});
  if (view.sizes[0] != accumulator.sizes[0]) {
    fail("offsets", "has " + std::to_string(view.sizes[0]) + " elements; it must have " +
                        std::to_string(accumulator.sizes[0]) + ", one for each matrix of accumulator");
  }
  std::vector<int64_t> ends(static_cast<size_t>(view.sizes[0]));
  int64_t least = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    ends[i] = static_cast<const int32_t*>(view.data)[static_cast<int64_t>(i) * view.strides[0]];
    if (ends[i] < least || ends[i] > tokens) {
      fail({"offsets", static_cast<int64_t>(i)},
           "is " + std::to_string(ends[i]) + "; allowed: " + std::to_string(least) + " to " +
               std::to_string(tokens) + ", from the offset before to the rows of left");
    }
    least = ends[i];
  }
  return ends;
}

// stack: accumulator, left, right, offsets, scale_tensor, scale, keep_tensor, keep, rank_k_tokens,
// rounded_tokens, seed, streams.
void grouped_accumulate_(StableIValue* stack, uint64_t, uint64_t) {
  const OwnedTensor accumulator_tensor(reinterpret_cast<AtenTensorHandle>(stack[0]));
  const OwnedTensor left_tensor(reinterpret_cast<AtenTensorHandle>(stack[1]));
  const OwnedTensor right_tensor(reinterpret_cast<AtenTensorHandle>(stack[2]));
  const OwnedTensor offsets_tensor(reinterpret_cast<AtenTensorHandle>(stack[3]));
  const OwnedTensor scale_tensor(take_optional(stack[4]));
  const OwnedTensor beta_tensor(take_optional(stack[6]));
  const NoiseArgument noise(stack + 10);
  const Argument accumulator("accumulator", accumulator_tensor, 3);
  const Argument left("left", left_tensor), right("right", right_tensor);
  const TensorView& into = accumulator.view;
  check_operands(accumulator, left, right);
  const std::vector<int64_t> ends = read_ends(offsets_tensor, into, left.view.sizes[0]);
  const double scale = factor("scale", scale_tensor, stack[5]), beta = factor("keep", beta_tensor, stack[7]);
  const int64_t rank_k_tokens = value_of<int64_t>(stack[8]), rounded_tokens = value_of<int64_t>(stack[9]);
  if (rank_k_tokens < 0 || rank_k_tokens > cpu::kRankTokens) {
    fail("rank_k_tokens",
         "is " + std::to_string(rank_k_tokens) + "; allowed: 0 to " + std::to_string(cpu::kRankTokens));
  }
  if (into.sizes[0] == 0 || into.sizes[1] == 0 || into.sizes[2] == 0) return;
  const bool row_major = is_row_major(accumulator);
  bool dense = false;
  if (!strides_nest(3, into.sizes, into.strides, dense)) {
    fail("accumulator", "overlaps itself: strides " + shape_name(into.strides, 3) + " for shape " +
                            shape_name(into.sizes, 3));
  }
  OwnedTensor left_memory(nullptr), right_memory(nullptr);
  GroupedRequest request{{rounded_matrix(accumulator, left, noise), for_blas(left_tensor, left, left_memory),
                          for_blas(right_tensor, right, right_memory), scale, beta, noise.noise()},
                         into.strides[0],
                         ends,
                         rank_k_tokens,
                         rounded_tokens};
  if (!row_major) {
    cpu::GemmRequest& all = request.all;
    all.accumulator = all.accumulator.transposed();
    std::swap(all.left, all.right);
  }
  cpu::run_grouped(request);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedacc, CompositeExplicitAutograd, m) {
  m.impl("grouped_accumulate_", &grouped_accumulate_);
}

}  // namespace fusedacc
