// Modules with replaced forwards: a Linear whose backward pass adds its weight gradient to the accumulator
// inside the matrix product, an Embedding whose backward pass adds to the rows that were looked up, and kept
// casts. fusedacc/nn has Python versions of these, which it uses where the native ones decline.
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/python_headers.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/custom_class.h>

#include <array>

#include "../cpu/gemm.h"
#include "hook.h"

namespace fusedacc::autograd {

// One module. It calls Python where native code must not add to the accumulator.
class PatchedForward : public torch::CustomClassHolder {
 public:
  // try_add, begin_backward: the Python methods with these names. transposed: the weight of a Linear is (in,
  // out).
  PatchedForward(PyObject* try_add, PyObject* begin_backward, bool transposed);
  ~PatchedForward() override;

  // Which method adds products of operands of this dtype with this many tokens to accumulators of that dtype.
  void set_product_method(at::ScalarType operand, at::ScalarType accumulator, int64_t tokens,
                          ProductMethod method);
  ProductMethod product_method(at::ScalarType operand, at::ScalarType accumulator, int64_t tokens) const;
  // Forgets all methods.
  void forget_product_methods();

  // Calls Python to add the weight's gradient, and returns whether that is done. The gradient is left^T
  // right, or for an Embedding the rows of `right` at the indices `left`. armed: the graph ends in the hooked
  // node. options: further arguments for Python.
  template <class... Options>
  bool try_add(const at::Tensor& left, const at::Tensor& right, bool armed, Options... options) const {
    pybind11::gil_scoped_acquire gil;
    return pybind11::handle(try_add_)(left, right, armed, options...).template cast<bool>();
  }
  // Lets Python begin the running backward pass, which it does not know yet. Returns whether native code may
  // then add to accumulators.
  bool begin_backward() const;

  const bool transposed;

 private:
  PyObject* const try_add_;
  PyObject* const begin_backward_;
  // By the operands' dtype, the accumulator's, and the class of tokens.
  std::array<std::atomic<ProductMethod>, kDtypeCount * kDtypeCount * cpu::kClasses> product_methods_{};
};

// One call of the module, stored for its backward pass.
struct RecordedCall {
  // Stores the call in the context, as a tensor without elements whose storage owns the call. Compiled
  // autograd supports tensors there, but not capsules.
  static void keep(torch::autograd::AutogradContext* context, const c10::intrusive_ptr<PatchedForward>& site,
                   const std::shared_ptr<HookState>& entry);

  // Whether `add` has added to the accumulator. If it fails because this is the first gradient of the graph
  // task, Python begins the task and `add` runs again.
  template <class Add>
  bool try_add_natively(int task, Add add) const {
    return add() || (!entry->tasks->find(task) && site->begin_backward() && add());
  }

  const c10::intrusive_ptr<PatchedForward> site;
  const std::shared_ptr<HookState> entry;
};

// In a backward pass: where the gradient of the weight must go. The weight is the function's tensor argument
// at this position.
class WeightTarget {
 public:
  explicit WeightTarget(const torch::autograd::AutogradContext* context, uint32_t position);
  // In the backward pass of a compiled graph, which has no such context.
  explicit WeightTarget(const RecordedCall& call);

  // Whether the graph ends in the hooked node.
  bool armed() const { return armed_; }
  // The weight, if native code may add to its accumulator: the backward pass computes all gradients, and no
  // hook needs this one. Else null.
  const at::Tensor* weight() const;
  // Null in compiled autograd.
  const RecordedCall* call() const { return call_; }

 private:
  const at::Tensor holder_;
  const RecordedCall* call_ = nullptr;
  torch::autograd::Node* end_ = nullptr;
  bool armed_ = false;
};

// Whether the native function may replace the module's own forward for this call.
bool may_record(const at::Tensor& input, const at::Tensor& weight);

// Computes input @ weight.T + bias (weight itself if it is transposed), recorded by autograd; none if the
// module's own forward must run. used: the weight cast to the dtype of the input, if that differs.
std::optional<at::Tensor> product(const c10::intrusive_ptr<PatchedForward>& site,
                                  const std::shared_ptr<HookState>& entry, const at::Tensor& input,
                                  const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                  const std::optional<at::Tensor>& used);

// Computes weight[indices], recorded by autograd; none if the module's own forward must run. padding: a
// non-negative row that gets no gradient, or -1. by_frequency: a row gets the mean of its gradients.
std::optional<at::Tensor> lookup(const c10::intrusive_ptr<PatchedForward>& site,
                                 const std::shared_ptr<HookState>& entry, const at::Tensor& indices,
                                 const at::Tensor& weight, int64_t padding, bool by_frequency);

// Registers a call under a ticket, by which the backward pass of a compiled graph finds it.
void remember(int64_t ticket, const c10::intrusive_ptr<PatchedForward>& site,
              const std::shared_ptr<HookState>& entry);

// The kernels of operators (ticket, left, right) that add left^T right to the accumulator of the weight, and
// of (ticket, indices, gradients, padding, by_frequency) that add these gradients to rows of it. Each calls
// the Python function where no call is remembered, or Python is to decide.
void define_compiled(const std::string& product, const pybind11::function& add_product,
                     const std::string& rows, const pybind11::function& add_rows);

// Adds `attribute(module, name)` to the Python module: the same as getattr, but in most cases without the
// call of torch.nn.Module.__getattr__, which is Python code.
void define_attribute(PyObject* module);

// Returns the weight in the dtype of `kept`, which has its elements, recorded by autograd.
at::Tensor cast_of(const at::Tensor& weight, const at::Tensor& kept);

// Adds the operators over lists of tensors to the module, past torch's dispatcher: for lists of ordinary CPU
// tensors whose elements lie alike. Each returns False, with nothing done, for whatever else comes, which it
// leaves to the operators of libfusedacc.so; none of them raises for a tensor.
void define_lists(PyObject* module);

}  // namespace fusedacc::autograd
