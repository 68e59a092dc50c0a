// Reading attributes of a module without Python code.
#pragma once

#include <torch/csrc/python_headers.h>

namespace fusedacc::autograd {

// Adds `attribute(module, name)` to the Python module: the same as getattr, but in most cases without the
// call of torch.nn.Module.__getattr__, which is Python code.
void define_attribute(PyObject* module);

}  // namespace fusedacc::autograd
