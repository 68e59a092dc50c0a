// Functions whose backward pass adds the gradient of the weight to its sum: one implementation for eager
// calls and for compiled graphs. Where a sum must not get the gradient, they return it to autograd.
//
// Each graph saves the *ticket* of the weight's sum (see weight_sum.h). In an eager backward pass the ticket
// is a plain tensor, and the function finds the sum by it. While AOTAutograd traces, the ticket is a fake
// tensor: then the function calls an operator, `add_product` and the like, which the graph has in its place,
// and which finds the sum when the graph runs.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusedacc::autograd {

// Adds the functions, and `define_operators`, to the Python module.
void define_functions(pybind11::module_& module);

}  // namespace fusedacc::autograd
