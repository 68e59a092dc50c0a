// The operators on slices of a language model's logits on a CPU, softmax_statistics_ and softmax_gradient_:
// check the arguments, then run.
#include <algorithm>

#include "../cpu/cpu.h"
#include "tensor_checks.h"

namespace fusedacc {
namespace {

// Returns a contiguous tensor; -1 in `shape` allows any size.
TensorView contiguous(const OwnedTensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
  const auto dims = static_cast<int64_t>(shape.size());
  const TensorView view = view_of(tensor.get(), name, dims);
  const auto fits = [](int64_t wanted, int64_t size) { return wanted == -1 || wanted == size; };
  if (!std::equal(shape.begin(), shape.end(), view.sizes, fits)) {
    fail(name,
         "has shape " + shape_name(view.sizes, dims) + "; it must be " + shape_name(shape.begin(), dims));
  }
  const bool empty = std::find(view.sizes, view.sizes + dims, 0) != view.sizes + dims;
  int64_t stride = 1;
  for (int64_t dim = dims - 1; dim >= 0; --dim) {
    if (view.sizes[dim] > 1 && view.strides[dim] != stride && !empty) fail(name, "is not contiguous");
    stride *= view.sizes[dim];
  }
  return view;
}

// Checks the arguments of a pass, and runs it. arguments: the ones that follow logits and numbers: target,
// first, class_weights.
void run(const OwnedTensor& logits_tensor, const OwnedTensor& numbers_tensor, ArgumentReader arguments,
         bool is_gradient) {
  const OwnedTensor target_tensor(arguments.tensor());
  const auto first = arguments.value<int64_t>();
  const OwnedTensor weights_tensor(arguments.optional_tensor());
  const TensorView logits = contiguous(logits_tensor, "logits", {-1, -1});
  check_on_cpu("logits", logits);
  const int64_t tokens = logits.sizes[0];
  const int64_t classes = logits.sizes[1];
  const Dtype dtype = dtype_of(logits);
  if (dtype == Dtype::kOther) fail("logits", "has another dtype than float32, bfloat16, float16 and float64");
  const Dtype compute = dtype == Dtype::kFloat64 ? dtype : Dtype::kFloat32;
  const Beside beside{"logits are", logits.device};
  const auto of_compute = [&](const OwnedTensor& tensor, const char* name,
                              std::initializer_list<int64_t> shape) {
    const TensorView view = contiguous(tensor, name, shape);
    if (dtype_of(view) != compute) fail(name, std::string("must be ") + dtype_name(compute));
    check_beside(name, view, beside);
    return view;
  };
  const char* name = is_gradient ? "factors" : "statistics";
  const TensorView numbers = of_compute(numbers_tensor, name, {-1, tokens});
  const int64_t rows = numbers.sizes[0];
  if (rows != 4 && (rows != 3 || is_gradient)) fail(name, "has " + std::to_string(rows) + " rows");
  if (overlap(logits, numbers)) fail(name, "overlaps logits in memory");
  const TensorView target = contiguous(target_tensor, "target", {tokens});
  if (target.dtype != aoti_torch_dtype_int64()) fail("target", "must be int64");
  check_beside("target", target, beside);
  SoftmaxSlice slice{};
  slice.logits = logits.data;
  slice.numbers = numbers.data;
  slice.is_gradient = is_gradient;
  slice.tokens = tokens;
  slice.classes = classes;
  slice.target = static_cast<const int64_t*>(target.data);
  slice.first = first;
  slice.smooths = rows == 4;
  if (weights_tensor.get() != nullptr) {
    slice.class_weights = of_compute(weights_tensor, "class_weights", {classes}).data;
  }
  cpu::softmax(slice, dtype);
}

void softmax_statistics_(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader arguments(stack);
  const OwnedTensor statistics(arguments.tensor());
  const OwnedTensor logits(arguments.tensor());
  run(logits, statistics, arguments, /*is_gradient=*/false);
}

void softmax_gradient_(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader arguments(stack);
  const OwnedTensor logits(arguments.tensor());
  const OwnedTensor factors(arguments.tensor());
  run(logits, factors, arguments, /*is_gradient=*/true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedacc, CompositeExplicitAutograd, m) {
  m.impl("softmax_statistics_", &softmax_statistics_);
  m.impl("softmax_gradient_", &softmax_gradient_);
}

}  // namespace fusedacc
