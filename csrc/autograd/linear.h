// A Linear whose backward adds its weight gradient to the sum inside the matrix product;
// fusedacc/nn/linear.py has the same in Python, and asks here first.
#pragma once

#include "site.h"

namespace fusedacc::autograd {

// input @ weight.T + bias (weight itself where it is transposed), recorded by autograd; undefined where the
// module's own forward is to run. used: the weight in the dtype of the input, where it has another.
at::Tensor product(const c10::intrusive_ptr<Site>& site, const std::shared_ptr<Entry>& entry,
                   const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& used);

}  // namespace fusedacc::autograd
