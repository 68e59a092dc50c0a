#include "direct.h"

#include <ATen/record_function.h>
#include <c10/core/UndefinedTensorImpl.h>

#include "../pairs.h"

namespace fusedacc::autograd {

int32_t dtype_number(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return 0;
    case at::kBFloat16:
      return 1;
    case at::kHalf:
      return 2;
    case at::kDouble:
      return 3;
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

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  if (a.is_contiguous() && b.is_contiguous()) return true;
  return a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

void Direct::load(const std::vector<std::optional<at::Tensor>>& sums, std::vector<double> keeps,
                  bool visible) {
  std::lock_guard<std::mutex> lock(mutex_);
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
  visible_ = visible;
}

void Direct::open(int task, double scale) {
  std::lock_guard<std::mutex> lock(mutex_);
  scale_ = scale;
  added_.clear();
  task_ = task;
}

std::vector<int64_t> Direct::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  task_ = -1;
  return std::move(added_);
}

bool Direct::take(int task, int64_t index, const at::Tensor& gradient, const at::Tensor& parameter) {
  if (task_.load(std::memory_order_relaxed) != task) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  if (task_ != task || index < 0 || index >= static_cast<int64_t>(sums_.size())) return false;
  const auto held = sums_[index].lock();
  if (!held) return false;
  const at::Tensor sum(held);
  if (visible_ && !parameter.grad().is_same(sum)) return false;
  if (!sum.is_cpu() || !is_plain(sum) || !same_layout(gradient, sum) || gradient.is_alias_of(sum))
    return false;
  if (!is_plain(gradient) || sum.is_inference()) return false;
  const int32_t from = dtype_number(gradient.scalar_type()), to = dtype_number(sum.scalar_type());
  // p.grad may be of any dtype where the user has put it there.
  if (find_pair(static_cast<Dtype>(from), static_cast<Dtype>(to)) < 0) return false;
  RECORD_FUNCTION("fusedacc::add_at_once", std::vector<c10::IValue>());
  add_(sum.mutable_data_ptr(), gradient.const_data_ptr(), sum.numel(), from, to, scale_, keeps_[index]);
  keeps_[index] = 1;
  added_.push_back(index);
  if (visible_) sum.unsafeGetTensorImpl()->bump_version();
  return true;
}

}  // namespace fusedacc::autograd
