// The sum of one weight, for functions whose backward pass adds the weight's gradient to it.
#pragma once

#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <memory>

#include "../cpu/gemm.h"
#include "engine.h"

namespace fusedacc::autograd {

// The native part of a `WeightSum` of fusedacc/nn. Graphs refer to it by a *ticket*: a CPU tensor of one
// element, its number. So the same operator serves eager calls and compiled graphs, which cannot store
// objects.
class WeightSum {
 public:
  // Makes a sum known by this number, which no other sum ever has. add: the Python method `add_in_backward`.
  static std::shared_ptr<WeightSum> make(int64_t number, const std::shared_ptr<Engine>& engine,
                                         std::shared_ptr<Slot> slot, PyObject* add);
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

  // Null if the wrapper no longer exists.
  std::shared_ptr<Engine> engine() const { return engine_.lock(); }
  const std::shared_ptr<Slot>& slot() const { return slot_; }

 private:
  WeightSum(const std::shared_ptr<Engine>& engine, std::shared_ptr<Slot> slot, PyObject* add);

  const std::weak_ptr<Engine> engine_;
  const std::shared_ptr<Slot> slot_;
  PyObject* const add_;
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
  // Calls `add`, a function of the engine and the weight's slot that adds the gradient to the sum natively.
  // Returns false, without a call, where something needs the gradient itself.
  template <class Add>
  bool try_add(Add add) const {
    const std::shared_ptr<Engine> engine = may_add() ? sum_->engine() : nullptr;
    return engine && add(*engine, sum_->slot());
  }

 private:
  // Whether the backward pass computes all gradients, and no hook needs this one.
  bool may_add() const;

  const std::shared_ptr<WeightSum> sum_;
  // The weight's AccumulateGrad node with our hook, which the running graph keeps alive. Null if the graph
  // does not end in one.
  const torch::autograd::AccumulateGrad* node_ = nullptr;
};

}  // namespace fusedacc::autograd
