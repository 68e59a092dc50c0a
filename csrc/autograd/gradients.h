// What a gradient is, and who else refers to it.
#pragma once

#include <ATen/core/Tensor.h>

namespace fusedacc::autograd {

// Whether it is an ordinary strided tensor: no subclass that overrides operators, no wrapper of a
// function transform, no lazy bits.
bool is_plain(const at::Tensor& tensor);

// Whether both tensors are dense and have their elements in the same order in memory.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

// The number of a dtype in dtypes.h, or -1.
int32_t dtype_number(at::ScalarType dtype);

// Whether there is a kernel that adds such gradients to such sums.
bool are_pair(at::ScalarType gradient, at::ScalarType sum);

// Whether only autograd's engine refers to the gradient. Its memory may be shared. A gradient from Python or
// from a compiled graph also has a Python wrapper, which does not count if nothing else refers to it.
bool is_sole(const at::Tensor& gradient);

// Whether the gradient, which only the engine refers to, may become the parameter's sum: no other tensor
// shares its memory, and it has the parameter's layout and no graph.
bool is_adoptable(const at::Tensor& gradient, const at::Tensor& parameter);

}  // namespace fusedacc::autograd
