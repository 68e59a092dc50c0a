#include "immediate_add.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/addmm.h>
#include <ATen/record_function.h>
#include <c10/core/UndefinedTensorImpl.h>

#include "../common/dtypes.h"

namespace fusedacc::autograd {

int32_t dtype_number(at::ScalarType dtype) {
#define FUSEDACC_CASE(name, enumerator, Element, Scalar) \
  case at::ScalarType::Scalar:                           \
    return static_cast<int32_t>(Dtype::enumerator);
  switch (dtype) {
    FUSEDACC_DTYPES(FUSEDACC_CASE)
    default:
      return -1;
  }
#undef FUSEDACC_CASE
}

bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kUnusual({
      c10::DispatchKey::Python,
      c10::DispatchKey::FuncTorchBatched,
      c10::DispatchKey::FuncTorchGradWrapper,
      c10::DispatchKey::Functionalize,
      c10::DispatchKey::Conjugate,
      c10::DispatchKey::Negative,
      c10::DispatchKey::ZeroTensor,
  });
  return tensor.layout() == at::kStrided && !tensor.key_set().has_any(kUnusual);
}

namespace {

// Whether there is a kernel for such gradients: p.grad may be of any dtype where the user has put it there.
bool are_pair(const at::Tensor& gradient, const at::Tensor& accumulator) {
  const int32_t from = dtype_number(gradient.scalar_type()), to = dtype_number(accumulator.scalar_type());
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

void ImmediateAdder::load(const std::vector<std::optional<at::Tensor>>& accumulators,
                          std::vector<double> betas, bool exposed, int64_t generation) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  betas_ = std::move(betas);
  betas_.resize(accumulators.size(), 1);
  accumulators_.clear();
  shown_.clear();
  made_.clear();
  for (size_t i = 0; i < accumulators.size(); ++i) {
    const at::Tensor accumulator = accumulators[i].value_or(at::Tensor());
    const bool is_shown = exposed && betas_[i] != 0;
    accumulators_.emplace_back((is_shown ? at::Tensor() : accumulator).getIntrusivePtr());
    if (exposed) shown_.emplace_back(accumulator);
  }
  offered_.assign(accumulators_.size(), false);
  for (size_t i = 0; i < betas_.size(); ++i) offered_[i] = betas_[i] == 0;
  exposed_ = exposed;
  generation_ = generation;
}

void ImmediateAdder::unload() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  load(std::vector<std::optional<at::Tensor>>(dtypes_.size()), {}, /*exposed=*/false, /*generation=*/-1);
}

void ImmediateAdder::set(int64_t index, const at::Tensor& accumulator, double beta) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  accumulators_[index] = WeakTensor(accumulator.getIntrusivePtr());
  betas_[index] = beta;
  offered_[index] = beta == 0;
}

void ImmediateAdder::release() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (WeakTensor& accumulator : accumulators_) accumulator = WeakTensor(at::Tensor().getIntrusivePtr());
  if (!exposed_) generation_ = -1;
}

void ImmediateAdder::offer_again() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  release();
  for (size_t i = 0; i < betas_.size(); ++i) betas_[i] = offered_[i] ? 0 : 1;
}

std::vector<std::pair<int64_t, at::Tensor>> ImmediateAdder::take_made() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return std::exchange(made_, {});
}

at::Tensor ImmediateAdder::accumulator_of(int task, int64_t index, const at::Tensor& parameter, bool makes) {
  if (task_ != task || index < 0 || index >= static_cast<int64_t>(accumulators_.size())) return {};
  at::Tensor accumulator;
  if (exposed_ && parameter.grad().defined()) {
    if (shown_[index].refers_to(parameter.grad())) accumulator = parameter.grad();
  } else if (!exposed_ || offered_[index]) {
    auto held = accumulators_[index].lock();
    if (held) {
      accumulator = at::Tensor(std::move(held));
    } else if (makes && offered_[index] && betas_[index] == 0) {
      accumulator = at::empty_like(parameter, parameter.options().dtype(dtypes_[index]));
    }
  }
  if (!accumulator.defined()) return {};
  const bool fits = accumulator.device() == parameter.device() &&
                    accumulator.scalar_type() == dtypes_[index] && is_plain(accumulator) &&
                    !accumulator.is_inference();
  return fits ? accumulator : at::Tensor();
}

void ImmediateAdder::note(int64_t index, const at::Tensor& accumulator) {
  if (offered_[index] && betas_[index] == 0) {
    if (accumulators_[index].expired()) made_.emplace_back(index, accumulator);
    accumulators_[index] = WeakTensor(accumulator.getIntrusivePtr());
    if (exposed_) shown_[index] = TensorIdentity(accumulator);
  }
  betas_[index] = 1;
  added_.push_back(index);
  if (exposed_) accumulator.unsafeGetTensorImpl()->bump_version();
}

bool ImmediateAdder::take(int task, int64_t index, const at::Tensor& gradient, const at::Tensor& parameter,
                          bool is_sole) {
  if (!is_open(task)) return false;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::Tensor into = accumulator_of(task, index, parameter);
  if (!into.defined() || betas_[index] == 0 || !is_plain(gradient) || !same_layout(gradient, into) ||
      gradient.is_alias_of(into) || !are_pair(gradient, into)) {
    return false;
  }
  if (into.is_cpu()) {
    RECORD_FUNCTION("fusedacc::add_at_once", std::vector<c10::IValue>());
    const Multipliers by{scale_, betas_[index]};
    add_(into.mutable_data_ptr(), gradient.const_data_ptr(), into.numel(),
         dtype_number(gradient.scalar_type()), dtype_number(into.scalar_type()), &by);
  } else {
    queue_.add(into, gradient, scale_, betas_[index], /*may_wait=*/is_sole);
  }
  note(index, into);
  return true;
}

bool ImmediateAdder::multiply(int task, int64_t index, const at::Tensor& left, const at::Tensor& right,
                              const at::Tensor& parameter, ProductMethod method) {
  if (!is_open(task)) return false;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (left.size(0) == 0) return false;
  const at::Tensor into = accumulator_of(task, index, parameter, /*makes=*/true);
  if (!into.defined() || into.dim() != 2 || !(into.is_contiguous() || into.t().is_contiguous())) return false;
  if (!are_pair(left, into) || left.is_alias_of(into) || right.is_alias_of(into)) return false;
  if (!into.is_cpu()) return multiply_on_gpu(index, into, left, right, method);
  const double beta = betas_[index];
  if (method == ProductMethod::kBlas) {
    if (left.scalar_type() != into.scalar_type() || (beta != 1 && beta != 0)) return false;
    into.addmm_(left.t(), right, beta, scale_);
  } else if (method < ProductMethod::kOperator) {
    return false;  // it was chosen before the weight was moved to the CPU
  } else {
    static const auto operation = library_operator("fusedacc::gemm_accumulate_");
    torch::jit::Stack stack;
    torch::jit::push(stack, into, left, right, c10::IValue(), scale_, c10::IValue(), beta,
                     static_cast<int64_t>(method) - static_cast<int64_t>(ProductMethod::kOperator));
    operation.callBoxed(stack);
  }
  note(index, into);
  return true;
}

bool ImmediateAdder::multiply_on_gpu(int64_t index, const at::Tensor& into, const at::Tensor& left,
                                     const at::Tensor& right, ProductMethod method) {
  const bool widens = method == ProductMethod::kWideningBlas;
  const bool fits = widens ? into.scalar_type() == at::kFloat && left.element_size() == 2
                           : method == ProductMethod::kBlas && left.scalar_type() == into.scalar_type();
  if (!fits || left.device() != into.device() || right.device() != into.device()) return false;
  queue_.write(into);
  at::Tensor out = into;
  if (widens) {
    at::addmm_out(out, into, left.t(), right, at::kFloat, betas_[index], scale_);
  } else {
    out.addmm_(left.t(), right, betas_[index], scale_);
  }
  note(index, into);
  return true;
}

bool ImmediateAdder::add_rows(int task, int64_t index, const at::Tensor& rows, const at::Tensor& gradients,
                              const at::Tensor& parameter, int64_t padding, bool by_frequency) {
  if (!is_open(task)) return false;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::Tensor into = accumulator_of(task, index, parameter);
  // Triton adds rows on a GPU.
  if (!into.defined() || !into.is_cpu() || into.dim() != 2 || !into.is_contiguous()) return false;
  if (betas_[index] != 1) return false;
  if (!are_pair(gradients, into) || !is_plain(gradients) || gradients.is_alias_of(into)) return false;
  const at::Tensor named = rows.reshape({rows.numel()});
  at::Tensor terms = gradients.reshape({rows.numel(), into.size(1)});
  if (into.size(1) > 1 && terms.stride(1) != 1) terms = terms.contiguous();
  static const auto operation = library_operator("fusedacc::accumulate_rows_");
  torch::jit::Stack stack;
  torch::jit::push(stack, into, named, terms, c10::IValue(), scale_, padding, by_frequency);
  operation.callBoxed(stack);
  note(index, into);
  return true;
}

}  // namespace fusedacc::autograd
