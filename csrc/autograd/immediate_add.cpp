#include "immediate_add.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <utility>

#include "../common/dtypes.h"

namespace fusedacc::autograd {

int32_t dtype_number(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return static_cast<int32_t>(Dtype::kFloat32);
    case at::kBFloat16:
      return static_cast<int32_t>(Dtype::kBFloat16);
    case at::kHalf:
      return static_cast<int32_t>(Dtype::kFloat16);
    case at::kDouble:
      return static_cast<int32_t>(Dtype::kFloat64);
    default:
      return -1;
  }
}

// Whether it is an ordinary tensor: no subclass, no wrapper of a function transform, no lazy bits.
bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kOdd({
      c10::DispatchKey::Python,
      c10::DispatchKey::FuncTorchBatched,
      c10::DispatchKey::FuncTorchGradWrapper,
      c10::DispatchKey::Functionalize,
      c10::DispatchKey::Conjugate,
      c10::DispatchKey::Negative,
      c10::DispatchKey::ZeroTensor,
  });
  return tensor.layout() == at::kStrided && !tensor.key_set().has_any(kOdd);
}

namespace {

// Whether there is a kernel for such gradients: p.grad may be of any dtype where the user has put it there.
bool are_pair(const at::Tensor& gradient, const at::Tensor& sum) {
  const int32_t from = dtype_number(gradient.scalar_type()), to = dtype_number(sum.scalar_type());
  return find_pair(static_cast<Dtype>(from), static_cast<Dtype>(to)) >= 0;
}

c10::OperatorHandle library_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

}  // namespace

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  if (a.is_contiguous() && b.is_contiguous()) return true;
  return a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

void Direct::load(const std::vector<std::optional<at::Tensor>>& sums, std::vector<double> keeps,
                  bool visible) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  sums_.clear();
  for (const auto& sum : sums) {
    if (sum.has_value()) {
      sums_.emplace_back(sum->getIntrusivePtr());
    } else {
      sums_.emplace_back(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>());
    }
  }
  keeps_ = std::move(keeps);
  keeps_.resize(sums_.size(), 1);
  fresh_.assign(sums_.size(), false);
  for (size_t i = 0; i < keeps_.size(); ++i) fresh_[i] = keeps_[i] == 0;
  visible_ = visible;
}

void Direct::open(int task, double scale) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  scale_ = scale;
  added_.clear();
  task_ = task;
}

std::vector<int64_t> Direct::close() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  task_ = -1;
  return std::exchange(added_, {});
}

std::vector<int64_t> Direct::added() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return std::exchange(added_, {});
}

void Direct::skip(int64_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (index >= 0 && index < static_cast<int64_t>(sums_.size())) sums_[index].reset();
}

at::Tensor Direct::sum_of(int task, int64_t index, const at::Tensor& parameter) {
  if (task_ != task || index < 0 || index >= static_cast<int64_t>(sums_.size())) return {};
  auto held = sums_[index].lock();
  if (!held) return {};
  at::Tensor sum(std::move(held));
  if (visible_) {
    const at::Tensor& shown = parameter.grad();
    if (shown.defined() ? !shown.is_same(sum) : !fresh_[index]) return {};
  }
  return sum.is_cpu() && is_plain(sum) && !sum.is_inference() ? sum : at::Tensor();
}

void Direct::note(int64_t index, const at::Tensor& sum) {
  keeps_[index] = 1;
  added_.push_back(index);
  if (visible_) sum.unsafeGetTensorImpl()->bump_version();
}

bool Direct::take(int task, int64_t index, const at::Tensor& gradient, const at::Tensor& parameter) {
  if (task_.load(std::memory_order_relaxed) != task) return false;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::Tensor sum = sum_of(task, index, parameter);
  if (!sum.defined() || keeps_[index] == 0 || !is_plain(gradient) || !same_layout(gradient, sum) ||
      gradient.is_alias_of(sum)) {
    return false;
  }
  if (!are_pair(gradient, sum)) return false;
  RECORD_FUNCTION("fusedacc::add_at_once", std::vector<c10::IValue>());
  add_(sum.mutable_data_ptr(), gradient.const_data_ptr(), sum.numel(), dtype_number(gradient.scalar_type()),
       dtype_number(sum.scalar_type()), scale_, keeps_[index]);
  note(index, sum);
  return true;
}

bool Direct::multiply(int task, int64_t index, const at::Tensor& left, const at::Tensor& right,
                      const at::Tensor& parameter, Multiplier by) {
  if (task_.load(std::memory_order_relaxed) != task) return false;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::Tensor sum = sum_of(task, index, parameter);
  if (!sum.defined() || sum.dim() != 2 || !(sum.is_contiguous() || sum.t().is_contiguous())) return false;
  if (!are_pair(left, sum) || left.is_alias_of(sum) || right.is_alias_of(sum)) return false;
  if (by == Multiplier::kBlas && left.scalar_type() != sum.scalar_type()) return false;
  const double keep = keeps_[index];
  if (left.size(0) == 0 || (by == Multiplier::kBlas && keep != 1 && keep != 0)) return false;
  if (by == Multiplier::kBlas) {
    sum.addmm_(left.t(), right, keep, scale_);
  } else {
    static const auto operation = library_operator("fusedacc::gemm_accumulate_");
    torch::jit::Stack stack;
    torch::jit::push(stack, sum, left, right, c10::IValue(), scale_, c10::IValue(), keep,
                     static_cast<int64_t>(by) - static_cast<int64_t>(Multiplier::kOperator));
    operation.callBoxed(stack);
  }
  note(index, sum);
  return true;
}

bool Direct::add_rows(int task, int64_t index, const at::Tensor& rows, const at::Tensor& gradients,
                      const at::Tensor& parameter, int64_t padding, bool by_frequency) {
  if (task_.load(std::memory_order_relaxed) != task) return false;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::Tensor sum = sum_of(task, index, parameter);
  if (!sum.defined() || sum.dim() != 2 || !sum.is_contiguous() || keeps_[index] != 1) return false;
  if (!are_pair(gradients, sum) || !is_plain(gradients) || gradients.is_alias_of(sum)) return false;
  const at::Tensor named = rows.reshape({rows.numel()});
  at::Tensor terms = gradients.reshape({rows.numel(), sum.size(1)});
  if (sum.size(1) > 1 && terms.stride(1) != 1) terms = terms.contiguous();
  static const auto operation = library_operator("fusedacc::accumulate_rows_");
  torch::jit::Stack stack;
  torch::jit::push(stack, sum, named, terms, c10::IValue(), scale_, padding, by_frequency);
  operation.callBoxed(stack);
  note(index, sum);
  return true;
}

}  // namespace fusedacc::autograd
