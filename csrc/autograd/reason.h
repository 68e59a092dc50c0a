// Why a parameter's gradients are handled as they are.
#pragma once

#include "slot.h"

namespace fusedacc::autograd {

// `REASONS` in fusedacc/autograd/reasons.py has a sentence for each.
enum class Reason {
  kFrozen,              // there are none
  kNotALeaf,            // autograd passes them on
  kSharded,             // FSDP2 stores them, and Python adds them
  kHookAfterNode,       // autograd stores them for a hook after the node, as of a reducer; Python adds them
  kPostAccumulateHook,  // the same for a hook of the user
  kNeedsEager,          // Python adds them
  kWeightHook,          // a hook on the weight needs them, so the engine adds them, and no module does
  kInModule,            // modules add them
  kOrdinary,            // the engine adds them
};
const char* name_of(Reason reason);

// The first reason that applies. node: the AccumulateGrad node of the parameter, or null without one.
Reason reason_for(const Slot& slot, const at::Tensor& parameter, const torch::autograd::Node* node);
// The same for the slot's parameter as it is now, with the node that has our hook. PyTorch guards a
// parameter's node by a mutex that is not public, so another thread must not ask the parameter for it.
Reason reason_for(const Slot& slot);

// Whether autograd must store the gradient, because other code reads it from p.grad.
bool is_left_to_autograd(Reason reason);

// Whether a module may add the gradient of its weight to the sum itself, in the running backward pass. node:
// the AccumulateGrad node in which the graph ends.
bool may_write(const Slot& slot, const torch::autograd::AccumulateGrad& node);

}  // namespace fusedacc::autograd
