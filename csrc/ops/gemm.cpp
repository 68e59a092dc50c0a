// The operator gemm_accumulate_: its arguments, checked, for torch's BLAS and oneDNN on a CPU. Elsewhere
// fusedacc/kernels/matmul_eager.py has torch's own products.
#include "../cpu/gemm.h"

#include <utility>

#include "../cpu/cpu.h"
#include "arguments.h"
#include "tensor_checks.h"

namespace fusedacc {
namespace {

using cpu::GemmRequest;
using cpu::Matrix;

struct Argument {
  const char* name;
  TensorView view;

  Argument(const char* name, const OwnedTensor& tensor) : name(name), view(view_of(tensor.get(), name, 2)) {}
  Matrix matrix() const {
    return {view.data, view.sizes[0], view.sizes[1], view.strides[0], view.strides[1], dtype_of(view)};
  }
};

// Checks an operand against the accumulator, of whose dimension `along` it makes the elements.
void check_operand(const Argument& operand, const TensorView& accumulator, int along) {
  const TensorView& view = operand.view;
  check_beside(operand.name, view, {"accumulator is", accumulator.device});
  checked_pair(operand.name, dtype_of(view), "accumulator", dtype_of(accumulator));
  if (view.sizes[1] != accumulator.sizes[along]) {
    fail(operand.name, "has shape " + shape_name(view.sizes, 2) + " but accumulator has " +
                           shape_name(accumulator.sizes, 2));
  }
  if (overlap(view, accumulator)) fail(operand.name, "overlaps accumulator in memory");
}

// The operand itself, or a copy with dense rows, which `memory` then owns.
Matrix for_blas(const OwnedTensor& tensor, const Argument& operand, OwnedTensor& memory) {
  const Matrix own = operand.matrix();
  if (own.rows == 0 || own.cols == 0 || own.rows_are_dense() || own.transposed().rows_are_dense()) return own;
  memory.reset(empty({own.rows, own.cols}, operand.view.dtype, operand.view.device));
  FUSEDACC_SHIM(aoti_torch_copy_(memory.get(), tensor.get(), 0));
  return {data_of(memory), own.rows, own.cols, own.cols, 1, own.dtype};
}

// stack: accumulator, left, right, scale_tensor, scale, keep_tensor, keep, way.
void gemm_accumulate_(StableIValue* stack, uint64_t, uint64_t) {
  const OwnedTensor accumulator_tensor(reinterpret_cast<AtenTensorHandle>(stack[0]));
  const OwnedTensor left_tensor(reinterpret_cast<AtenTensorHandle>(stack[1]));
  const OwnedTensor right_tensor(reinterpret_cast<AtenTensorHandle>(stack[2]));
  const OwnedTensor scale_tensor(take_optional(stack[3]));
  const OwnedTensor beta_tensor(take_optional(stack[5]));
  const Argument accumulator("accumulator", accumulator_tensor);
  const Argument left("left", left_tensor), right("right", right_tensor);
  const Device& device = accumulator.view.device;
  if (device != Device::cpu()) fail("accumulator", "is on " + device.name() + "; it must be on cpu");
  check_operand(left, accumulator.view, 0);
  check_operand(right, accumulator.view, 1);
  if (left.view.dtype != right.view.dtype) {
    fail("right", std::string("has ") + dtype_name(dtype_of(right.view)) + " but left has " +
                      dtype_name(dtype_of(left.view)));
  }
  if (left.view.sizes[0] != right.view.sizes[0]) {
    fail("right", "has " + std::to_string(right.view.sizes[0]) + " rows but left has " +
                      std::to_string(left.view.sizes[0]));
  }
  const auto factor = [&](const char* name, const OwnedTensor& tensor, StableIValue value) {
    const double number = value_of<double>(value);
    return read_scale<double>(scalar_argument(name, tensor.get(), number, {"accumulator is", device}));
  };
  const double scale = factor("scale", scale_tensor, stack[4]), beta = factor("keep", beta_tensor, stack[6]);
  const int64_t way = value_of<int64_t>(stack[7]);
  if (way < 0 || way > static_cast<int64_t>(cpu::Way::kRounded)) {
    fail("way", "is " + std::to_string(way) + "; allowed: those of csrc/cpu/gemm.h");
  }
  const Matrix into = accumulator.matrix();
  if (into.rows == 0 || into.cols == 0) return;
  const bool row_major = into.rows_are_dense();
  if (!row_major && !into.transposed().rows_are_dense()) {
    fail("accumulator", "has strides " + shape_name(accumulator.view.strides, 2) +
                            "; its rows or its columns must lie without gaps and not overlap");
  }
  OwnedTensor left_memory(nullptr), right_memory(nullptr);
  const Matrix first = for_blas(left_tensor, left, left_memory);
  const Matrix second = for_blas(right_tensor, right, right_memory);
  // By columns it is the transpose that has dense rows: right^T left.
  const GemmRequest request = row_major ? GemmRequest{into, first, second, scale, beta}
                                        : GemmRequest{into.transposed(), second, first, scale, beta};
  cpu::run_gemm(request, static_cast<cpu::Way>(way));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedacc, CompositeExplicitAutograd, m) {
  m.impl("gemm_accumulate_", &gemm_accumulate_);
}

}  // namespace fusedacc
