// The operators on slices of a language model's logits, softmax_statistics_ and softmax_gradient_: their
// arguments, checked, and the device that runs them.
#include <algorithm>

#include "../cpu/cpu.h"
#include "../cuda/cuda.h"
#include "tensor_checks.h"

namespace fusedacc {
namespace {

TensorView contiguous(const OwnedTensor& tensor, const char* name, int64_t dims) {
  const TensorView view = view_of(tensor.get(), name, dims);
  const bool empty = std::find(view.sizes, view.sizes + dims, 0) != view.sizes + dims;
  int64_t stride = 1;
  for (int64_t dim = dims - 1; dim >= 0; stride *= view.sizes[dim--]) {
    if (view.sizes[dim] > 1 && view.strides[dim] != stride && !empty) fail(name, "is not contiguous");
  }
  return view;
}

void check_sizes(const char* name, const TensorView& view, std::initializer_list<int64_t> wanted) {
  if (!std::equal(wanted.begin(), wanted.end(), view.sizes)) {
    fail(name, "has shape " + shape_name(view.sizes, view.dims) + "; it must be " +
                   shape_name(wanted.begin(), view.dims));
  }
}

// The arguments that both have: logits, target, first, class_weights; and the numbers of the tokens.
struct Arguments {
  OwnedTensor logits_tensor, numbers_tensor, target_tensor, weights_tensor;
  TensorView logits, numbers;
  SoftmaxSlice slice{};
  Dtype dtype;

  Arguments(StableIValue logits_word, StableIValue numbers_word, const char* name, const StableIValue* rest)
      : logits_tensor(reinterpret_cast<AtenTensorHandle>(logits_word)),
        numbers_tensor(reinterpret_cast<AtenTensorHandle>(numbers_word)),
        target_tensor(reinterpret_cast<AtenTensorHandle>(rest[0])),
        weights_tensor(take_optional(rest[2])),
        logits(contiguous(logits_tensor, "logits", 2)),
        numbers(contiguous(numbers_tensor, name, 2)),
        dtype(dtype_of(logits)) {
    const Beside beside{"logits are", logits.device};
    check_beside(name, numbers, beside);
    if (dtype == Dtype::kOther)
      fail("logits", "has another dtype than float32, bfloat16, float16 and float64");
    const Dtype compute = dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
    const auto check_dtype = [&](const char* argument, const TensorView& view) {
      if (dtype_of(view) != compute) fail(argument, std::string("must be ") + dtype_name(compute));
    };
    check_dtype(name, numbers);
    if (overlap(logits, numbers)) fail(name, "overlaps logits in memory");
    const TensorView target = contiguous(target_tensor, "target", 1);
    if (target.dtype != aoti_torch_dtype_int64()) fail("target", "must be int64");
    check_beside("target", target, beside);
    check_sizes("target", target, {logits.sizes[0]});
    slice.logits = logits.data, slice.numbers = numbers.data;
    slice.tokens = logits.sizes[0], slice.classes = logits.sizes[1];
    slice.target = static_cast<const int64_t*>(target.data), slice.first = value_of<int64_t>(rest[1]);
    if (weights_tensor.get() != nullptr) {
      const TensorView weights = contiguous(weights_tensor, "class_weights", 1);
      check_beside("class_weights", weights, beside);
      check_dtype("class_weights", weights);
      check_sizes("class_weights", weights, {slice.classes});
      slice.class_weights = weights.data;
    }
  }
};

void run(const Arguments& own) {
  const Device& device = own.logits.device;
  run_on(
      device, [&] { cpu::softmax(own.slice, own.dtype); },
      [&] { cuda::softmax(own.slice, own.dtype, device.index); });
}

// stack: statistics, logits, target, first, class_weights.
void softmax_statistics_(StableIValue* stack, uint64_t, uint64_t) {
  Arguments own(stack[1], stack[0], "statistics", stack + 2);
  own.slice.smooths = own.numbers.sizes[0] == 4;
  check_sizes("statistics", own.numbers, {own.slice.smooths ? 4 : 3, own.slice.tokens});
  run(own);
}

// stack: logits, factors, target, first, class_weights.
void softmax_gradient_(StableIValue* stack, uint64_t, uint64_t) {
  Arguments own(stack[0], stack[1], "factors", stack + 2);
  own.slice.is_gradient = true;
  check_sizes("factors", own.numbers, {4, own.slice.tokens});
  run(own);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedacc, CompositeExplicitAutograd, m) {
  m.impl("softmax_statistics_", &softmax_statistics_);
  m.impl("softmax_gradient_", &softmax_gradient_);
}

}  // namespace fusedacc
