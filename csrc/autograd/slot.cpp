#include "slot.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "gradients.h"

namespace fusedacc::autograd {

const at::Tensor& Slot::parameter() const { return THPVariable_Unpack(parameter_); }

bool Slot::is_foreign(const at::Tensor& gradient) const {
  return grad_state != GradState::kPublished && !is_placed(gradient);
}

at::Tensor Slot::new_sum() const {
  const at::Tensor& tensor = parameter();
  const at::TensorOptions options = at::TensorOptions(tensor.device()).dtype(accumulate_dtype);
  if (tensor.is_non_overlapping_and_dense())
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::empty(tensor.sizes(), options);
}

std::optional<Slot::Seen> Slot::look() const {
  const at::Tensor& tensor = parameter();
  if (!(tensor.is_cpu() || tensor.is_cuda()) || !is_plain(tensor)) return std::nullopt;
  const bool is_trained = tensor.requires_grad();
  const torch::autograd::Node* const node =
      is_trained ? torch::autograd::impl::try_get_grad_accumulator(tensor).get() : nullptr;
  return Seen{tensor.const_data_ptr(), tensor.scalar_type(), at::DimVector(tensor.sizes()), is_trained, node};
}

bool Slot::is_as_seen() const { return seen_.has_value() && seen_ == look(); }

void Slot::note_seen() { seen_ = look(); }

at::Tensor Sums::current(const Slot& slot) const {
  if (slot.grad_state == GradState::kPublished) return slot.p_grad();
  if (!always_exposed || slot.grad_state == GradState::kAutogradPending || slot.is_aside) {
    return slot.accumulator;
  }
  const at::Tensor& gradient = slot.p_grad();
  if (slot.grad_state == GradState::kNotOurs) return gradient;
  return slot.is_placed(gradient) ? slot.accumulator : gradient;
}

void Sums::put(Slot& slot, const at::Tensor& sum) {
  const bool is_shown = slot.grad_state == GradState::kPublished ||
                        (always_exposed && slot.grad_state != GradState::kAutogradPending);
  if (is_shown) {
    publish(slot, sum);
  } else {
    slot.accumulator = sum;
  }
}

bool Sums::begin_main_grad(Slot& slot) {
  if (!slot.main_grad.defined()) return true;
  const at::Tensor sum = current(slot);
  if (sum.defined()) return sum.is_same(slot.main_grad);
  if (slot.grad_state != GradState::kNotOurs) return false;  // other code has removed the sum from p.grad
  put(slot, slot.main_grad);
  return true;
}

namespace {

int64_t bytes_of_sparse(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor._values().nbytes() + tensor._indices().nbytes());
}

}  // namespace

void Sums::publish(Slot& slot, const at::Tensor& sum) {
  slot.is_aside = false;
  slot.parameter().mutable_grad() = sum;
  slot.accumulator.reset();
  slot.sparse_bytes.reset();
  if (sum.layout() == at::kSparse) slot.sparse_bytes = bytes_of_sparse(sum);
  set_state(slot, GradState::kPublished, sum);
}

void Sums::set_state(Slot& slot, GradState state, const at::Tensor& placed) {
  num_ignored += (state == GradState::kIgnored) - (slot.grad_state == GradState::kIgnored);
  slot.grad_state = state;
  slot.placed.reset();
  if (!placed.defined()) return;
  slot.placed.emplace(placed);
  // A tensor of inference mode has no version.
  slot.placed_version = placed.is_inference() ? 0 : placed._version();
}

}  // namespace fusedacc::autograd
