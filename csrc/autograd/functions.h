// The functions that module.cpp exports to Python: a Linear whose backward pass adds its weight gradient to
// the accumulator inside the matrix product, an Embedding whose backward pass adds to the rows that were
// looked up, kept casts, and operators over lists. fusedacc/nn has Python versions of these, which it uses
// where the native ones decline.
#pragma once

#include "module_call.h"

namespace fusedacc::autograd {

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
void define_compiled(const std::string& product, PyObject* add_product, const std::string& rows,
                     PyObject* add_rows);

// Returns the weight in the dtype of `kept`, which has its elements, recorded by autograd.
at::Tensor cast_of(const at::Tensor& weight, const at::Tensor& kept);

// Adds the operators over lists of tensors to the module, past torch's dispatcher: for lists of ordinary CPU
// tensors whose elements lie alike. Each returns False, with nothing done, for whatever else comes, which it
// leaves to the operators of libfusedacc.so; none of them raises for a tensor.
void define_lists(PyObject* module);

}  // namespace fusedacc::autograd
