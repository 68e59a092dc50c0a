#include "reason.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include "hook.h"

namespace fusedacc::autograd {

const char* name_of(Reason reason) {
  switch (reason) {
    case Reason::kFrozen:
      return "frozen";
    case Reason::kNotALeaf:
      return "not_a_leaf";
    case Reason::kSharded:
      return "sharded";
    case Reason::kHookAfterNode:
      return "hook_after_node";
    case Reason::kPostAccumulateHook:
      return "post_accumulate_hook";
    case Reason::kNeedsEager:
      return "needs_eager";
    case Reason::kWeightHook:
      return "weight_hook";
    case Reason::kInModule:
      return "in_module";
    case Reason::kOrdinary:
      return "ordinary";
  }
  return "";
}

Reason reason_for(const Slot& slot, const at::Tensor& parameter, const torch::autograd::Node* node) {
  if (!parameter.requires_grad()) return Reason::kFrozen;
  if (!parameter.is_leaf()) return Reason::kNotALeaf;
  if (slot.sharded) return Reason::kSharded;
  if (slot.may_be_reduced_outside && node != nullptr && has_post_hook(*node)) return Reason::kHookAfterNode;
  if (has_post_accumulate_hook(parameter)) return Reason::kPostAccumulateHook;
  if (slot.needs_eager) return Reason::kNeedsEager;
  if (!slot.has_path) return Reason::kOrdinary;
  return has_hooks_that_act(parameter) ? Reason::kWeightHook : Reason::kInModule;
}

Reason reason_for(const Slot& slot) { return reason_for(slot, slot.parameter(), slot.node); }

bool is_left_to_autograd(Reason reason) {
  return reason == Reason::kHookAfterNode || reason == Reason::kPostAccumulateHook;
}

bool may_write(const Slot& slot, const torch::autograd::AccumulateGrad& node) {
  if (slot.node != &node) return false;  // the parameter was moved or cast
  if (at::GradMode::is_enabled() || torch::autograd::AnomalyMode::is_enabled()) return false;
  return reason_for(slot, node.variable, &node) == Reason::kInModule;
}

}  // namespace fusedacc::autograd
