#include "module_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <string_view>
#include <typeinfo>

namespace py = pybind11;

namespace fusedacc::autograd {

PatchedForward::PatchedForward(PyObject* adds, PyObject* begins, bool transposed)
    : transposed(transposed), adds_(adds), begins_(begins) {
  Py_INCREF(adds_);
  Py_INCREF(begins_);
}

PatchedForward::~PatchedForward() {
  if (Py_IsInitialized() == 0) return;
  py::gil_scoped_acquire gil;
  Py_DECREF(adds_);
  Py_DECREF(begins_);
}

bool PatchedForward::begins() const {
  py::gil_scoped_acquire gil;
  return py::handle(begins_)().cast<bool>();
}

namespace {

// The index of a product in the table of multipliers; -1 for other dtypes.
int32_t place(at::ScalarType operand, at::ScalarType accumulator, int64_t tokens) {
  const int32_t from = dtype_number(operand), to = dtype_number(accumulator);
  return from < 0 || to < 0 ? -1 : (kDtypeCount * from + to) * cpu::kClasses + cpu::class_of(tokens);
}

}  // namespace

void PatchedForward::set_multiplier(at::ScalarType operand, at::ScalarType accumulator, int64_t tokens,
                                    Multiplier multiplier) {
  const int32_t where = place(operand, accumulator, tokens);
  if (where >= 0) multipliers_[where] = multiplier;
}

Multiplier PatchedForward::multiplier(at::ScalarType operand, at::ScalarType accumulator,
                                      int64_t tokens) const {
  const int32_t where = place(operand, accumulator, tokens);
  return where < 0 ? Multiplier::kPython : multipliers_[where].load();
}

void PatchedForward::forget_multipliers() {
  for (auto& multiplier : multipliers_) multiplier = Multiplier::kUnknown;
}

namespace {

void forget_call(void* call) { delete static_cast<RecordedCall*>(call); }

}  // namespace

void RecordedCall::keep(torch::autograd::AutogradContext* context,
                        const c10::intrusive_ptr<PatchedForward>& site,
                        const std::shared_ptr<HookState>& entry) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0,
                       at::DataPtr(nullptr, new RecordedCall{site, entry}, &forget_call, at::kCPU), nullptr,
                       false);
  context->saved_data["call"] = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<uint8_t>());
}

WeightTarget::WeightTarget(const torch::autograd::AutogradContext* context, uint32_t position)
    : holder_(context->saved_data.at("call").toTensor()) {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr || !holder_.has_storage()) return;
  const at::DataPtr& data = holder_.storage().data_ptr();
  if (data.get_deleter() != &forget_call) return;
  call_ = static_cast<const RecordedCall*>(data.get_context());
  end_ = node->next_edge(position).function.get();
  armed_ = call_->entry->active && end_ != nullptr && end_ == call_->entry->node;
}

WeightTarget::WeightTarget(const RecordedCall& call) : call_(&call), end_(call.entry->node) {
  const auto* graph = torch::autograd::get_current_graph_task_nodes_in_graph();
  armed_ =
      call.entry->active && graph != nullptr && graph->count(const_cast<torch::autograd::Node*>(end_)) != 0;
}

namespace {

// Whether a hook is registered on the tensor. torch keeps an empty dictionary after all were removed.
bool has_hooks(const at::Tensor& tensor) {
  for (const auto& hook : torch::autograd::impl::hooks(tensor)) {
    const torch::autograd::FunctionPreHook& each = *hook;
    // torch does not export its type.
    if (std::string_view(typeid(each).name()) != "N5torch8autograd23PyFunctionTensorPreHookE") return true;
    PyObject* const dictionary = static_cast<const torch::autograd::PyFunctionTensorPreHook&>(each).dict;
    if (PyDict_GET_SIZE(dictionary) != 0) return true;
  }
  return false;
}

}  // namespace

const at::Tensor* WeightTarget::weight() const {
  if (!armed_ || call_->entry->needs_eager) return nullptr;
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || !wanted->empty() || at::GradMode::is_enabled() ||
      torch::autograd::AnomalyMode::is_enabled()) {
    return nullptr;
  }
  const at::Tensor& weight = static_cast<const torch::autograd::AccumulateGrad*>(end_)->variable;
  const bool watched = has_hooks(weight) || torch::autograd::impl::post_acc_grad_hooks(weight) != nullptr;
  return weight.requires_grad() && !watched ? &weight : nullptr;
}

bool may_record(const at::Tensor& input, const at::Tensor& weight) {
  return at::GradMode::is_enabled() && weight.requires_grad() && is_plain(input) && is_plain(weight) &&
         input.device() == weight.device() && !weight.is_meta() && weight.dim() == 2 && !input.is_nested() &&
         !at::impl::torch_function_mode_enabled() && !torch::jit::tracer::isTracing() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

}  // namespace fusedacc::autograd
