// The pre-hook of one parameter's AccumulateGrad node: the ordinary case without Python, the rest left to it.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/python_headers.h>

#include <array>
#include <memory>
#include <set>
#include <unordered_map>

#include "immediate_add.h"

namespace fusedacc::autograd {

// Who takes a gradient: the cases that a hook can meet, as fusedacc/autograd/eligibility.py has them.
enum class Case { kFrozen, kPostAccumulateHook, kAbsent, kNotPlain, kNeedsEager, kOtherLane, kOrdinary };

inline constexpr std::array kCaseNames{"frozen",      "post_accumulate_hook", "absent",  "not_plain",
                                       "needs_eager", "other_lane",           "ordinary"};

// Gradients of one lane, taken on one stream in one graph task, that wait to be added.
class Bucket {
 public:
  // stream: what Python calls it. limit: Python is told before the bucket would hold as many bytes.
  // makes_sums: no parameter has an accumulator when the graph task begins.
  Bucket(int64_t stream, int64_t limit, bool makes_sums = false)
      : stream(stream), limit_(limit), makes_sums_(makes_sums) {}

  // Nobody else refers to the gradient. Slots are borrowed: whoever puts one here keeps it alive.
  void put(PyObject* slot, const at::Tensor& parameter, const at::Tensor& gradient, int64_t nbytes);
  // The same, unless it would fill the bucket or comes on another stream than the first.
  bool put_if_room(PyObject* slot, const at::Tensor& parameter, const at::Tensor& gradient, int64_t nbytes);
  // The same for a gradient that may become the accumulator, whatever its size; false for any other.
  bool put_sum(PyObject* slot, const at::Tensor& parameter, const at::Tensor& gradient, at::ScalarType dtype);
  // Empties it. adoptable: each gradient may become the accumulator of its parameter.
  struct Content {
    std::vector<PyObject*> slots;
    std::vector<at::Tensor> gradients;
    bool adoptable;
  };
  Content take();
  std::vector<PyObject*> slots();
  int64_t nbytes();

  int64_t stream;

 private:
  void append(PyObject* slot, const at::Tensor& parameter, const at::Tensor& gradient, int64_t nbytes);

  const int64_t limit_;
  const bool makes_sums_;
  std::mutex mutex_;
  int64_t nbytes_ = 0;
  std::optional<c10::Stream> taken_on_;
  std::vector<PyObject*> slots_;
  std::vector<at::Tensor> gradients_;
  bool adoptable_ = true;
};

// The open buckets of a lane by graph task, which all hooks of the lane look at.
class BucketMap {
 public:
  void open(int task, std::shared_ptr<Bucket> bucket);
  void drop(int task);
  std::shared_ptr<Bucket> find(int task);

 private:
  std::mutex mutex_;
  std::unordered_map<int, std::shared_ptr<Bucket>> buckets_;
};

// Which graph tasks the wrapper knows.
class GraphTasks {
 public:
  void add(int task);
  void drop(int task);
  bool has(int task);

 private:
  std::mutex mutex_;
  std::set<int> known_;
};

// What a hook shares with its wrapper, which lets it go by `active`.
struct HookState {
  std::atomic<bool> active{true};
  std::atomic<bool> needs_eager{false};  // Python alone knows what to do with its gradients
  std::shared_ptr<ImmediateAdder> direct;
  std::shared_ptr<BucketMap> lane;
  std::shared_ptr<GraphTasks> tasks;
  PyObject* slot;                     // borrowed, from the wrapper
  const torch::autograd::Node* node;  // to be compared only
  at::ScalarType accumulator_dtype;
  int64_t index;
  int64_t nbytes;
  bool large;  // waits in a bucket only where it may become the accumulator
  at::ScalarType dtype;
  c10::Device device;

  // Who takes this gradient of the entry's parameter; undefined: there is none.
  Case case_of(const at::Tensor& gradient, const at::Tensor& parameter) const;
};

class TakingHook : public torch::autograd::FunctionPreHook {
 public:
  // node owns the hook. python: asked where this hook does not take a gradient.
  TakingHook(std::shared_ptr<HookState> entry, const torch::autograd::AccumulateGrad* node,
             std::unique_ptr<torch::autograd::FunctionPreHook> python);

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  bool active() const { return entry_->active; }

 private:
  bool takes(const at::Tensor& gradient) const;

  const std::shared_ptr<HookState> entry_;
  const torch::autograd::AccumulateGrad* const node_;
  const std::unique_ptr<torch::autograd::FunctionPreHook> python_;
};

}  // namespace fusedacc::autograd
