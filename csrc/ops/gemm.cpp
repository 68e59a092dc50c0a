// The operator gemm_accumulate_: its arguments, checked, and the device that runs it.
#include "../common/gemm.h"

#include <limits>
#include <string>
#include <utility>

#include "../cpu/cpu.h"
#include "arguments.h"
#include "dispatch.h"
#include "ops.h"
#include "tensor_checks.h"
#ifdef FUSEDACC_CUDA
#include "../cuda/cuda.h"
#endif

namespace fusedacc {

#ifndef FUSEDACC_CUDA
namespace cuda {
void run_gemm(const GemmRequest&, int32_t) { refuse_cuda(); }
std::string gemm_problem() { return "the native library was built without CUDA"; }
}  // namespace cuda
#endif

namespace {

struct Argument {
  const char* name;
  TensorView view;
};

[[noreturn]] void fail(const std::string& name, const std::string& problem) {
  throw std::runtime_error("fusedacc: " + name + " " + problem);
}

std::string two(int64_t first, int64_t second) {
  return "[" + std::to_string(first) + ", " + std::to_string(second) + "]";
}

Argument argument(const char* name, AtenTensorHandle tensor) {
  const Argument found{name, view_of(tensor, {name, -1})};
  if (found.view.dims != 2) fail(name, "has " + std::to_string(found.view.dims) + " dimensions; allowed: 2");
  return found;
}

Matrix matrix(const Argument& argument) {
  const TensorView& view = argument.view;
  return {view.data, view.sizes[0], view.sizes[1], view.strides[0], view.strides[1], dtype_of(view)};
}

// Checks an operand against the accumulator, of whose dimension `along` it makes the elements.
void check_operand(const Argument& operand, const Argument& accumulator, int along) {
  const TensorView &view = operand.view, &sum = accumulator.view;
  if (view.device_type != sum.device_type || view.device_index != sum.device_index) {
    fail(operand.name, "is on " + device_name(view.device_type, view.device_index) +
                           " but accumulator is on " + device_name(sum.device_type, sum.device_index));
  }
  if (find_pair(dtype_of(view), dtype_of(sum)) < 0) {
    fail(operand.name, std::string("has ") + dtype_name(dtype_of(view)) + " and accumulator " +
                           dtype_name(dtype_of(sum)) + "; allowed: " + kAllowedPairs);
  }
  if (view.sizes[1] != sum.sizes[along]) {
    fail(operand.name, "has shape " + two(view.sizes[0], view.sizes[1]) + " but accumulator has " +
                           two(sum.sizes[0], sum.sizes[1]));
  }
}

std::pair<int64_t, int64_t> memory_of(const Matrix& matrix) {
  const auto begin = reinterpret_cast<int64_t>(matrix.data);
  if (matrix.rows == 0 || matrix.cols == 0) return {begin, begin};
  const int64_t last = (matrix.rows - 1) * matrix.row_stride + (matrix.cols - 1) * matrix.col_stride;
  return {begin, begin + (last + 1) * element_size(matrix.dtype)};
}

void check_apart(const char* name, const Matrix& operand, const Matrix& accumulator) {
  const auto read = memory_of(operand), written = memory_of(accumulator);
  if (read.first < written.second && written.first < read.second) {
    fail(name, "overlaps accumulator in memory");
  }
}

// The operand itself, or a copy with dense rows, which `memory` then owns.
Matrix for_blas(AtenTensorHandle tensor, const Argument& operand, OwnedTensor& memory) {
  Matrix own = matrix(operand);
  if (own.rows == 0 || own.cols == 0 || rows_are_dense(own) || rows_are_dense(own.transposed())) return own;
  const int64_t strides[] = {own.cols, 1};
  AtenTensorHandle copy = nullptr;
  FUSEDACC_SHIM(
      aoti_torch_empty_strided(2, operand.view.sizes, strides, operand.view.dtype, operand.view.device_type,
                               operand.view.device_index < 0 ? 0 : operand.view.device_index, &copy));
  memory.reset(copy);
  FUSEDACC_SHIM(aoti_torch_copy_(copy, tensor, 0));
  FUSEDACC_SHIM(aoti_torch_get_data_ptr(copy, &own.data));
  own.row_stride = own.cols;
  own.col_stride = 1;
  return own;
}

}  // namespace

// stack: accumulator, left, right, scale_tensor, scale, keep_tensor, keep, way.
void gemm_accumulate_(StableIValue* stack, uint64_t, uint64_t) {
  const OwnedTensor accumulator_tensor(reinterpret_cast<AtenTensorHandle>(stack[0]));
  const OwnedTensor left_tensor(reinterpret_cast<AtenTensorHandle>(stack[1]));
  const OwnedTensor right_tensor(reinterpret_cast<AtenTensorHandle>(stack[2]));
  const OwnedTensor scale_tensor(take_optional(stack[3]));
  const OwnedTensor keep_tensor(take_optional(stack[5]));
  const Argument accumulator = argument("accumulator", accumulator_tensor.get());
  const Argument left = argument("left", left_tensor.get());
  const Argument right = argument("right", right_tensor.get());
  check_operand(left, accumulator, 0);
  check_operand(right, accumulator, 1);
  if (left.view.dtype != right.view.dtype) {
    fail("right", std::string("has ") + dtype_name(dtype_of(right.view)) + " but left has " +
                      dtype_name(dtype_of(left.view)));
  }
  if (left.view.sizes[0] != right.view.sizes[0]) {
    fail("right", "has " + std::to_string(right.view.sizes[0]) + " rows but left has " +
                      std::to_string(left.view.sizes[0]));
  }
  const Device device{accumulator.view.device_type, accumulator.view.device_index};
  const Beside beside{"accumulator is", device.type, device.index};
  const ScaleArgument scale = scalar_argument("scale", scale_tensor.get(), number(stack[4]), beside);
  const ScaleArgument keep = scalar_argument("keep", keep_tensor.get(), number(stack[6]), beside);
  const int64_t way = torch::stable::detail::to<int64_t>(stack[7]);
  if (way < 0 || way > static_cast<int64_t>(cpu::Way::kRounded)) {
    fail("way", "is " + std::to_string(way) + "; allowed: those of csrc/cpu/gemm_ways.h");
  }
  const Matrix sum = matrix(accumulator);
  if (sum.rows == 0 || sum.cols == 0) return;
  const bool row_major = rows_are_dense(sum);
  if (!row_major && !rows_are_dense(sum.transposed())) {
    fail("accumulator", "has strides " + two(sum.row_stride, sum.col_stride) +
                            "; its rows or its columns must lie without gaps and not overlap");
  }
  check_apart("left", matrix(left), sum);
  check_apart("right", matrix(right), sum);
  OwnedTensor left_memory(nullptr), right_memory(nullptr);
  const Matrix first = for_blas(left_tensor.get(), left, left_memory);
  const Matrix second = for_blas(right_tensor.get(), right, right_memory);
  // By columns it is the transpose that has dense rows: right^T left.
  const GemmRequest request = row_major ? GemmRequest{sum, first, second, scale, keep}
                                        : GemmRequest{sum.transposed(), second, first, scale, keep};
  run_on(
      device, [&] { cpu::run_gemm(request, static_cast<cpu::Way>(way)); },
      [&] { cuda::run_gemm(request, device.index); });
}

void gemm_problem(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = torch::stable::detail::from(cuda::gemm_problem());
}

}  // namespace fusedacc
