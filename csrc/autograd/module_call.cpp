#include "module_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/library.h>

#include <mutex>
#include <string_view>
#include <typeinfo>
#include <unordered_map>

namespace py = pybind11;

namespace fusedacc::autograd {

PatchedForward::PatchedForward(PyObject* try_add, PyObject* begin_backward, bool transposed)
    : transposed(transposed), try_add_(try_add), begin_backward_(begin_backward) {
  Py_INCREF(try_add_);
  Py_INCREF(begin_backward_);
}

PatchedForward::~PatchedForward() {
  if (Py_IsInitialized() == 0) return;
  py::gil_scoped_acquire gil;
  Py_DECREF(try_add_);
  Py_DECREF(begin_backward_);
}

bool PatchedForward::begin_backward() const {
  py::gil_scoped_acquire gil;
  return py::handle(begin_backward_)().cast<bool>();
}

namespace {

// The index of a product in the table of methods; -1 for other dtypes.
int32_t place(at::ScalarType operand, at::ScalarType accumulator, int64_t tokens) {
  const int32_t from = dtype_number(operand), to = dtype_number(accumulator);
  return from < 0 || to < 0 ? -1 : (kDtypeCount * from + to) * cpu::kClasses + cpu::class_of(tokens);
}

}  // namespace

void PatchedForward::set_product_method(at::ScalarType operand, at::ScalarType accumulator, int64_t tokens,
                                        ProductMethod method) {
  const int32_t where = place(operand, accumulator, tokens);
  if (where >= 0) product_methods_[where] = method;
}

ProductMethod PatchedForward::product_method(at::ScalarType operand, at::ScalarType accumulator,
                                             int64_t tokens) const {
  const int32_t where = place(operand, accumulator, tokens);
  return where < 0 ? ProductMethod::kPython : product_methods_[where].load();
}

void PatchedForward::forget_product_methods() {
  for (auto& method : product_methods_) method = ProductMethod::kUnknown;
}

namespace {

// torch.nn.Module.__getattr__ when fusedacc was imported. It looks for parameters first.
PyObject* getattr_of_torch = nullptr;

// Whether the type defines neither the attribute nor how attributes are read. Then an instance's attribute is
// in its __dict__, or __getattr__ of torch.nn.Module finds it.
bool has_ordinary_access(PyTypeObject* type, PyObject* name) {
  static PyObject* const getattribute = PyUnicode_InternFromString("__getattribute__");
  static PyObject* const getattr = PyUnicode_InternFromString("__getattr__");
  static PyObject* const of_object = _PyType_Lookup(&PyBaseObject_Type, getattribute);
  return _PyType_Lookup(type, name) == nullptr && _PyType_Lookup(type, getattr) == getattr_of_torch &&
         _PyType_Lookup(type, getattribute) == of_object;
}

// Returns a borrowed reference to the module's parameter (or None) of this name if getattr would return it;
// else null, without an error.
PyObject* find_parameter(PyObject* module, PyObject* name) {
  static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
  if (!has_ordinary_access(Py_TYPE(module), name)) return nullptr;
  const auto entries = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  PyObject* found = nullptr;
  if (entries && PyDict_GetItemWithError(entries.ptr(), name) == nullptr) {
    PyObject* const named = PyDict_GetItemWithError(entries.ptr(), parameters);
    if (named != nullptr && PyDict_CheckExact(named)) found = PyDict_GetItemWithError(named, name);
  }
  PyErr_Clear();
  return found;
}

PyObject* attribute(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "attribute(module, name) takes two arguments");
    return nullptr;
  }
  PyObject* const found = find_parameter(arguments[0], arguments[1]);
  return found == nullptr ? PyObject_GetAttr(arguments[0], arguments[1]) : Py_NewRef(found);
}

PyMethodDef attribute_functions[] = {
    {"attribute", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&attribute)), METH_FASTCALL,
     nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void define_attribute(PyObject* module) {
  py::object function = py::module_::import("torch.nn").attr("Module").attr("__getattr__");
  getattr_of_torch = function.release().ptr();
  PyModule_AddFunctions(module, attribute_functions);
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

WeightTarget::WeightTarget(const RecordedCall& call)
    : call_(&call), end_(const_cast<torch::autograd::Node*>(call.entry->node)) {
  const auto* graph = torch::autograd::get_current_graph_task_nodes_in_graph();
  armed_ = call.entry->active && graph != nullptr && graph->count(end_) != 0;
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
  const bool watched = has_hooks(weight) || torch::autograd::impl::post_acc_grad_hooks(weight) != nullptr ||
                       call_->entry->is_reduced_outside(*end_);
  return weight.requires_grad() && !watched ? &weight : nullptr;
}

bool may_record(const at::Tensor& input, const at::Tensor& weight) {
  return at::GradMode::is_enabled() && weight.requires_grad() && is_plain(input) && is_plain(weight) &&
         input.device() == weight.device() && !weight.is_meta() && weight.dim() == 2 && !input.is_nested() &&
         !at::impl::torch_function_mode_enabled() && !torch::jit::tracer::isTracing() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

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

namespace {

// Adds these gradients to the rows of the weight's accumulator, where that can be done without Python.
bool try_add_natively(const WeightTarget& destination, const at::Tensor& indices, const at::Tensor& gradient,
                      int64_t padding, bool by_frequency) {
  const RecordedCall* call = destination.call();
  const at::Tensor* weight = destination.weight();
  const int task = torch::autograd::get_current_graph_task_id();
  const auto add_rows = [&] {
    return call->entry->direct->add_rows(task, call->entry->index, indices, gradient, *weight, padding,
                                         by_frequency);
  };
  return weight && call->try_add_natively(task, add_rows);
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
    const bool added = try_add_natively(destination, indices, gradient, padding, by_frequency) ||
                       (call && !at::GradMode::is_enabled() &&
                        call->site->try_add(indices, gradient, destination.armed(), padding, by_frequency));
    if (!added) found[0] = at::embedding_dense_backward(gradient, indices, rows, padding, by_frequency);
    return found;
  }
};

// Where the tensors stand among the function's arguments.
constexpr uint32_t kInput = 0, kWeight = 1, kBias = 2;
constexpr size_t kArguments = 6;

int64_t tokens(const at::Tensor& tensor) {
  return c10::multiply_integers(tensor.sizes().slice(0, tensor.dim() - 1));
}

at::Tensor as_rows(const at::Tensor& tensor) { return tensor.reshape({tokens(tensor), tensor.size(-1)}); }

// Adds left^T right to the weight's accumulator, where that can be done without Python.
bool try_add_natively(const WeightTarget& destination, const at::Tensor& left, const at::Tensor& right) {
  const RecordedCall* call = destination.call();
  const ProductMethod method =
      call->site->product_method(left.scalar_type(), call->entry->accumulator_dtype, left.size(0));
  if (method <= ProductMethod::kPython) return false;
  const at::Tensor* weight = destination.weight();
  const int task = torch::autograd::get_current_graph_task_id();
  const auto multiply = [&] {
    return call->entry->direct->multiply(task, call->entry->index, left, right, *weight, method);
  };
  return weight && call->try_add_natively(task, multiply);
}

// The same, by Python if need be; false where autograd is to have it, as in a backward that is recorded.
bool try_add(const WeightTarget& destination, const at::Tensor& left, const at::Tensor& right) {
  const RecordedCall* call = destination.call();
  if (call == nullptr || at::GradMode::is_enabled()) return false;
  return try_add_natively(destination, left, right) || call->site->try_add(left, right, destination.armed());
}

// The same memory, differentiable by the parameter: this backward is recorded.
at::Tensor as_function_of_weight(const at::Tensor& used) {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return used;
  const auto* end =
      dynamic_cast<const torch::autograd::AccumulateGrad*>(node->next_edge(kWeight).function.get());
  return end == nullptr ? used : cast_of(end->variable, used);
}

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& used,
                            const c10::intrusive_ptr<PatchedForward>& site,
                            const std::shared_ptr<HookState>& entry) {
    context->set_materialize_grads(false);
    RecordedCall::keep(context, site, entry);
    context->saved_data["bias"] = bias.has_value();
    context->saved_data["transposed"] = site->transposed;
    context->saved_data["dtype"] = weight.scalar_type();
    // Not the parameter itself, whose `.data` may be swapped.
    const at::Tensor multiplied = used.has_value() ? *used : weight.detach();
    context->save_for_backward({input, input.requires_grad() ? multiplied : at::Tensor()});
    const bool cast = bias.has_value() && bias->scalar_type() != input.scalar_type();
    const at::Tensor output = at::linear(input, site->transposed ? multiplied.t() : multiplied,
                                         cast ? std::optional(bias->to(input.scalar_type())) : bias);
    // For some inputs ATen returns a view of its product. Autograd forbids writing in place to a view that a
    // function of ours returns, so the output has the same memory and is no view.
    return output.is_view() ? at::_unsafe_view(output, output.sizes()) : output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list found(kArguments);
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return found;
    const variable_list saved = context->get_saved_variables();
    const WeightTarget destination(context, kWeight);
    const bool transposed = context->saved_data["transposed"].toBool();
    const at::Tensor& input = saved[0];
    const bool flat = input.dim() == 2;
    const at::Tensor rows = flat ? gradient : as_rows(gradient);
    const at::Tensor inputs = flat ? input : as_rows(input);
    if (context->needs_input_grad(kInput) && saved[1].defined()) {
      const at::Tensor used = at::GradMode::is_enabled() ? as_function_of_weight(saved[1]) : saved[1];
      const at::Tensor of_input = at::mm(rows, transposed ? used.t() : used);
      found[kInput] = flat ? of_input : of_input.view(input.sizes());
    }
    const at::Tensor& left = transposed ? inputs : rows;
    const at::Tensor& right = transposed ? rows : inputs;
    // Autograd casts nothing for a parameter whose grad_dtype the wrapper has set to None.
    const at::ScalarType dtype = context->saved_data["dtype"].toScalarType();
    if (context->needs_input_grad(kWeight) && !try_add(destination, left, right)) {
      found[kWeight] = at::mm(left.t(), right).to(dtype);
    }
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(kBias)) {
      found[kBias] = rows.sum(0).to(dtype);
    }
    return found;
  }
};

struct Remembered {
  c10::weak_intrusive_ptr<PatchedForward> site;
  std::weak_ptr<HookState> entry;
};

std::mutex remembered_mutex;
std::unordered_map<int64_t, Remembered>& remembered() {
  static auto& calls = *new std::unordered_map<int64_t, Remembered>;
  return calls;
}

std::optional<RecordedCall> call_of(const at::Tensor& ticket) {
  std::lock_guard<std::mutex> lock(remembered_mutex);
  const auto found = remembered().find(*ticket.const_data_ptr<int64_t>());
  if (found == remembered().end()) return std::nullopt;
  RecordedCall call{found->second.site.lock(), found->second.entry.lock()};
  return call.site && call.entry ? std::optional(std::move(call)) : std::nullopt;
}

bool add_product(const at::Tensor& ticket, const at::Tensor& left, const at::Tensor& right) {
  const auto call = call_of(ticket);
  return call && try_add_natively(WeightTarget(*call), left, right);
}

bool add_rows(const at::Tensor& ticket, const at::Tensor& indices, const at::Tensor& gradients,
              int64_t padding, bool by_frequency) {
  const auto call = call_of(ticket);
  return call && try_add_natively(WeightTarget(*call), indices, gradients, padding, by_frequency);
}

// Calls `add`, and Python where it returns false.
template <class... Arguments>
void define_one(const std::string& name, pybind11::handle otherwise, bool (*add)(Arguments...)) {
  otherwise.inc_ref();
  auto kernel = [add, otherwise](Arguments... arguments) {
    if (add(arguments...)) return;
    pybind11::gil_scoped_acquire gil;
    otherwise(arguments...);
  };
  // For as long as the process lives.
  static auto& kept = *new std::vector<c10::RegistrationHandleRAII>;
  kept.push_back(c10::Dispatcher::singleton().registerImpl(
      {name, ""}, c10::DispatchKey::CPU, c10::KernelFunction::makeFromUnboxedLambda(std::move(kernel)),
      std::nullopt, nullptr, "fusedacc"));
}

}  // namespace

void remember(int64_t ticket, const c10::intrusive_ptr<PatchedForward>& site,
              const std::shared_ptr<HookState>& entry) {
  std::lock_guard<std::mutex> lock(remembered_mutex);
  auto& calls = remembered();
  std::erase_if(calls, [](const auto& each) { return each.second.entry.expired(); });
  calls.insert_or_assign(ticket, Remembered{c10::weak_intrusive_ptr<PatchedForward>(site), entry});
}

void define_compiled(const std::string& product, const pybind11::function& product_in_python,
                     const std::string& rows, const pybind11::function& rows_in_python) {
  define_one(product, product_in_python, &add_product);
  define_one(rows, rows_in_python, &add_rows);
}

std::optional<at::Tensor> lookup(const c10::intrusive_ptr<PatchedForward>& site,
                                 const std::shared_ptr<HookState>& entry, const at::Tensor& indices,
                                 const at::Tensor& weight, int64_t padding, bool by_frequency) {
  const bool integers = indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt;
  if (!integers || !may_record(indices, weight)) return std::nullopt;
  return EmbeddingFunction::apply(weight, indices, padding, by_frequency, site, entry);
}

std::optional<at::Tensor> product(const c10::intrusive_ptr<PatchedForward>& site,
                                  const std::shared_ptr<HookState>& entry, const at::Tensor& input,
                                  const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                  const std::optional<at::Tensor>& used) {
  const at::ScalarType dtype = used.has_value() ? used->scalar_type() : weight.scalar_type();
  const bool fits = may_record(input, weight) && input.scalar_type() == dtype && !weight.is_complex() &&
                    input.dim() > 0 && input.size(-1) == weight.size(site->transposed ? 0 : 1) &&
                    (!bias.has_value() ||
                     (is_plain(*bias) && bias->dim() == 1 && bias->scalar_type() == weight.scalar_type())) &&
                    (used.has_value() || !at::autocast::is_autocast_enabled(input.device().type()));
  // Before a graph is made: if Python has not selected a product yet, it does so in the forward.
  const bool known =
      fits && site->product_method(dtype, entry->accumulator_dtype, tokens(input)) != ProductMethod::kUnknown;
  if (!known) return std::nullopt;
  return LinearFunction::apply(input, weight, bias, used, site, entry);
}

}  // namespace fusedacc::autograd
