// The operators that multiply, gemm_accumulate_ and grouped_accumulate_: their arguments, checked, for
// torch's BLAS and oneDNN on a CPU. Elsewhere fusedacc/kernels/matmul_eager.py has torch's own products.
#include <utility>
#include <vector>

#include "../cpu/cpu.h"
#include "arguments.h"
#include "tensor_checks.h"

namespace fusedacc {
namespace {

using cpu::GemmRequest;
using cpu::GroupedRequest;
using cpu::Matrix;

// An argument, for as long as its tensor lives.
struct Argument {
  const char* name;
  TensorView view;

  Argument(const char* name, const OwnedTensor& tensor, int64_t dims = 2)
      : name(name), view(view_of(tensor.get(), name, dims)) {}
  // Its last two dimensions.
  Matrix matrix() const {
    const int64_t rows = view.dims - 2, cols = view.dims - 1;
    return {view.data,          view.sizes[rows],   view.sizes[cols],
            view.strides[rows], view.strides[cols], dtype_of(view)};
  }
};

// Checks an operand against the accumulator, of whose dimension `along` it makes the elements.
void check_operand(const Argument& operand, const TensorView& accumulator, int64_t along) {
  const TensorView& view = operand.view;
  check_beside(operand.name, view, {"accumulator is", accumulator.device});
  checked_pair(operand.name, dtype_of(view), "accumulator", dtype_of(accumulator));
  if (view.sizes[1] != accumulator.sizes[along]) {
    fail(operand.name, "has shape " + shape_name(view.sizes, 2) + " but accumulator has " +
                           shape_name(accumulator.sizes, accumulator.dims));
  }
  if (overlap(view, accumulator)) fail(operand.name, "overlaps accumulator in memory");
}

// Checks left [n, M] and right [n, N] against each other and the accumulator [..., M, N], which must be on a
// CPU.
void check_operands(const Argument& accumulator, const Argument& left, const Argument& right) {
  const TensorView& into = accumulator.view;
  if (into.device != Device::cpu())
    fail("accumulator", "is on " + into.device.name() + "; it must be on cpu");
  check_operand(left, into, into.dims - 2);
  check_operand(right, into, into.dims - 1);
  if (left.view.dtype != right.view.dtype) {
    fail("right", std::string("has ") + dtype_name(dtype_of(right.view)) + " but left has " +
                      dtype_name(dtype_of(left.view)));
  }
  if (left.view.sizes[0] != right.view.sizes[0]) {
    fail("right", "has " + std::to_string(right.view.sizes[0]) + " rows but left has " +
                      std::to_string(left.view.sizes[0]));
  }
}

// Whether the accumulator's matrices have dense rows; refuses those that have dense columns neither.
bool is_row_major(const Argument& accumulator) {
  const Matrix into = accumulator.matrix();
  if (into.rows_are_dense()) return true;
  if (into.transposed().rows_are_dense()) return false;
  fail("accumulator", "has strides " + shape_name(accumulator.view.strides, accumulator.view.dims) +
                          "; its rows or its columns must lie without gaps and not overlap");
}

// A number, or what a 0-dim tensor beside the accumulator holds.
double factor(const char* name, const OwnedTensor& tensor, StableIValue number) {
  return read_scale<double>(
      scalar_argument(name, tensor.get(), value_of<double>(number), {"accumulator is", Device::cpu()}));
}

// The operand itself, or a copy with dense rows, which `memory` then owns.
Matrix for_blas(const OwnedTensor& tensor, const Argument& operand, OwnedTensor& memory) {
  const Matrix own = operand.matrix();
  if (own.rows == 0 || own.cols == 0 || own.rows_are_dense() || own.transposed().rows_are_dense()) return own;
  memory.reset(empty({own.rows, own.cols}, operand.view.dtype, operand.view.device));
  FUSEDACC_SHIM(aoti_torch_copy_(memory.get(), tensor.get(), 0));
  return {data_of(memory), own.rows, own.cols, own.cols, 1, own.dtype};
}

// The accumulator as it is to be rounded.
Matrix rounded_matrix(const Argument& accumulator, const Argument& operand, const NoiseArgument& noise) {
  Matrix into = accumulator.matrix();
  const int32_t pair =
      rounded_pair(operand.name, dtype_of(operand.view), "accumulator", into.dtype, noise.rounds());
  into.dtype = kPairs[pair].accumulator;
  return into;
}

// stack: accumulator, left, right, scale_tensor, scale, keep_tensor, keep, way, seed, streams.
void gemm_accumulate_(StableIValue* stack, uint64_t, uint64_t) {
  const OwnedTensor accumulator_tensor(reinterpret_cast<AtenTensorHandle>(stack[0]));
  const OwnedTensor left_tensor(reinterpret_cast<AtenTensorHandle>(stack[1]));
  const OwnedTensor right_tensor(reinterpret_cast<AtenTensorHandle>(stack[2]));
  const OwnedTensor scale_tensor(take_optional(stack[3]));
  const OwnedTensor beta_tensor(take_optional(stack[5]));
  const NoiseArgument noise(stack + 8);
  const Argument accumulator("accumulator", accumulator_tensor);
  const Argument left("left", left_tensor), right("right", right_tensor);
  check_operands(accumulator, left, right);
  const double scale = factor("scale", scale_tensor, stack[4]), beta = factor("keep", beta_tensor, stack[6]);
  const int64_t way = value_of<int64_t>(stack[7]);
  if (way < 0 || way > static_cast<int64_t>(cpu::GemmMethod::kMixed)) {
    fail("way", "is " + std::to_string(way) + "; allowed: those of csrc/cpu/gemm.h");
  }
  const Matrix into = rounded_matrix(accumulator, left, noise);
  if (into.rows == 0 || into.cols == 0) return;
  const bool row_major = is_row_major(accumulator);
  OwnedTensor left_memory(nullptr), right_memory(nullptr);
  const Matrix first = for_blas(left_tensor, left, left_memory);
  const Matrix second = for_blas(right_tensor, right, right_memory);
  // By columns it is the transpose that has dense rows: right^T left.
  const GemmRequest request = row_major
                                  ? GemmRequest{into, first, second, scale, beta, noise.noise()}
                                  : GemmRequest{into.transposed(), second, first, scale, beta, noise.noise()};
  cpu::run_gemm(request, static_cast<cpu::GemmMethod>(way));
}

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
  m.impl("gemm_accumulate_", &gemm_accumulate_);
  m.impl("grouped_accumulate_", &grouped_accumulate_);
}

}  // namespace fusedacc
