#include "hook.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string_view>
#include <typeinfo>

namespace fusedacc::autograd {
namespace {

// Whether only the tensor refers to its Python wrapper, and the wrapper is no subclass.
template <class Slot>
bool is_idle(const Slot& wrapper) {
  if constexpr (requires { wrapper.has_unique_reference(); }) {
    return wrapper.has_unique_reference() &&
           reinterpret_cast<PyObject*>(Py_TYPE(wrapper.load_pyobj())) == THPVariableClass;
  } else {
    return false;  // in this torch such a wrapper does not count as a reference
  }
}

// Whether only the engine refers to the gradient, so that no other code can change it. A gradient from Python
// or from a compiled graph also has a Python wrapper.
bool is_sole(const at::Tensor& gradient) {
  const size_t references = gradient.use_count();
  return references == 1 || (references == 2 && is_idle(*gradient.unsafeGetTensorImpl()->pyobj_slot()));
}

// Whether no other tensor shares the gradient's memory, and p.grad may be the gradient itself: it has no lazy
// negation and no graph. A transposed product is a view of a tensor that only the view refers to.
bool is_adoptable(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (!same_layout(gradient, parameter) || !is_plain(gradient) || gradient.requires_grad()) return false;
  const size_t users = gradient.storage().use_count();
  return gradient.is_view() ? users == 2 && gradient._base().use_count() == 1 : users == 1;
}

// Whether the hook calls nothing, because all Python hooks were removed.
bool is_empty(const std::unique_ptr<torch::autograd::FunctionPostHook>& hook) {
  const torch::autograd::FunctionPostHook& unwrapped = *hook;
  // By its name: torch does not export what a dynamic_cast would need.
  if (std::string_view(typeid(unwrapped).name()) != "N5torch8autograd18PyFunctionPostHookE") return false;
  return PyDict_GET_SIZE(static_cast<const torch::autograd::PyFunctionPostHook&>(unwrapped).dict) == 0;
}

}  // namespace

bool has_post_hook(const torch::autograd::Node& node) {
  const auto& hooks = node.post_hooks();
  return !std::all_of(hooks.begin(), hooks.end(), is_empty);
}

std::shared_ptr<HookState> hook_on(torch::autograd::Node& node, const PyObject* slot) {
  for (const auto& hook : node.pre_hooks()) {
    const auto* ours = dynamic_cast<const TakingHook*>(hook.get());
    if (ours != nullptr && ours->active() && ours->state()->slot == slot) return ours->state();
  }
  return nullptr;
}

namespace {

std::mutex latest_hooks_mutex;
std::unordered_map<const PyObject*, std::weak_ptr<HookState>>& latest_hooks() {
  static auto& hooks = *new std::unordered_map<const PyObject*, std::weak_ptr<HookState>>;
  return hooks;
}

}  // namespace

void LatestHooks::set(const std::shared_ptr<HookState>& hook) {
  std::lock_guard<std::mutex> lock(latest_hooks_mutex);
  std::erase_if(latest_hooks(), [](const auto& entry) { return entry.second.expired(); });
  latest_hooks().insert_or_assign(hook->slot, hook);
}

std::shared_ptr<HookState> LatestHooks::find(const PyObject* slot) {
  std::lock_guard<std::mutex> lock(latest_hooks_mutex);
  const auto entry = latest_hooks().find(slot);
  const auto hook = entry == latest_hooks().end() ? nullptr : entry->second.lock();
  return hook && hook->active ? hook : nullptr;
}

void Bucket::put(PyObject* slot, int64_t index, const at::Tensor& parameter, const at::Tensor& gradient,
                 int64_t nbytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!gradient.is_cpu()) taken_on_ = current_stream(gradient);
  append(slot, index, parameter, gradient, nbytes);
}

bool Bucket::put_if_room(PyObject* slot, int64_t index, const at::Tensor& parameter,
                         const at::Tensor& gradient, int64_t nbytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (nbytes_ + nbytes >= limit_) return false;
  if (!gradient.is_cpu() && (!taken_on_.has_value() || *taken_on_ != current_stream(gradient))) return false;
  append(slot, index, parameter, gradient, nbytes);
  return true;
}

bool Bucket::put_sum(PyObject* slot, int64_t index, const at::Tensor& parameter, const at::Tensor& gradient,
                     at::ScalarType dtype) {
  if (!makes_sums_ || gradient.scalar_type() != dtype || parameter.grad().defined() ||
      !is_adoptable(gradient, parameter)) {
    return false;
  }
  std::lock_guard<std::mutex> guard(mutex_);
  append(slot, index, parameter, gradient, /*nbytes=*/0);
  return true;
}

void Bucket::append(PyObject* slot, int64_t index, const at::Tensor& parameter, const at::Tensor& gradient,
                    int64_t nbytes) {
  adoptable_ = adoptable_ && is_adoptable(gradient, parameter);
  slots_.push_back(slot);
  indices_.push_back(index);
  gradients_.push_back(gradient);
  nbytes_ += nbytes;
}

Bucket::Content Bucket::take() {
  std::lock_guard<std::mutex> guard(mutex_);
  nbytes_ = 0;
  taken_on_.reset();
  return {std::exchange(slots_, {}), std::exchange(indices_, {}), std::exchange(gradients_, {}),
          std::exchange(adoptable_, true)};
}

bool Bucket::makes_sums(ImmediateAdder& adder) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto lacks = [&](int64_t index) { return index >= 0 && !adder.has_written(index); };
  return adoptable_ && std::all_of(indices_.begin(), indices_.end(), lacks);
}

torch::autograd::variable_list TakingHook::operator()(const torch::autograd::variable_list& gradients) {
  if (!entry_->active) return gradients;  // the Python hook was removed too
  if (gradients.size() == 1 && try_take(gradients[0])) return {at::Tensor()};
  return (*python_)(gradients);
}

Case HookState::case_of(const at::Tensor& gradient, torch::autograd::AccumulateGrad& node) const {
  const at::Tensor& parameter = node.variable;
  if (!parameter.requires_grad()) return Case::kFrozen;
  if (is_reduced_outside(node)) return Case::kReducedOutside;
  if (torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr) return Case::kPostAccumulateHook;
  if (!gradient.defined()) return Case::kAbsent;
  if (!is_plain(gradient)) return Case::kNotPlain;
  if (needs_eager) return Case::kNeedsEager;
  if (gradient.scalar_type() != dtype || gradient.device() != device) return Case::kOtherLane;
  return Case::kOrdinary;
}

bool TakingHook::try_take(const at::Tensor& gradient) const {
  const HookState& entry = *entry_;
  const at::Tensor& parameter = node_->variable;
  const int task = torch::autograd::get_current_graph_task_id();
  const Case found = entry.case_of(gradient, *node_);
  // A module has added it in place, or the pass has none. A pass that Python does not know yet begins with
  // it.
  if (found == Case::kAbsent) return entry.tasks->find(task);
  if (found != Case::kOrdinary) return false;
  if (entry.direct->take(task, entry.index, gradient, parameter, is_sole(gradient))) return true;
  // At a window's first gradient this finds a bucket only because `take` has called `MiddleOfWindow::enter`,
  // which opens the task's buckets.
  const std::shared_ptr<Bucket> bucket = entry.buckets->find(task);
  if (!bucket || !is_sole(gradient)) return false;
  if (entry.is_large) {
    return bucket->put_sum(entry.slot, entry.index, parameter, gradient, entry.accumulator_dtype);
  }
  return bucket->put_if_room(entry.slot, entry.index, parameter, gradient, entry.nbytes);
}

}  // namespace fusedacc::autograd
