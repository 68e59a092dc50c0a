// A module whose forward is ours for a while, and what its backward asks before it adds to an accumulator by
// itself.
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/custom_class.h>

#include <array>

#include "../cpu/gemm.h"
#include "hook.h"

namespace fusedacc::autograd {

// One module. Python is asked where no accumulator may be added to at once.
class PatchedForward : public torch::CustomClassHolder {
 public:
  // adds, begins: Python's methods of those names. transposed: the weight of a Linear is (in, out).
  PatchedForward(PyObject* adds, PyObject* begins, bool transposed);
  ~PatchedForward() override;

  // How products of operands of this dtype and so many tokens are added into accumulators of that dtype.
  void set_multiplier(at::ScalarType operand, at::ScalarType accumulator, int64_t tokens,
                      Multiplier multiplier);
  Multiplier multiplier(at::ScalarType operand, at::ScalarType accumulator, int64_t tokens) const;
  // From now on nobody has said so.
  void forget_multipliers();

  // Python's answer: whether the weight's gradient is done with, which is left^T right, or for an Embedding
  // the rows of `right` at the indices `left`. armed: the graph ends in the hooked node. options: of the
  // call, for Python alone.
  template <class... Options>
  bool adds(const at::Tensor& left, const at::Tensor& right, bool armed, Options... options) const {
    pybind11::gil_scoped_acquire gil;
    return pybind11::handle(adds_)(left, right, armed, options...).template cast<bool>();
  }
  // Has Python begin the backward that runs, of which it knows nothing yet. Returns whether accumulators may
  // be added to without Python from then on.
  bool begins() const;

  const bool transposed;

 private:
  PyObject* const adds_;
  PyObject* const begins_;
  // By the operands' dtype, the accumulator's, and the class of tokens.
  std::array<std::atomic<Multiplier>, kDtypeCount * kDtypeCount * cpu::kClasses> multipliers_{};
};

// One call of the module, as its backward remembers it.
struct RecordedCall {
  // In the context: a tensor without elements whose storage owns the call, as compiled autograd knows what to
  // do with tensors, unlike capsules.
  static void keep(torch::autograd::AutogradContext* context, const c10::intrusive_ptr<PatchedForward>& site,
                   const std::shared_ptr<HookState>& entry);

  // Whether `add` has added to the accumulator. Where it cannot, since this is the first gradient of the
  // graph task, it is tried once more after Python has begun that.
  template <class Add>
  bool adds_natively(int task, Add add) const {
    return add() || (!entry->tasks->has(task) && site->begins() && add());
  }

  const c10::intrusive_ptr<PatchedForward> site;
  const std::shared_ptr<HookState> entry;
};

// In a backward: where the gradient of the weight, the function's argument at this position among its
// tensors, is to go.
class WeightTarget {
 public:
  explicit WeightTarget(const torch::autograd::AutogradContext* context, uint32_t position);
  // In the backward of a compiled graph, which has no context of ours.
  explicit WeightTarget(const RecordedCall& call);

  // Whether the graph ends in the hooked node.
  bool armed() const { return armed_; }
  // The weight, if an accumulator may be added to without Python: a backward of everything, and nobody looks
  // at gradients on their way. Else null.
  const at::Tensor* weight() const;
  // Null in compiled autograd.
  const RecordedCall* call() const { return call_; }

 private:
  const at::Tensor holder_;
  const RecordedCall* call_ = nullptr;
  const torch::autograd::Node* end_ = nullptr;
  bool armed_ = false;
};

// Whether a function of ours may take the place of the module's own forward.
bool may_record(const at::Tensor& input, const at::Tensor& weight);

}  // namespace fusedacc::autograd
