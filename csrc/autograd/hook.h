// The native pre-hook of an AccumulateGrad node. It handles ordinary gradients, and leaves all others to
// Python.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/python_headers.h>

#include <array>
#include <memory>
#include <unordered_map>

#include "immediate_add.h"

namespace fusedacc::autograd {

// The cases of a single gradient, with the same names and order as in fusedacc/autograd/eligibility.py.
enum class Case {
  kFrozen,
  kReducedOutside,
  kPostAccumulateHook,
  kAbsent,
  kNotPlain,
  kNeedsEager,
  kOtherLane,
  kOrdinary,
};

inline constexpr std::array kCaseNames{
    "frozen",    "reduced_outside", "post_accumulate_hook", "absent",
    "not_plain", "needs_eager",     "other_lane",           "ordinary",
};

// Whether a hook runs after this node. torch keeps an empty dictionary after all Python hooks were removed.
bool has_post_hook(const torch::autograd::Node& node);

// Gradients of one lane, taken on one stream in one graph task, that wait to be added. (A reduce bucket,
// which several ranks all-reduce, has sums.)
class Bucket {
 public:
  // stream: its number in Python. limit: Python handles the gradient with which the bucket would reach this
  // many bytes. makes_sums: no parameter has an accumulator when the graph task begins.
  Bucket(int64_t stream, int64_t limit, bool makes_sums = false)
      : stream(stream), limit_(limit), makes_sums_(makes_sums) {}

  // No other code may refer to the gradient. Slots are borrowed references, which the caller keeps alive.
  // index: of the parameter's sum in the `ImmediateAdder`; -1 for none.
  void put(PyObject* slot, int64_t index, const at::Tensor& parameter, const at::Tensor& gradient,
           int64_t nbytes);
  // The same, unless the bucket would be full or the gradient is on another stream than the first one.
  bool put_if_room(PyObject* slot, int64_t index, const at::Tensor& parameter, const at::Tensor& gradient,
                   int64_t nbytes);
  // The same for a gradient of any size that may become the accumulator; false for others.
  bool put_sum(PyObject* slot, int64_t index, const at::Tensor& parameter, const at::Tensor& gradient,
               at::ScalarType dtype);
  // Empties it. adoptable: each gradient may become the accumulator of its parameter.
  struct Content {
    std::vector<PyObject*> slots;
    std::vector<int64_t> indices;
    std::vector<at::Tensor> gradients;
    bool adoptable;
  };
  Content take();
  // Whether each gradient may become a sum that the adder lacks.
  bool makes_sums(ImmediateAdder& adder);
  std::vector<PyObject*> slots() {
    std::lock_guard<std::mutex> guard(mutex_);
    return slots_;
  }
  int64_t nbytes() {
    std::lock_guard<std::mutex> guard(mutex_);
    return nbytes_;
  }

  int64_t stream;

 private:
  void append(PyObject* slot, int64_t index, const at::Tensor& parameter, const at::Tensor& gradient,
              int64_t nbytes);

  const int64_t limit_;
  const bool makes_sums_;
  std::mutex mutex_;
  int64_t nbytes_ = 0;
  std::optional<c10::Stream> taken_on_;
  std::vector<PyObject*> slots_;
  std::vector<int64_t> indices_;
  std::vector<at::Tensor> gradients_;
  bool adoptable_ = true;
};

// A value for each of some graph tasks, shared by hooks. Values are freed after the lock is released: freeing
// a bucket's tensors may need the GIL, and the thread that holds the GIL may be waiting for the lock.
template <class Value>
class ByTask {
 public:
  void set(int task, Value value) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::swap(values_[task], value);
  }
  void drop(int task) {
    typename Values::node_type dropped;
    std::lock_guard<std::mutex> guard(mutex_);
    dropped = values_.extract(task);
  }
  // An empty value for other tasks.
  Value find(int task) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = values_.find(task);
    return found == values_.end() ? Value() : found->second;
  }

 private:
  using Values = std::unordered_map<int, Value>;

  std::mutex mutex_;
  Values values_;
};

// The open buckets of a lane, by graph task, and the graph tasks that the wrapper knows.
using BucketMap = ByTask<std::shared_ptr<Bucket>>;
using KnownTasks = ByTask<bool>;

// The state that a hook shares with its wrapper.
struct HookState {
  std::atomic<bool> active{true};        // false detaches the hook
  std::atomic<bool> needs_eager{false};  // only Python can add the gradients
  std::shared_ptr<ImmediateAdder> direct;
  std::shared_ptr<BucketMap> buckets;
  std::shared_ptr<KnownTasks> tasks;
  PyObject* slot;                     // borrowed, from the wrapper
  const torch::autograd::Node* node;  // compared; dereferenced only while the running graph has it
  at::ScalarType accumulator_dtype;
  int64_t index;
  int64_t nbytes;
  bool is_large;                // waits in a bucket only if the gradient may become the accumulator
  bool may_be_reduced_outside;  // false if the wrapper reduces it, and has the node's post-hooks
  at::ScalarType dtype;
  c10::Device device;

  // Whether other code has hooks that run after this node, which is the parameter's.
  bool is_reduced_outside(const torch::autograd::Node& node) const {
    return may_be_reduced_outside && has_post_hook(node);
  }
  // The case of this gradient of the node's parameter. An undefined gradient is absent.
  Case case_of(const at::Tensor& gradient, torch::autograd::AccumulateGrad& node) const;
};

class TakingHook : public torch::autograd::FunctionPreHook {
 public:
  // node owns the hook. python: the hook that gets all gradients that this hook does not handle.
  TakingHook(std::shared_ptr<HookState> entry, torch::autograd::AccumulateGrad* node,
             std::unique_ptr<torch::autograd::FunctionPreHook> python)
      : entry_(std::move(entry)), node_(node), python_(std::move(python)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    python_->compiled_args(args);
  }
  bool active() const { return entry_->active; }
  const std::shared_ptr<HookState>& state() const { return entry_; }

 private:
  bool try_take(const at::Tensor& gradient) const;

  const std::shared_ptr<HookState> entry_;
  torch::autograd::AccumulateGrad* const node_;
  const std::unique_ptr<torch::autograd::FunctionPreHook> python_;
};

// The state of our hook on this node for this slot of Python. Null if there is none, or it was detached.
std::shared_ptr<HookState> hook_on(torch::autograd::Node& node, const PyObject* slot);

// The latest hook for each slot of Python. A weak reference to a parameter would find its node too, but
// torch.utils.swap_tensors refuses a parameter that has one.
class LatestHooks {
 public:
  static void set(const std::shared_ptr<HookState>& hook);
  // Null if the slot has no hook, or it was detached.
  static std::shared_ptr<HookState> find(const PyObject* slot);
};

}  // namespace fusedacc::autograd
