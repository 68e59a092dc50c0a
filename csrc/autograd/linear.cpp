#include "linear.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace fusedacc::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Call : torch::CustomClassHolder {
  Call(c10::intrusive_ptr<Site> site, std::shared_ptr<Entry> entry)
      : site(std::move(site)), entry(std::move(entry)) {}
  const c10::intrusive_ptr<Site> site;
  const std::shared_ptr<Entry> entry;
};

at::Tensor as_rows(const at::Tensor& tensor) {
  return tensor.reshape({c10::multiply_integers(tensor.sizes().slice(0, tensor.dim() - 1)), tensor.size(-1)});
}

// Whether this is a backward of everything, with nobody looking at gradients on their way to the weight.
bool is_ordinary(const at::Tensor& weight) {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted != nullptr && wanted->empty() && !at::GradMode::is_enabled() &&
         !torch::autograd::AnomalyMode::is_enabled() && weight.requires_grad() &&
         torch::autograd::impl::hooks(weight).empty() &&
         torch::autograd::impl::post_acc_grad_hooks(weight) == nullptr;
}

// Adds left^T right to the weight's sum; false where autograd is to have it.
bool adds(const Call& call, const at::Tensor& left, const at::Tensor& right) {
  const auto node = torch::autograd::get_current_node();
  const torch::autograd::Node* end = node->next_edge(1).function.get();
  const Entry& entry = *call.entry;
  const bool armed = entry.active && end != nullptr && end == entry.node;
  if (armed && !entry.odd) {
    const at::Tensor& weight = static_cast<const torch::autograd::AccumulateGrad*>(end)->variable;
    const Multiplier by = call.site->multiplier(left.scalar_type(), entry.sum_dtype);
    const int task = torch::autograd::get_current_graph_task_id();
    if (by != Multiplier::kUnknown && is_ordinary(weight) &&
        entry.direct->multiply(task, entry.index, left, right, weight, by)) {
      return true;
    }
  }
  return call.site->adds(left, right, armed);
}

class Product : public torch::autograd::Function<Product> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& used,
                            const c10::intrusive_ptr<Site>& site, const std::shared_ptr<Entry>& entry) {
    context->set_materialize_grads(false);
    context->saved_data["call"] = at::IValue::make_capsule(c10::make_intrusive<Call>(site, entry));
    context->saved_data["bias"] = bias.has_value();
    // Not the parameter itself, whose `.data` may be swapped.
    const at::Tensor multiplied = used.has_value() ? *used : weight.detach();
    context->save_for_backward({input, input.requires_grad() ? multiplied : at::Tensor()});
    const std::optional<at::Tensor> added = bias.has_value() ? std::optional(bias->to(input.dtype())) : bias;
    return at::linear(input, site->transposed ? multiplied.t() : multiplied, added);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list found(6);
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return found;
    const variable_list saved = context->get_saved_variables();
    const auto capsule = context->saved_data["call"].toCapsule();
    const Call& call = static_cast<const Call&>(*capsule);
    const at::Tensor& input = saved[0];
    const bool flat = input.dim() == 2;
    const at::Tensor rows = flat ? gradient : as_rows(gradient);
    const at::Tensor inputs = flat ? input : as_rows(input);
    const auto node = torch::autograd::get_current_node();
    if (context->needs_input_grad(0) && saved[1].defined()) {
      at::Tensor used = saved[1];
      if (at::GradMode::is_enabled()) used = as_function_of_weight(*node, used);
      const at::Tensor of_input = at::mm(rows, call.site->transposed ? used.t() : used);
      found[0] = flat ? of_input : of_input.view(input.sizes());
    }
    const at::Tensor& left = call.site->transposed ? inputs : rows;
    const at::Tensor& right = call.site->transposed ? rows : inputs;
    if (!adds(call, left, right)) found[1] = at::mm(left.t(), right).to(call.entry->dtype);
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2)) {
      found[2] = rows.sum(0).to(call.entry->dtype);
    }
    return found;
  }

 private:
  // The same numbers, differentiable by the parameter: this backward is recorded.
  static at::Tensor as_function_of_weight(const torch::autograd::Node& node, const at::Tensor& used) {
    const auto* end = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.next_edge(1).function.get());
    if (end == nullptr) return used;
    const at::Tensor cast = end->variable.to(used.dtype());
    return used + (cast - cast.detach());
  }
};

bool runs_here(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
               bool transposed) {
  return at::GradMode::is_enabled() && weight.requires_grad() && is_plain(input) && is_plain(weight) &&
         input.device() == weight.device() && input.dim() > 0 && weight.dim() == 2 && !input.is_nested() &&
         input.size(-1) == weight.size(transposed ? 0 : 1) && !weight.is_complex() &&
         (!bias.has_value() || (is_plain(*bias) && bias->scalar_type() == weight.scalar_type())) &&
         !at::impl::torch_function_mode_enabled() && !torch::jit::tracer::isTracing() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

}  // namespace

Site::Site(PyObject* python, bool transposed) : transposed(transposed), python_(python) {
  Py_INCREF(python_);
}

Site::~Site() {
  if (Py_IsInitialized() == 0) return;
  py::gil_scoped_acquire gil;
  Py_DECREF(python_);
}

void Site::set_multiplier(at::ScalarType operand, at::ScalarType sum, Multiplier multiplier) {
  const int32_t from = dtype_number(operand), to = dtype_number(sum);
  if (from >= 0 && to >= 0) multipliers_[4 * from + to] = multiplier;
}

Multiplier Site::multiplier(at::ScalarType operand, at::ScalarType sum) const {
  const int32_t from = dtype_number(operand), to = dtype_number(sum);
  return from < 0 || to < 0 ? Multiplier::kUnknown : multipliers_[4 * from + to].load();
}

bool Site::adds(const at::Tensor& left, const at::Tensor& right, bool armed) const {
  py::gil_scoped_acquire gil;
  return py::handle(python_)(left, right, armed).cast<bool>();
}

at::Tensor product(const c10::intrusive_ptr<Site>& site, const std::shared_ptr<Entry>& entry,
                   const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& used) {
  if (!runs_here(input, weight, bias, site->transposed)) return {};
  if (used.has_value()) {
    if (input.scalar_type() != used->scalar_type()) return {};
  } else if (input.scalar_type() != weight.scalar_type() ||
             at::autocast::is_autocast_enabled(input.device().type())) {
    return {};
  }
  return Product::apply(input, weight, bias, used, site, entry);
}

}  // namespace fusedacc::autograd
