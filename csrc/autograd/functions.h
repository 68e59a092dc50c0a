// A Linear whose backward adds its weight gradient to the sum inside the matrix product, and an Embedding
// whose backward adds to the rows of the sum that were looked up. fusedacc/nn/linear.py and embedding.py have
// the same in Python, and ask here first.
#pragma once

#include "module_call.h"

namespace fusedacc::autograd {

// input @ weight.T + bias (weight itself where it is transposed), recorded by autograd; undefined where the
// module's own forward is to run. used: the weight in the dtype of the input, where it has another.
at::Tensor product(const c10::intrusive_ptr<Site>& site, const std::shared_ptr<Entry>& entry,
                   const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& used);

// weight[indices], recorded by autograd; undefined where the module's own forward is to run. padding: a row
// that takes no gradient, from 0 on, or -1. by_frequency: a row takes the mean of its gradients.
at::Tensor lookup(const c10::intrusive_ptr<Site>& site, const std::shared_ptr<Entry>& entry,
                  const at::Tensor& indices, const at::Tensor& weight, int64_t padding, bool by_frequency);

}  // namespace fusedacc::autograd
