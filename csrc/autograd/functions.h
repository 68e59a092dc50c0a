// What module.cpp shows to Python: a Linear whose backward adds its weight gradient to the accumulator inside
// the matrix product, an Embedding whose backward adds to the rows that were looked up, and casts that are
// kept, all of which fusedacc/nn has in Python too, and asks here first; and operators over lists.
#pragma once

#include "module_call.h"

namespace fusedacc::autograd {

// input @ weight.T + bias (weight itself where it is transposed), recorded by autograd; none where the
// module's own forward is to run. used: the weight in the dtype of the input, where it has another.
std::optional<at::Tensor> product(const c10::intrusive_ptr<PatchedForward>& site,
                                  const std::shared_ptr<HookState>& entry, const at::Tensor& input,
                                  const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                  const std::optional<at::Tensor>& used);

// weight[indices], recorded by autograd; none where the module's own forward is to run. padding: a row
// that takes no gradient, from 0 on, or -1. by_frequency: a row takes the mean of its gradients.
std::optional<at::Tensor> lookup(const c10::intrusive_ptr<PatchedForward>& site,
                                 const std::shared_ptr<HookState>& entry, const at::Tensor& indices,
                                 const at::Tensor& weight, int64_t padding, bool by_frequency);

// In the backward of a compiled graph a ticket leads to a call: from now on this one does.
void remember(int64_t ticket, const c10::intrusive_ptr<PatchedForward>& site,
              const std::shared_ptr<HookState>& entry);

// The kernels of operators (ticket, left, right) that add left^T right to the accumulator of the weight, and
// of (ticket, indices, gradients, padding, by_frequency) that add these gradients to rows of it. Each calls
// the Python function where no call is remembered, or Python is to decide.
void define_compiled(const std::string& product, PyObject* add_product, const std::string& rows,
                     PyObject* add_rows);

// The weight in the dtype of `kept`, which has its elements, recorded by autograd.
at::Tensor cast_of(const at::Tensor& weight, const at::Tensor& kept);

// Adds the operators over lists of tensors to the module, past torch's dispatcher: for lists of ordinary CPU
// tensors whose elements lie alike. Each returns False, with nothing done, for whatever else comes, which it
// leaves to the operators of libfusedacc.so; none of them raises for a tensor.
void define_lists(PyObject* module);

}  // namespace fusedacc::autograd
