#include "hook.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace fusedacc::autograd {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

// The base of both hooks. A hook refers weakly to the engine and the slot, because a user's graph may keep
// the node. It does nothing once the slot has another node.
class Hook {
 public:
  virtual ~Hook() = default;

  bool is_for(const std::shared_ptr<Engine>& engine, const std::shared_ptr<Slot>& slot) const {
    return slot_.lock() == slot && engine_.lock() == engine;
  }

 protected:
  Hook(const std::shared_ptr<Engine>& engine, const std::shared_ptr<Slot>& slot, AccumulateGrad* node)
      : engine_(engine), slot_(slot), node_(node) {}

  // The slot, if the hook is in force; else null.
  std::shared_ptr<Slot> slot() const {
    std::shared_ptr<Slot> found = slot_.lock();
    return found && found->node == node_ ? found : nullptr;
  }

  const std::weak_ptr<Engine> engine_;
  const std::weak_ptr<Slot> slot_;
  AccumulateGrad* const node_;  // owns the hook
};

class BeforeNode : public Hook, public torch::autograd::FunctionPreHook {
 public:
  BeforeNode(const std::shared_ptr<Engine>& engine, const std::shared_ptr<Slot>& slot, AccumulateGrad* node)
      : Hook(engine, slot, node) {}

  variable_list operator()(const variable_list& gradients) override {
    const std::shared_ptr<Engine> engine = engine_.lock();
    const std::shared_ptr<Slot> slot = this->slot();
    if (!engine || !slot || gradients.size() != 1) return gradients;
    return engine->deliver(slot, *node_, gradients[0]) ? variable_list{at::Tensor()} : gradients;
  }
  // Compiled autograd stores all gradients, and `step()` adds them.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    const std::shared_ptr<Engine> engine = engine_.lock();
    if (engine) engine->note_bypass();
  }
};

class AfterNode : public Hook, public torch::autograd::FunctionPostHook {
 public:
  AfterNode(const std::shared_ptr<Engine>& engine, const std::shared_ptr<Slot>& slot, AccumulateGrad* node)
      : Hook(engine, slot, node) {}

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    const std::shared_ptr<Engine> engine = engine_.lock();
    const std::shared_ptr<Slot> slot = this->slot();
    if (engine && slot) engine->after_node(slot);
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
};

// The hook of ours in this list for this slot; null if there is none.
template <class Hooks>
Hook* find_hook(const Hooks& hooks, const std::shared_ptr<Engine>& engine,
                const std::shared_ptr<Slot>& slot) {
  for (const auto& hook : hooks) {
    auto* const ours = dynamic_cast<Hook*>(hook.get());
    if (ours != nullptr && ours->is_for(engine, slot)) return ours;
  }
  return nullptr;
}

// Python's attributes of a tensor that torch.autograd reads. Null without a Python object.
const THPVariable* python_part(const at::Tensor& tensor) {
  return reinterpret_cast<const THPVariable*>(tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj());
}

bool is_filled(PyObject* hooks) {
  return hooks != nullptr && (!PyDict_Check(hooks) || PyDict_GET_SIZE(hooks) != 0);
}

}  // namespace

bool has_post_hook(const Node& node) {
  return std::any_of(node.post_hooks().begin(), node.post_hooks().end(),
                     [](const auto& hook) { return dynamic_cast<const AfterNode*>(hook.get()) == nullptr; });
}

bool has_hooks(const at::Tensor& tensor) {
  if (torch::autograd::impl::hooks(tensor).empty()) return false;
  const THPVariable* python = python_part(tensor);
  // torch keeps an empty dictionary after all Python hooks were removed.
  return python == nullptr || python->backward_hooks == nullptr || is_filled(python->backward_hooks);
}

bool has_hooks_that_act(const at::Tensor& tensor) {
  if (!has_hooks(tensor)) return false;
  const THPVariable* python = python_part(tensor);
  if (python == nullptr || python->backward_hooks == nullptr || !PyDict_Check(python->backward_hooks)) {
    return true;
  }
  const pybind11::gil_scoped_acquire gil;
  PyObject *key = nullptr, *hook = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(python->backward_hooks, &position, &key, &hook)) {
    if (PyObject_HasAttrString(hook, "only_looks") == 0) return true;
  }
  return false;
}

bool has_post_accumulate_hook(const at::Tensor& parameter) {
  if (torch::autograd::impl::post_acc_grad_hooks(parameter) == nullptr) return false;
  const THPVariable* python = python_part(parameter);
  return python == nullptr || python->post_accumulate_grad_hooks == nullptr ||
         is_filled(python->post_accumulate_grad_hooks);
}

AccumulateGrad* to_accumulate_grad(PyObject* node) {
  if (!torch::autograd::THPCppFunction_Check(node)) return nullptr;
  return dynamic_cast<AccumulateGrad*>(reinterpret_cast<torch::autograd::THPCppFunction*>(node)->cdata.get());
}

void attach(const std::shared_ptr<Engine>& engine, const std::shared_ptr<Slot>& slot, PyObject* object) {
  AccumulateGrad* const node = to_accumulate_grad(object);
  TORCH_CHECK(node != nullptr, "node is no AccumulateGrad node");
  slot->node = node;
  if (node->variable.is_cuda()) engine->note_gpu();
  // While the node runs its lists must not change, but then it already has our hooks.
  if (find_hook(node->pre_hooks(), engine, slot) != nullptr) return;
  node->add_pre_hook(std::make_unique<BeforeNode>(engine, slot, node));
  node->add_post_hook(std::make_unique<AfterNode>(engine, slot, node));
}

}  // namespace fusedacc::autograd
