#include "hook.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace fusedacc::autograd {
namespace {

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

c10::Stream current_stream(const at::Tensor& tensor) {
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

}  // namespace

void Bucket::put(PyObject* slot, at::Tensor gradient, int64_t nbytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!gradient.is_cpu()) taken_on_ = current_stream(gradient);
  slots_.push_back(slot);
  gradients_.push_back(std::move(gradient));
  nbytes_ += nbytes;
}

bool Bucket::put_if_room(PyObject* slot, const at::Tensor& gradient, int64_t nbytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (nbytes_ + nbytes >= limit_) return false;
  if (!gradient.is_cpu() && (!taken_on_.has_value() || *taken_on_ != current_stream(gradient))) return false;
  slots_.push_back(slot);
  gradients_.push_back(gradient);
  nbytes_ += nbytes;
  return true;
}

std::pair<std::vector<PyObject*>, std::vector<at::Tensor>> Bucket::take() {
  std::lock_guard<std::mutex> guard(mutex_);
  nbytes_ = 0;
  taken_on_.reset();
  return {std::exchange(slots_, {}), std::exchange(gradients_, {})};
}

std::vector<PyObject*> Bucket::slots() {
  std::lock_guard<std::mutex> guard(mutex_);
  return slots_;
}

int64_t Bucket::nbytes() {
  std::lock_guard<std::mutex> guard(mutex_);
  return nbytes_;
}

void Lane::open(int task, std::shared_ptr<Bucket> bucket) {
  std::lock_guard<std::mutex> guard(mutex_);
  buckets_[task] = std::move(bucket);
}

void Lane::drop(int task) {
  std::lock_guard<std::mutex> guard(mutex_);
  buckets_.erase(task);
}

std::shared_ptr<Bucket> Lane::find(int task) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = buckets_.find(task);
  return found == buckets_.end() ? nullptr : found->second;
}

void Tasks::add(int task) {
  std::lock_guard<std::mutex> guard(mutex_);
  known_.insert(task);
}

void Tasks::drop(int task) {
  std::lock_guard<std::mutex> guard(mutex_);
  known_.erase(task);
}

bool Tasks::has(int task) {
  std::lock_guard<std::mutex> guard(mutex_);
  return known_.count(task) != 0;
}

TakingHook::TakingHook(std::shared_ptr<Entry> entry, const torch::autograd::AccumulateGrad* node,
                       std::unique_ptr<torch::autograd::FunctionPreHook> python)
    : entry_(std::move(entry)), node_(node), python_(std::move(python)) {}

torch::autograd::variable_list TakingHook::operator()(const torch::autograd::variable_list& gradients) {
  if (entry_->active && gradients.size() == 1 && takes(gradients[0])) return {at::Tensor()};
  return (*python_)(gradients);
}

void TakingHook::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  python_->compiled_args(args);
}

bool TakingHook::takes(const at::Tensor& gradient) const {
  const Entry& entry = *entry_;
  const int task = torch::autograd::get_current_graph_task_id();
  if (!gradient.defined()) return entry.tasks->has(task);  // a module has added it by itself
  const at::Tensor& parameter = node_->variable;
  if (entry.odd || !parameter.requires_grad() || gradient.scalar_type() != entry.dtype ||
      gradient.device() != entry.device || torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr ||
      !is_plain(gradient)) {
    return false;
  }
  if (entry.direct->take(task, entry.index, gradient, parameter)) return true;
  if (entry.large) return false;
  const std::shared_ptr<Bucket> bucket = entry.lane->find(task);
  // More references than the engine's: somebody may still change it.
  return bucket && gradient.use_count() == 1 && bucket->put_if_room(entry.slot, gradient, entry.nbytes);
}

}  // namespace fusedacc::autograd
