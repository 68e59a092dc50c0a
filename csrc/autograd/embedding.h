// An Embedding whose backward adds to the rows of the sum that were looked up; fusedacc/nn/embedding.py has
// the same in Python, and asks here first.
#pragma once

#include "site.h"

namespace fusedacc::autograd {

// weight[indices], recorded by autograd; undefined where the module's own forward is to run. padding: a row
// that takes no gradient, from 0 on, or -1. by_frequency: a row takes the mean of its gradients.
at::Tensor lookup(const c10::intrusive_ptr<Site>& site, const std::shared_ptr<Entry>& entry,
                  const at::Tensor& indices, const at::Tensor& weight, int64_t padding, bool by_frequency);

}  // namespace fusedacc::autograd
