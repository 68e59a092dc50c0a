#include <torch/csrc/autograd/custom_function.h>

#include "functions.h"

namespace fusedacc::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class CastFunction : public torch::autograd::Function<CastFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& kept) {
    context->set_materialize_grads(false);
    context->saved_data["dtype"] = weight.scalar_type();
    return kept.detach();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    // Autograd casts nothing for a parameter whose grad_dtype the wrapper has set to None.
    return {gradients[0].to(context->saved_data["dtype"].toScalarType()), at::Tensor()};
  }
};

}  // namespace

at::Tensor cast_of(const at::Tensor& weight, const at::Tensor& kept) {
  return CastFunction::apply(weight, kept);
}

}  // namespace fusedacc::autograd
