// The sum of one weight, for functions whose backward pass adds the weight's gradient to it.
#pragma once

#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <memory>

#include "../cpu/gemm.h"
#include "hook.h"

namespace fusedacc::autograd {

// The native part of a `WeightSum` of fusedacc/nn. Graphs refer to it by a *ticket*: a CPU tensor of one
// element, its number. So the same operator serves eager calls and compiled graphs, which cannot store
// objects.
class WeightSum {
 public:
  // Makes a sum known by this number, which no other one ever has. slot: the weight's, only compared. add,
  // begin_backward: the Python methods `add_in_backward` and `begin_backward`.
  static std::shared_ptr<WeightSum> make(int64_t number, PyObject* slot, PyObject* add,
                                         PyObject* begin_backward);
  ~WeightSum();
  WeightSum(const WeightSum&) = delete;
  WeightSum& operator=(const WeightSum&) = delete;

  // Null if it no longer exists.
  static std::shared_ptr<WeightSum> find(int64_t number);

  // Which method adds products of operands of this dtype with this many tokens to sums of that dtype.
  void set_product_method(at::ScalarType operand, at::ScalarType accumulator, int64_t tokens,
                          ProductMethod method);
  ProductMethod product_method(at::ScalarType operand, at::ScalarType accumulator, int64_t tokens) const;
  // Whether a method was set for such products and the present sum.
  bool has_product_method(at::ScalarType operand, int64_t tokens) const;
  void forget_product_methods();

  // Calls the Python method of this name with the weight's node and these arguments, and returns whether the
  // gradient needs no further work.
  template <class... Arguments>
  bool add_in_python(const char* method, const Arguments&... arguments) const {
    pybind11::gil_scoped_acquire gil;
    const pybind11::object added = pybind11::handle(add_)(method, arguments...);
    return !added.is_none() && added.cast<bool>();
  }
  // Lets Python begin the running backward pass, which it does not know yet. Returns whether native code may
  // then add to sums.
  bool begin_backward() const;

  const PyObject* slot() const { return slot_; }

 private:
  WeightSum(PyObject* slot, PyObject* add, PyObject* begin_backward);

  const PyObject* const slot_;
  PyObject* const add_;
  PyObject* const begin_backward_;
  // By the operands' dtype, the sum's, and the class of tokens.
  std::array<std::atomic<ProductMethod>, kDtypeCount * kDtypeCount * cpu::kClasses> product_methods_{};
};

// Returns a ticket with this number: a plain tensor, in all modes of PyTorch.
at::Tensor make_ticket(int64_t number);
// The number of a ticket that is a plain tensor.
int64_t number_of(const at::Tensor& ticket);

// In a backward pass: the sum to which the gradient of a weight is to be added.
class Destination {
 public:
  // number: of the ticket. The weight is the running function's tensor argument at this position.
  Destination(int64_t number, uint32_t position);
  // In the backward pass of a compiled graph. The graph is one autograd node, so no edge tells which weight a
  // gradient belongs to.
  explicit Destination(int64_t number);

  // Null if it no longer exists.
  const WeightSum* sum() const { return sum_.get(); }
  // The state of our hook on the weight's node. Null if the graph does not end in a node with our hook.
  const HookState* hook() const { return hook_.get(); }

  // Whether `add`, a function of the hook's state and the weight, has added to the sum natively. It is not
  // called where something needs the gradient itself. If it fails because this is the first gradient of the
  // graph task, Python begins the task and `add` runs again.
  template <class Add>
  bool try_add_natively(Add add) const {
    const at::Tensor* weight = weight_to_add();
    if (weight == nullptr) return false;
    const int task = torch::autograd::get_current_graph_task_id();
    const auto add_in_task = [&] { return add(*hook_, task, *weight); };
    return add_in_task() || (!hook_->tasks->find(task) && sum_->begin_backward() && add_in_task());
  }

 private:
  // The weight, if native code may add to its sum: the backward pass computes all gradients, and no hook
  // needs this one. Else null.
  const at::Tensor* weight_to_add() const;

  const std::shared_ptr<WeightSum> sum_;
  const torch::autograd::Node* end_ = nullptr;  // the weight's, which the running graph keeps alive
  std::shared_ptr<HookState> hook_;
};

}  // namespace fusedacc::autograd
