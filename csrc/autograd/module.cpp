// The Python module. It is compiled against one torch and one Python, unlike libfusedacc.so. Where it is
// missing, hooks run in Python, and modules of `model=` are left to PyTorch.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string_view>
#include <typeinfo>

#include "middle_of_window.h"
#include "module_attribute.h"
#include "operators.h"

namespace py = pybind11;

namespace fusedacc::autograd {
namespace {

py::list slot_list(const std::vector<PyObject*>& slots) {
  py::list found(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) found[i] = py::reinterpret_borrow<py::object>(slots[i]);
  return found;
}

py::tuple take(Bucket& bucket) {
  Bucket::Content content = bucket.take();
  py::list tensors(content.gradients.size());
  for (size_t i = 0; i < content.gradients.size(); ++i)
    tensors[i] = py::cast(std::move(content.gradients[i]));
  return py::make_tuple(slot_list(content.slots), tensors, content.adoptable);
}

bool any_gradient(const py::list& parameters) {
  for (const py::handle parameter : parameters) {
    if (THPVariable_Unpack(parameter.ptr()).grad().defined()) return true;
  }
  return false;
}

// Whether a hook runs after the AccumulateGrad node of a leaf.
bool leaf_has_post_hook(const at::Tensor& leaf) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
  return node != nullptr && has_post_hook(*node);
}

// Whether it is a hook of ours that its wrapper has let go: such a one does nothing.
bool is_over(const std::unique_ptr<torch::autograd::FunctionPreHook>& hook) {
  const auto* ours = dynamic_cast<const TakingHook*>(hook.get());
  return ours != nullptr && !ours->active();
}

// Puts a hook in front of the only pre-hook of an AccumulateGrad node, a Python one.
std::shared_ptr<HookState> attach(py::object node, py::object slot, int64_t index, int64_t nbytes,
                                  bool is_large, bool may_be_reduced_outside,
                                  at::ScalarType accumulator_dtype, std::shared_ptr<ImmediateAdder> direct,
                                  std::shared_ptr<BucketMap> buckets, std::shared_ptr<KnownTasks> tasks) {
  if (!torch::autograd::THPCppFunction_Check(node.ptr())) return nullptr;
  auto& function = reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata;
  auto* accumulate = dynamic_cast<torch::autograd::AccumulateGrad*>(function.get());
  if (accumulate == nullptr || accumulate->pre_hooks().empty()) return nullptr;
  auto& hooks = accumulate->pre_hooks();
  if (!std::all_of(hooks.begin(), hooks.end() - 1, is_over)) return nullptr;
  auto& python = hooks.back();
  // By its name: torch does not export what a dynamic_cast would need.
  const auto& hook = *python;
  if (std::string_view(typeid(hook).name()) != "N5torch8autograd17PyFunctionPreHookE") return nullptr;
  if (PyDict_Size(static_cast<const torch::autograd::PyFunctionPreHook&>(hook).dict) != 1) return nullptr;
  const at::Tensor& parameter = accumulate->variable;
  if (index >= 0) {
    const py::gil_scoped_release without;  // a hook may wait for the GIL with the lock
    direct->expect(index, accumulator_dtype);
  }
  auto entry = std::shared_ptr<HookState>(new HookState{.direct = std::move(direct),
                                                        .buckets = std::move(buckets),
                                                        .tasks = std::move(tasks),
                                                        .slot = slot.ptr(),
                                                        .node = accumulate,
                                                        .accumulator_dtype = accumulator_dtype,
                                                        .index = index,
                                                        .nbytes = nbytes,
                                                        .is_large = is_large,
                                                        .may_be_reduced_outside = may_be_reduced_outside,
                                                        .dtype = parameter.scalar_type(),
                                                        .device = parameter.device()});
  python = std::make_unique<TakingHook>(entry, accumulate, std::move(python));
  LatestHooks::set(entry);
  return entry;
}

// A method that is called in every micro-batch, past pybind11, whose tables are cold then.
template <bool (MiddleOfWindow::*method)()>
PyObject* call_directly(PyObject* self, PyObject*) {
  void* const middle = reinterpret_cast<py::detail::instance*>(self)->simple_value_holder[0];
  try {
    return PyBool_FromLong((static_cast<MiddleOfWindow*>(middle)->*method)());
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef direct_methods[] = {
    {"step", &call_directly<&MiddleOfWindow::step>, METH_NOARGS, nullptr},
    {"zero_grad", &call_directly<&MiddleOfWindow::zero_grad>, METH_NOARGS, nullptr},
    {"clear", &call_directly<&MiddleOfWindow::clear>, METH_NOARGS, nullptr},
    {"end_before_update", &call_directly<&MiddleOfWindow::end_before_update>, METH_NOARGS, nullptr}};

}  // namespace
}  // namespace fusedacc::autograd

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace fusedacc::autograd;
  // Errors get PyTorch's types in Python, as if PyTorch had called the operators.
  py::register_local_exception_translator([](std::exception_ptr error) {
    if (error) torch::translate_exception_to_python(error);
  });
  // A hook that holds the lock may let a tensor go, which takes the GIL.
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Bucket, std::shared_ptr<Bucket>>(module, "Bucket")
      .def(py::init<int64_t, int64_t>())
      .def("put", [](Bucket& bucket, py::object slot, const at::Tensor& parameter, const at::Tensor& gradient,
                     int64_t nbytes) { bucket.put(slot.ptr(), /*index=*/-1, parameter, gradient, nbytes); })
      .def("take", &take)
      .def("slots", [](Bucket& bucket) { return slot_list(bucket.slots()); })
      .def_property_readonly("nbytes", &Bucket::nbytes)
      .def_readwrite("stream", &Bucket::stream);
  py::class_<BucketMap, std::shared_ptr<BucketMap>>(module, "BucketMap")
      .def(py::init<>())
      .def("__setitem__", &BucketMap::set)
      .def("get", &BucketMap::find)
      .def("pop", [](BucketMap& buckets, int task, py::object) { buckets.drop(task); });
  py::class_<KnownTasks, std::shared_ptr<KnownTasks>>(module, "KnownTasks")
      .def(py::init<>())
      .def("add", [](KnownTasks& tasks, int task) { tasks.set(task, true); })
      .def("drop", &KnownTasks::drop);
  py::class_<ImmediateAdder, std::shared_ptr<ImmediateAdder>>(module, "ImmediateAdder")
      .def(py::init([](uintptr_t add, int64_t limit) {
        return std::make_shared<ImmediateAdder>(reinterpret_cast<AddFlat>(add), limit);
      }))
      .def("load", &ImmediateAdder::load, without_gil)
      .def("open", &ImmediateAdder::open, without_gil)
      .def("has", &ImmediateAdder::has, without_gil)
      .def("close", &ImmediateAdder::close, without_gil)
      .def("added", &ImmediateAdder::added, without_gil)
      .def("skip", &ImmediateAdder::skip, without_gil)
      .def("release", &ImmediateAdder::release, without_gil)
      .def("take_made", &ImmediateAdder::take_made, without_gil)
      .def("join", &ImmediateAdder::join, without_gil)
      .def("take", &ImmediateAdder::take, without_gil);
  py::class_<TensorIdentity>(module, "TensorIdentity")
      .def(py::init<const at::Tensor&>())
      .def("refers_to", &TensorIdentity::refers_to);
  py::class_<SeenParameters, std::shared_ptr<SeenParameters>>(module, "SeenParameters")
      .def_static("look_at", &SeenParameters::look_at)
      .def("hold", &SeenParameters::hold);
  py::class_<MiddleOfWindow, std::shared_ptr<MiddleOfWindow>> middle(module, "MiddleOfWindow");
  for (PyMethodDef& method : direct_methods) {
    auto* type = reinterpret_cast<PyTypeObject*>(middle.ptr());
    middle.attr(method.ml_name) = py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &method));
  }
  middle.def(py::init(&MiddleOfWindow::make))
      .def("arm", &MiddleOfWindow::arm)
      .def("await_first", &MiddleOfWindow::await_first)
      .def("await_update", &MiddleOfWindow::await_update)
      .def("set_lanes", &MiddleOfWindow::set_lanes)
      .def("note_update", &MiddleOfWindow::note_update)
      .def("disarm", &MiddleOfWindow::disarm)
      .def("hand_over", &MiddleOfWindow::hand_over)
      .def("let_go", &MiddleOfWindow::let_go)
      .def_property_readonly("runs", &MiddleOfWindow::runs);
  py::class_<HookState, std::shared_ptr<HookState>>(module, "HookState")
      .def_property(
          "active", [](const HookState& entry) { return entry.active.load(); },
          [](HookState& entry, bool value) { entry.active = value; })
      .def_property(
          "needs_eager", [](const HookState& entry) { return entry.needs_eager.load(); },
          [](HookState& entry, bool value) { entry.needs_eager = value; })
      .def("case_of", [](const HookState& entry, py::handle node, const std::optional<at::Tensor>& gradient) {
        auto& accumulate = dynamic_cast<torch::autograd::AccumulateGrad&>(
            *reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata);
        return kCaseNames[static_cast<size_t>(entry.case_of(gradient.value_or(at::Tensor()), accumulate))];
      });
  py::class_<WeightSum, std::shared_ptr<WeightSum>>(module, "WeightSum")
      .def(py::init([](int64_t number, py::handle slot, py::handle add, py::handle begin_backward) {
        return WeightSum::make(number, slot.ptr(), add.ptr(), begin_backward.ptr());
      }))
      .def(
          "set_product_method",
          [](WeightSum& sum, at::ScalarType operand, at::ScalarType accumulator, int64_t tokens, int method) {
            sum.set_product_method(operand, accumulator, tokens, static_cast<ProductMethod>(method));
          })
      .def("forget_product_methods", &WeightSum::forget_product_methods);
  module.def("make_ticket", &make_ticket);
  module.def("operand_of", &operand_of, without_gil);
  module.def("linear", &linear, without_gil);
  module.def("try_linear", &try_linear, without_gil);
  module.def("embedding", &embedding, without_gil);
  module.def("try_embedding", &try_embedding, without_gil);
  module.def("grouped", &grouped, without_gil);
  module.def("selected", &selected, without_gil);
  module.def("define_operators", &define_operators);
  module.def("cast_of", &cast_of, without_gil);
  module.attr("CASES") = py::cast(std::vector<std::string>(kCaseNames.begin(), kCaseNames.end()));
  module.def("attach", &attach);
  module.def("any_gradient", &any_gradient);
  module.def("has_post_hook", &leaf_has_post_hook);
  define_attribute(module.ptr());
}
