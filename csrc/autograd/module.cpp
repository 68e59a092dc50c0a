// The Python module. It is compiled against one torch and one Python, unlike libfusedacc.so. Where it is
// missing, autograd stores all gradients, and Python adds them from there.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include "engine.h"
#include "hook.h"
#include "module_attribute.h"
#include "number_caster.h"
#include "operators.h"
#include "weight_sum.h"

namespace py = pybind11;

namespace fusedacc::autograd {
namespace {

// The engine's mutex, as Python's `with` takes it.
class EngineLock {
 public:
  explicit EngineLock(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  void enter() {
    const py::gil_scoped_release released;  // a thread that holds the mutex may wait for the GIL
    engine_->mutex().lock();
  }
  void exit(const py::args&) { engine_->mutex().unlock(); }

 private:
  const std::shared_ptr<Engine> engine_;
};

// Whether a hook that is not ours runs after the AccumulateGrad node of a leaf.
bool leaf_has_post_hook(const at::Tensor& leaf) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
  return node != nullptr && has_post_hook(*node);
}

// Sets `grad_dtype` of a leaf that is None. It follows the leaf's dtype after later casts if it did so before
// it was set to None. Setting it in Python would end that.
void restore_grad_dtype(const at::Tensor& leaf, at::ScalarType dtype) {
  std::optional<at::ScalarType>& set_by_user =
      torch::autograd::impl::materialize_autograd_meta(leaf)->grad_dtype_;
  const std::optional<at::ScalarType> former = set_by_user;
  leaf.set_grad_dtype(dtype);
  set_by_user = former;
}

// An optional tensor in Python is a tensor that may be undefined here.
template <class Class>
auto tensor_property(at::Tensor Class::* member) {
  return std::make_pair(
      [member](const Class& object) {
        const at::Tensor& tensor = object.*member;
        return tensor.defined() ? std::optional(tensor) : std::nullopt;
      },
      [member](Class& object, std::optional<at::Tensor> tensor) {
        // Freeing the former tensor may run Python code that reads this one.
        std::swap(object.*member, tensor.emplace(tensor.value_or(at::Tensor())));
      });
}

std::optional<at::Tensor> optional(at::Tensor tensor) {
  return tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt;
}

void define_state(py::module_& module) {
  py::class_<TensorIdentity>(module, "TensorIdentity")
      .def(py::init<const at::Tensor&>())
      .def("refers_to", &TensorIdentity::refers_to);
  const auto [accumulator, set_accumulator] = tensor_property(&Slot::accumulator);
  const auto [main_grad, set_main_grad] = tensor_property(&Slot::main_grad);
  py::class_<Slot, std::shared_ptr<Slot>>(module, "Slot")
      .def(py::init([](py::handle parameter) { return std::make_shared<Slot>(parameter.ptr()); }))
      .def_property("accumulator", accumulator, set_accumulator)
      .def_property("main_grad", main_grad, set_main_grad)
      .def_readwrite("beta", &Slot::beta)
      .def_property(
          "grad_state", [](const Slot& slot) { return static_cast<int>(slot.grad_state); },
          [](Slot& slot, int state) { slot.grad_state = static_cast<GradState>(state); })
      .def_property(
          "placed", [](const Slot& slot) { return std::optional<TensorIdentity>(slot.placed); },
          [](Slot& slot, std::optional<TensorIdentity> placed) { slot.placed = std::move(placed); })
      .def_readwrite("placed_version", &Slot::placed_version)
      .def_readwrite("sparse_bytes", &Slot::sparse_bytes)
      .def_readwrite("is_aside", &Slot::is_aside)
      .def_readwrite("is_native", &Slot::is_native)
      .def_property(
          "needs_eager", [](const Slot& slot) { return slot.needs_eager.load(); },
          [](Slot& slot, bool value) { slot.needs_eager = value; })
      .def_readwrite("in_reduce_bucket", &Slot::in_reduce_bucket)
      .def_readwrite("may_be_reduced_outside", &Slot::may_be_reduced_outside)
      .def_readwrite("is_begun", &Slot::is_begun)
      .def_readwrite("sharded", &Slot::sharded)
      .def_readwrite("has_path", &Slot::has_path)
      .def("describe_to_engine",
           [](Slot& slot, at::Device device, at::ScalarType dtype, at::ScalarType accumulate_dtype) {
             slot.device = device;
             slot.dtype = dtype;
             slot.accumulate_dtype = accumulate_dtype;
           })
      .def("note_seen", &Slot::note_seen)
      .def("forget_seen", &Slot::forget_seen)
      .def("is_placed",
           [](const Slot& slot, std::optional<at::Tensor> gradient) {
             return gradient.has_value() && slot.is_placed(*gradient);
           })
      .def("is_foreign", &Slot::is_foreign);
  py::class_<Sums, std::shared_ptr<Sums>>(module, "Sums")
      .def(py::init<bool>())
      .def_readonly("always_exposed", &Sums::always_exposed)
      .def_readwrite("exposed", &Sums::exposed)
      .def_readwrite("consumed", &Sums::consumed)
      .def_readwrite("num_ignored", &Sums::num_ignored)
      .def("current", [](const Sums& sums, const Slot& slot) { return optional(sums.current(slot)); })
      .def("put", &Sums::put)
      .def("begin_main_grad", &Sums::begin_main_grad)
      .def("publish", &Sums::publish)
      .def(
          "set_state",
          [](Sums& sums, Slot& slot, int state, std::optional<at::Tensor> placed) {
            sums.set_state(slot, static_cast<GradState>(state), placed.value_or(at::Tensor()));
          },
          py::arg("slot"), py::arg("state"), py::arg("placed") = py::none());
  py::class_<WindowState, std::shared_ptr<WindowState>>(module, "WindowState")
      .def(py::init<>())
      .def_readwrite("micro_step", &WindowState::micro_step)
      .def_readwrite("usual_backwards", &WindowState::usual_backwards)
      .def_readwrite("has_updated", &WindowState::has_updated)
      .def_readwrite("ignoring", &WindowState::ignoring)
      .def_readwrite("in_context", &WindowState::in_context)
      .def_readwrite("unsynchronised", &WindowState::unsynchronised)
      .def_readwrite("withheld", &WindowState::withheld)
      .def_readwrite("tainted", &WindowState::tainted)
      .def_readwrite("sum_scale", &WindowState::sum_scale)
      .def_readwrite("ran", &WindowState::ran)
      .def_readwrite("num_backwards", &WindowState::num_backwards)
      .def_readwrite("deferred", &WindowState::deferred)
      .def_readwrite("in_schedule", &WindowState::in_schedule)
      .def("begin_window", &WindowState::begin_window)
      .def("begin_micro_batch", &WindowState::begin_micro_batch)
      .def("count_micro_batch", &WindowState::count_micro_batch)
      .def("note_interruption", &WindowState::note_interruption);
}

void define_engine(py::module_& module) {
  // These methods wait for the mutex, whose holder may need the GIL: release the GIL first.
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<BackwardPass, std::shared_ptr<BackwardPass>>(module, "BackwardPass")
      .def(py::init([](bool captures, Number scale, bool ignored, bool drops) {
             auto backward = std::make_shared<BackwardPass>();
             backward->captures = captures;
             backward->scale = std::move(scale);
             backward->ignored = ignored;
             backward->drops = drops;
             return backward;
           }),
           py::arg("captures") = true, py::arg("scale") = 1.0, py::arg("ignored") = false,
           py::arg("drops") = false)
      .def_readwrite("captures", &BackwardPass::captures)
      .def_readwrite("scale", &BackwardPass::scale)
      .def_readwrite("ignored", &BackwardPass::ignored)
      .def_readwrite("drops", &BackwardPass::drops)
      .def_readwrite("added", &BackwardPass::added)
      .def_readwrite("stored", &BackwardPass::stored)
      .def_readwrite("reduced_outside", &BackwardPass::reduced_outside)
      .def_readwrite("follows_reducer", &BackwardPass::follows_reducer)
      .def_readwrite("delivered_late", &BackwardPass::delivered_late)
      .def_readwrite("has_ended", &BackwardPass::has_ended)
      .def_readwrite("inner", &BackwardPass::inner)
      .def_readwrite("in_python", &BackwardPass::in_python)
      .def_readwrite("identity", &BackwardPass::identity)
      .def("note_stored", [](BackwardPass& backward, std::shared_ptr<Slot> slot) {
        backward.stored.push_back(std::move(slot));
      });
  py::class_<EngineLock>(module, "EngineLock")
      .def("__enter__", &EngineLock::enter)
      .def("__exit__", &EngineLock::exit);
  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init([](uintptr_t add, int64_t limit, std::shared_ptr<Sums> sums,
                       std::shared_ptr<WindowState> window, py::handle begin, py::handle receive,
                       py::handle add_gradients, py::handle scale, py::handle stored, py::handle finish) {
             return Engine::make(reinterpret_cast<AddFlat>(add), limit, std::move(sums), std::move(window),
                                 {.begin = begin.ptr(),
                                  .receive = receive.ptr(),
                                  .add = add_gradients.ptr(),
                                  .scale = scale.ptr(),
                                  .stored = stored.ptr(),
                                  .finish = finish.ptr()});
           }),
           py::arg("add_flat"), py::arg("limit"), py::arg("sums"), py::arg("window"), py::arg("begin"),
           py::arg("receive"), py::arg("add"), py::arg("scale"), py::arg("stored"), py::arg("finish"))
      .def_property_readonly("lock",
                             [](std::shared_ptr<Engine> engine) { return EngineLock(std::move(engine)); })
      .def("attach", [](std::shared_ptr<Engine> engine, std::shared_ptr<Slot> slot,
                        py::handle node) { attach(engine, slot, node.ptr()); })
      .def("detach", [](Engine&, Slot& slot) { slot.node = nullptr; })
      .def("collect_after_node",
           [](Engine&, Slot& slot) { slot.collects_in = torch::autograd::get_current_graph_task_id(); })
      .def("has_failed", [](Engine&, const BackwardPass& backward) { return backward.running.expired(); })
      .def("settle", &Engine::settle, without_gil)
      .def("flush", &Engine::flush, without_gil)
      .def("join", &Engine::join, without_gil)
      .def("current_backward", &Engine::current_backward, without_gil)
      .def("enter", &Engine::enter, without_gil)
      .def("backwards", &Engine::backwards, without_gil)
      .def("call_back", &Engine::call_back, without_gil)
      .def("drop", &Engine::drop, without_gil)
      .def(
          "set_plan",
          [](Engine& engine, double scale, int64_t steps, bool repeats, bool updates_plainly) {
            engine.set_plan({scale, steps, repeats, updates_plainly});
          },
          py::arg("scale"), py::arg("steps"), py::arg("repeats"), py::arg("updates_plainly"))
      .def("drop_plan", &Engine::drop_plan)
      .def("set_condition", &Engine::set_condition)
      .def("set_slots", &Engine::set_slots)
      .def("step", &Engine::step)
      .def("has_nothing_to_clear", &Engine::has_nothing_to_clear)
      .def("begin_update", &Engine::begin_update)
      .def("end_update", &Engine::end_update)
      .def("clear_used", &Engine::clear_used)
      .def("any_foreign_gradient", &Engine::any_foreign_gradient)
      .def("are_as_seen", &Engine::are_as_seen)
      .def("set_rounds_stochastically", &Engine::set_rounds_stochastically)
      .def("set_postpones", &Engine::set_postpones)
      .def("note_bypass", &Engine::note_bypass)
      .def_property_readonly("has_threads", &Engine::has_threads)
      .def_property_readonly("is_bypassed", &Engine::is_bypassed)
      .def_static("set_watched", &Engine::set_watched)
      .def_static("reason_for", [](const Slot& slot) { return name_of(reason_for(slot)); })
      .def_static("may_write", [](const Slot& slot, py::handle node) {
        const auto* end = to_accumulate_grad(node.ptr());
        return end != nullptr && may_write(slot, *end);
      });
  py::class_<WeightSum, std::shared_ptr<WeightSum>>(module, "WeightSum")
      .def(py::init(
          [](int64_t number, std::shared_ptr<Engine> engine, std::shared_ptr<Slot> slot, py::handle add) {
            return WeightSum::make(number, engine, std::move(slot), add.ptr());
          }))
      .def(
          "set_product_method",
          [](WeightSum& sum, at::ScalarType operand, at::ScalarType accumulator, int64_t tokens, int method) {
            sum.set_product_method(operand, accumulator, tokens, static_cast<ProductMethod>(method));
          })
      .def("forget_product_methods", &WeightSum::forget_product_methods);
}

}  // namespace
}  // namespace fusedacc::autograd

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace fusedacc::autograd;
  // Errors get PyTorch's types in Python, as if PyTorch had called the operators.
  py::register_local_exception_translator([](std::exception_ptr error) {
    if (error) torch::translate_exception_to_python(error);
  });
  define_state(module);
  define_engine(module);
  define_functions(module);
  module.def("has_post_hook", &leaf_has_post_hook);
  module.def("restore_grad_dtype", &restore_grad_dtype);
  define_attribute(module.ptr());
}
