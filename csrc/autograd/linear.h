// A Linear whose backward adds its weight gradient to the sum inside the matrix product;
// fusedacc/nn/linear.py has the same in Python, and asks here first.
#pragma once

#include <torch/csrc/python_headers.h>
#include <torch/custom_class.h>

#include <array>

#include "hook.h"

namespace fusedacc::autograd {

// One module. Python is asked where no sum may be added to at once.
class Site : public torch::CustomClassHolder {
 public:
  // python: `adds`. transposed: the weight is (in, out).
  Site(PyObject* python, bool transposed);
  ~Site() override;

  // How products of operands of this dtype are added into sums of that one.
  void set_multiplier(at::ScalarType operand, at::ScalarType sum, Multiplier multiplier);
  Multiplier multiplier(at::ScalarType operand, at::ScalarType sum) const;

  // Python's answer: whether the weight's gradient is done with. armed: the graph ends in the hooked node.
  bool adds(const at::Tensor& left, const at::Tensor& right, bool armed) const;

  const bool transposed;

 private:
  PyObject* const python_;
  std::array<std::atomic<Multiplier>, 16> multipliers_{};
};

// input @ weight.T + bias (weight itself where it is transposed), recorded by autograd; undefined where the
// module's own forward is to run. used: the weight in the dtype of the input, where it has another.
at::Tensor product(const c10::intrusive_ptr<Site>& site, const std::shared_ptr<Entry>& entry,
                   const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& used);

}  // namespace fusedacc::autograd
