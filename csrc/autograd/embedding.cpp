#include "functions.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <torch/csrc/autograd/graph_task.h>

namespace fusedacc::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Adds these gradients to the rows of the weight's accumulator, where that can be done without Python.
bool adds_natively(const WeightTarget& destination, const at::Tensor& indices, const at::Tensor& gradient,
                   int64_t padding, bool by_frequency) {
  const RecordedCall* call = destination.call();
  const at::Tensor* weight = destination.weight();
  const int task = torch::autograd::get_current_graph_task_id();
  const auto add_rows = [&] {
    return call->entry->direct->add_rows(task, call->entry->index, indices, gradient, *weight, padding,
                                         by_frequency);
  };
  return weight && call->adds_natively(task, add_rows);
}

class EmbeddingFunction : public torch::autograd::Function<EmbeddingFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& indices,
                            int64_t padding, bool by_frequency,
                            const c10::intrusive_ptr<PatchedForward>& site,
                            const std::shared_ptr<HookState>& entry) {
    context->set_materialize_grads(false);
    RecordedCall::keep(context, site, entry);
    context->saved_data["options"] = c10::List<int64_t>({weight.size(0), padding, by_frequency ? 1 : 0});
    context->save_for_backward({indices});
    return at::embedding(weight, indices, padding, by_frequency, false);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list found(6);
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined() || !context->needs_input_grad(0)) return found;
    const at::Tensor indices = context->get_saved_variables()[0];
    const WeightTarget destination(context, 0);
    const RecordedCall* call = destination.call();
    const auto options = context->saved_data["options"].toIntVector();
    const int64_t rows = options[0], padding = options[1];
    const bool by_frequency = options[2] != 0;
    const bool added = adds_natively(destination, indices, gradient, padding, by_frequency) ||
                       (call && !at::GradMode::is_enabled() &&
                        call->site->adds(indices, gradient, destination.armed(), padding, by_frequency));
    if (!added) found[0] = at::embedding_dense_backward(gradient, indices, rows, padding, by_frequency);
    return found;
  }
};

}  // namespace

bool add_rows(const c10::intrusive_ptr<PatchedForward>& site, const std::shared_ptr<HookState>& entry,
              const at::Tensor& indices, const at::Tensor& gradient, int64_t padding, bool by_frequency) {
  const RecordedCall call{site, entry};
  return adds_natively(WeightTarget(call), indices, gradient, padding, by_frequency);
}

std::optional<at::Tensor> lookup(const c10::intrusive_ptr<PatchedForward>& site,
                                 const std::shared_ptr<HookState>& entry, const at::Tensor& indices,
                                 const at::Tensor& weight, int64_t padding, bool by_frequency) {
  const bool integers = indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt;
  if (!integers || !may_record(indices, weight)) return std::nullopt;
  return EmbeddingFunction::apply(weight, indices, padding, by_frequency, site, entry);
}

}  // namespace fusedacc::autograd
