// Operators over lists of tensors, past torch's dispatcher.
#pragma once

#include <torch/csrc/python_headers.h>

namespace fusedacc::autograd {

// Adds the operators to the Python module: for lists of ordinary CPU tensors whose elements lie alike. Each
// returns False, with nothing done, for whatever else comes, which it leaves to the operators of
// libfusedacc.so; none of them raises for a tensor.
void define_lists(PyObject* module);

}  // namespace fusedacc::autograd
