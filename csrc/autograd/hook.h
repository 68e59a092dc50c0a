// The hook on an AccumulateGrad node, which gives each gradient to the engine before autograd stores it.
#pragma once

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/python_headers.h>

#include <memory>

#include "engine.h"

namespace fusedacc::autograd {

// Whether a hook that is not ours runs after this node.
bool has_post_hook(const torch::autograd::Node& node);

// Whether a hook is registered on a tensor.
bool has_hooks(const at::Tensor& tensor);

// Whether a hook is registered on a tensor that needs the gradient itself. Others have the attribute
// `only_looks`: a module may add the gradient to the sum, and give them a copy.
bool has_hooks_that_act(const at::Tensor& tensor);

// Whether a hook is registered on a parameter that runs after autograd has stored its gradient.
bool has_post_accumulate_hook(const at::Tensor& parameter);

// Puts our hook on an AccumulateGrad node, Python's object, for a slot. It is in force until the slot gets
// another node or none.
void attach(const std::shared_ptr<Engine>& engine, const std::shared_ptr<Slot>& slot, PyObject* node);

// The node of Python's object for an AccumulateGrad node; null for other objects.
torch::autograd::AccumulateGrad* to_accumulate_grad(PyObject* node);

}  // namespace fusedacc::autograd
