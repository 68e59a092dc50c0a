#include "products.h"

namespace fusedacc {
namespace {

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

}  // namespace

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

bool is_row_major(const Argument& accumulator) {
  const cpu::Matrix into = accumulator.matrix();
  if (into.rows_are_dense()) return true;
  if (into.transposed().rows_are_dense()) return false;
  fail("accumulator", "has strides " + shape_name(accumulator.view.strides, accumulator.view.dims) +
                          "; its rows or its columns must lie without gaps and not overlap");
}

double factor(const char* name, const OwnedTensor& tensor, StableIValue number) {
  return read_scale<double>(
      scalar_argument(name, tensor.get(), value_of<double>(number), {"accumulator is", Device::cpu()}));
}

cpu::Matrix for_blas(const OwnedTensor& tensor, const Argument& operand, OwnedTensor& memory) {
  const cpu::Matrix own = operand.matrix();
  if (own.rows == 0 || own.cols == 0 || own.rows_are_dense() || own.transposed().rows_are_dense()) return own;
  memory.reset(empty({own.rows, own.cols}, operand.view.dtype, operand.view.device));
  FUSEDACC_SHIM(aoti_torch_copy_(memory.get(), tensor.get(), 0));
  return {data_of(memory), own.rows, own.cols, own.cols, 1, own.dtype};
}

}  // namespace fusedacc
