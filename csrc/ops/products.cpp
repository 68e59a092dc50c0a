// The operators gemm_accumulate_ and grouped_accumulate_ on a CPU: check the arguments, then multiply
// (csrc/cpu/gemm.cpp). On other devices fusedacc/kernels/matmul_eager.py uses torch's products.
//
// What holds here:
// - All arguments are read before the first check, and all checks are made before anything is written.
// - After the checks, left [n, M] and right [n, N] have one dtype, which with the accumulator's is a pair of
//   kPairs. They share no memory with the accumulator, which is [M, N] or, for experts, [E, M, N], and does
//   not overlap itself.
// - What csrc/cpu/gemm.cpp gets, a GemmRequest, has an accumulator with dense rows, and operands with dense
//   rows or columns, as BLAS requires. An accumulator with dense columns is transposed, and the operands
//   change places. Other operands are copied; `Product` owns the copies while the request is used.
#include <algorithm>
#include <vector>

#include "../cpu/cpu.h"
#include "tensor_checks.h"

namespace fusedacc {
namespace {

using cpu::GemmRequest;
using cpu::GroupedRequest;
using cpu::Matrix;

// An argument; valid while its tensor lives.
struct Argument {
  const char* name;
  TensorView view;

  Argument(const char* name, const OwnedTensor& tensor, int64_t dims = 2)
      : name(name), view(view_of(tensor.get(), name, dims)) {}
  // Returns its last two dimensions.
  Matrix matrix() const {
    const int64_t rows = view.dims - 2;
    const int64_t cols = view.dims - 1;
    return {view.data,          view.sizes[rows],   view.sizes[cols],
            view.strides[rows], view.strides[cols], dtype_of(view)};
  }
};

// Checks an operand, whose columns belong to the accumulator's dimension `along`.
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
  check_on_cpu("accumulator", into);
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

// Returns whether the accumulator's matrices have dense rows; otherwise they must have dense columns.
bool is_row_major(const Argument& accumulator) {
  const Matrix into = accumulator.matrix();
  if (into.rows_are_dense()) return true;
  if (into.transposed().rows_are_dense()) return false;
  fail("accumulator", "has strides " + shape_name(accumulator.view.strides, accumulator.view.dims) +
                          "; its rows or its columns must lie without gaps and not overlap");
}

// Returns the operand, or a copy with dense rows that `memory` owns.
Matrix for_blas(const OwnedTensor& tensor, const Argument& operand, OwnedTensor& memory) {
  const Matrix matrix = operand.matrix();
  const bool is_empty = matrix.rows == 0 || matrix.cols == 0;
  if (is_empty || matrix.rows_are_dense() || matrix.transposed().rows_are_dense()) return matrix;
  memory.reset(empty({matrix.rows, matrix.cols}, operand.view.dtype, operand.view.device));
  FUSEDACC_SHIM(aoti_torch_copy_(memory.get(), tensor.get(), 0));
  return {data_of(memory), matrix.rows, matrix.cols, matrix.cols, 1, matrix.dtype};
}

// The tensors of both operators, in the order of their schemas.
struct Tensors {
  const OwnedTensor accumulator, left, right;

  explicit Tensors(ArgumentReader& arguments)
      : accumulator(arguments.tensor()), left(arguments.tensor()), right(arguments.tensor()) {}
};

// The checked arguments of both operators. The accumulator has `dims` dimensions.
class Product {
 public:
  const Argument accumulator, left, right;

  Product(const Tensors& tensors, int64_t dims, const FactorArgument& scale, const FactorArgument& beta)
      : accumulator("accumulator", tensors.accumulator, dims),
        left("left", tensors.left),
        right("right", tensors.right),
        tensors_(tensors) {
    check_operands(accumulator, left, right);
    const Beside beside{"accumulator is", Device::cpu()};
    scale_ = read_scale<double>(scale.checked("scale", beside));
    beta_ = read_scale<double>(beta.checked("beta", beside));
  }

  bool is_empty() const {
    const int64_t* sizes = accumulator.view.sizes;
    return std::find(sizes, sizes + accumulator.view.dims, 0) != sizes + accumulator.view.dims;
  }

  // Returns the product with dense accumulator rows and operands that BLAS accepts. If only the accumulator's
  // columns are dense, it is the transposed product right^T left.
  GemmRequest request() {
    const Matrix into = accumulator.matrix();
    const bool row_major = is_row_major(accumulator);
    const Matrix first = for_blas(tensors_.left, left, left_memory_);
    const Matrix second = for_blas(tensors_.right, right, right_memory_);
    if (row_major) return {into, first, second, scale_, beta_};
    return {into.transposed(), second, first, scale_, beta_};
  }

 private:
  const Tensors& tensors_;
  double scale_, beta_;
  OwnedTensor left_memory_{nullptr}, right_memory_{nullptr};
};

cpu::GemmMethod checked_method(int64_t number) {
  if (number < 0 || number >= cpu::kGemmMethods) {
    fail("method", "is " + std::to_string(number) + "; allowed: those of csrc/cpu/gemm.h");
  }
  return static_cast<cpu::GemmMethod>(number);
}

void gemm_accumulate_(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader arguments(stack);
  const Tensors tensors(arguments);
  const FactorArgument scale(arguments);
  const FactorArgument beta(arguments);
  const int64_t method_number = arguments.value<int64_t>();

  Product product(tensors, 2, scale, beta);
  const cpu::GemmMethod method = checked_method(method_number);
  if (!product.is_empty()) cpu::run_gemm(product.request(), method);
}

// Returns where each expert's rows end. tokens: number of rows.
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

void grouped_accumulate_(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader arguments(stack);
  const Tensors tensors(arguments);
  const OwnedTensor offsets(arguments.tensor());
  const FactorArgument scale(arguments);
  const FactorArgument beta(arguments);
  const int64_t rank_k_tokens = arguments.value<int64_t>();
  const int64_t method_number = arguments.value<int64_t>();

  Product product(tensors, 3, scale, beta);
  const TensorView& into = product.accumulator.view;
  const std::vector<int64_t> ends = read_ends(offsets, into, product.left.view.sizes[0]);
  if (rank_k_tokens < 0 || rank_k_tokens > cpu::kRankTokens) {
    fail("rank_k_tokens",
         "is " + std::to_string(rank_k_tokens) + "; allowed: 0 to " + std::to_string(cpu::kRankTokens));
  }
  const cpu::GemmMethod method = checked_method(method_number);
  if (product.is_empty()) return;
  const GemmRequest all = product.request();
  bool dense = false;
  if (!strides_nest(3, into.sizes, into.strides, dense)) {
    fail("accumulator", "overlaps itself: strides " + shape_name(into.strides, 3) + " for shape " +
                            shape_name(into.sizes, 3));
  }
  cpu::run_grouped({all, into.strides[0], ends, rank_k_tokens, method});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedacc, CompositeExplicitAutograd, m) {
  m.impl("gemm_accumulate_", &gemm_accumulate_);
  m.impl("grouped_accumulate_", &grouped_accumulate_);
}

}  // namespace fusedacc
