// Functions whose backward pass adds the gradient of the weight to its sum: one implementation for eager
// calls and for compiled graphs. Where a sum must not get the gradient, they return it to autograd.
//
// Each graph saves the *ticket* of the weight's sum (see weight_sum.h). In an eager backward pass the ticket
// is a plain tensor, and the function finds the sum by it. While AOTAutograd traces, the ticket is a fake
// tensor: then the function calls an operator, `add_product` and the like, which the graph has in its place,
// and which finds the sum when the graph runs.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "weight_sum.h"

namespace fusedacc::autograd {

// Returns the weight in the dtype of `kept`, which has its elements, recorded by autograd.
at::Tensor cast_of(const at::Tensor& weight, const at::Tensor& kept);

// Returns the input of a Linear in the dtype of the product, as under autocast; none if PyTorch must compute
// the product, or raise. transposed: the weight is (in, out).
std::optional<at::Tensor> operand_of(const at::Tensor& input, const at::Tensor& weight,
                                     const std::optional<at::Tensor>& bias, bool transposed);

// Computes input @ weight.T + bias, or input @ weight + bias if transposed. input: as returned by
// `operand_of`. used: the weight in the input's dtype, if that differs; the bias is cast here. ticket: of the
// weight's sum.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& used, const at::Tensor& ticket, bool transposed);
// The same for ordinary calls: none where the caller must look closer.
std::optional<at::Tensor> try_linear(const at::Tensor& input, const at::Tensor& weight,
                                     const std::optional<at::Tensor>& bias, const at::Tensor& ticket,
                                     bool transposed);

// Computes weight[indices]. padding: a non-negative row that gets no gradient, or -1. by_frequency: a row
// gets the mean of its gradients.
at::Tensor embedding(const at::Tensor& indices, const at::Tensor& weight, const at::Tensor& ticket,
                     int64_t padding, bool by_frequency);
std::optional<at::Tensor> try_embedding(const at::Tensor& indices, const at::Tensor& weight,
                                        const at::Tensor& ticket, int64_t padding, bool by_frequency);

// Computes rows[s_e:t_e] @ weight[e].T for every expert e, whose rows end at offs[e], or rows[s_e:t_e] @
// weight[e] if inward. Output rows after the last expert's are uninitialised, as in torch's grouped_mm.
at::Tensor grouped(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& offs,
                   const at::Tensor& ticket, bool inward);

// Computes weight[at] for a tensor of one index, or weight[index].
at::Tensor selected(const at::Tensor& weight, const std::optional<at::Tensor>& at, int64_t index,
                    const at::Tensor& ticket);

// Defines the kernels of this library's operators, whose schemas Python has defined. add_product, add_rows:
// what the operators of these names do where native code must not add.
void define_operators(const std::string& library, const pybind11::function& add_product,
                      const pybind11::function& add_rows);

}  // namespace fusedacc::autograd
