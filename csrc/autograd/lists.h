// The operators over lists of tensors, past torch's dispatcher: for lists of ordinary CPU tensors whose
// elements lie alike. Whatever else comes is left, untouched, to the operators of libfusedacc.so.
#pragma once

#include <Python.h>

namespace fusedacc::autograd {

// Adds the functions to the module. Each returns False, with nothing done, for what it leaves to the
// operators; none of them raises for a tensor.
void define_lists(PyObject* module);

}  // namespace fusedacc::autograd
