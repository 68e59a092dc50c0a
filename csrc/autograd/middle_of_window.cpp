#include "middle_of_window.h"

#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace fusedacc::autograd {
namespace {

// The attributes that are read and written here; never freed, since the interpreter may be gone before.
struct Attributes {
  const Attribute micro{"micro"}, micro_step{"micro_step"};
  const Attribute usual_backwards{"usual_backwards"}, has_updated{"has_updated"};
  const Attribute ran{"ran"}, num_backwards{"num_backwards"};
  const Attribute in_schedule{"in_schedule"}, deferred{"deferred"};
  const Attribute seen{"_seen"}, all_params{"_params"};
  const py::str param_groups{"param_groups"}, params{"params"}, zero_grad{"zero_grad"};
};

const Attributes& attributes() {
  static const Attributes* const made = new Attributes;
  return *made;
}

// The engine rethrows only this kind of error in the thread that has called backward(). Needs the GIL.
python_error as_engines_own(py::error_already_set& error) {
  const py::gil_scoped_acquire gil;
  error.restore();
  python_error known;
  known.persist();
  return known;
}

// Records in Python's `Window` that a backward pass was cut off.
void note_interruption(const py::object& window) {
  if (!window.is_none()) window.attr("note_interruption")();
}

// Whether a CUDA graph is being captured on the current stream. Needs the GIL.
bool is_capturing() {
  const py::object function =
      py::getattr(py::module_::import("torch._C"), "_cuda_isCurrentStreamCapturing", py::none());
  return !function.is_none() && is_true(function());
}

// Whether a group has these parameters, by identity, and every p.grad is None or, if `shown` is not null, the
// next tensor there in the parameter's dtype.
bool has_parameters(const py::handle group, const py::handle known, const TensorIdentity*& shown,
                    const TensorIdentity* end) {
  if (!PyDict_CheckExact(group.ptr())) return false;
  PyObject* params = PyDict_GetItemWithError(group.ptr(), attributes().params.ptr());
  if (PyErr_Occurred()) throw py::error_already_set();
  if (params == nullptr || !PyList_Check(params)) return false;
  const Py_ssize_t count = PyList_GET_SIZE(known.ptr());
  if (PyList_GET_SIZE(params) != count || (shown != nullptr && end - shown < count)) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* parameter = PyList_GET_ITEM(known.ptr(), i);
    if (PyList_GET_ITEM(params, i) != parameter) return false;
    const at::Tensor& own = THPVariable_Unpack(parameter);
    const at::Tensor& gradient = own.grad();
    if (shown == nullptr) {
      if (gradient.defined()) return false;
    } else if (!(shown++)->refers_to(gradient) || gradient.scalar_type() != own.scalar_type()) {
      return false;
    }
  }
  return true;
}

// Whether the optimizer's `zero_grad` is torch's own, which clears nothing but p.grad.
bool clears_like_torch(const py::object& optimizer) {
  static const py::handle stock = [] {
    return py::object(py::module_::import("torch.optim").attr("Optimizer").attr("zero_grad")).release();
  }();
  const py::object method = py::getattr(optimizer, attributes().zero_grad, py::none());
  return PyMethod_Check(method.ptr()) && PyMethod_GET_FUNCTION(method.ptr()) == stock.ptr();
}

}  // namespace

Assumptions::Assumptions(const py::tuple& lists) {
  std::vector<size_t> ends;
  for (const py::handle pairs : lists) {
    for (const py::handle pair : pairs) {
      all_.push_back({weak(pair[py::int_(0)]), Attribute(pair[py::int_(1)].cast<std::string>().c_str()), {}});
    }
    ends.push_back(all_.size());
  }
  num_false_ = ends[0];
  num_fixed_ = ends[1];
}

bool Assumptions::note(bool only_versions) {
  for (size_t i = only_versions ? num_fixed_ : num_false_; i < all_.size(); ++i) {
    const py::object owner = alive(all_[i].owner);
    if (owner.is_none()) return false;
    all_[i].value = all_[i].attribute.of(owner);
  }
  return hold();
}

bool Assumptions::hold() const {
  if (!not_imported_.is_none()) {
    if (py::reinterpret_steal<py::object>(PyImport_GetModule(not_imported_.ptr()))) return false;
    if (PyErr_Occurred()) throw py::error_already_set();
  }
  py::object owner;
  for (size_t i = 0; i < all_.size(); ++i) {
    // Python has one weak reference for each object, so neighbours with the same owner are read together.
    if (i == 0 || !all_[i].owner.is(all_[i - 1].owner)) owner = alive(all_[i].owner);
    if (owner.is_none()) return false;
    const py::object now = all_[i].attribute.of(owner);
    if (i < num_false_ ? is_true(now) : !now.is(all_[i].value)) return false;
  }
  return true;
}

MiddleOfWindow::MiddleOfWindow(const py::tuple& owners, py::object note_added, const py::tuple& records,
                               const py::tuple& assumptions, std::shared_ptr<ImmediateAdder> adder,
                               std::shared_ptr<KnownTasks> tasks)
    : window_(weak(owners[0])),
      inner_(weak(owners[1])),
      parameters_(weak(owners[2])),
      registry_(weak(owners[3])),
      finish_(owners[4]),
      finish_first_or_last_(owners[5]),
      note_added_(std::move(note_added)),
      records_(records),
      assumptions_(assumptions),
      adder_(std::move(adder)),
      tasks_(std::move(tasks)) {}

std::shared_ptr<MiddleOfWindow> MiddleOfWindow::make(const py::tuple& owners, py::object note_added,
                                                     const py::tuple& records, const py::tuple& assumptions,
                                                     std::shared_ptr<ImmediateAdder> adder,
                                                     std::shared_ptr<KnownTasks> tasks) {
  const std::shared_ptr<MiddleOfWindow> made(
      new MiddleOfWindow(owners, std::move(note_added), records, assumptions, std::move(adder),
                         std::move(tasks)),
      [](MiddleOfWindow* middle) {
        const py::gil_scoped_acquire gil;
        delete middle;
      });
  made->adder_->set_opener([middle = std::weak_ptr(made)](int task) {
    const std::shared_ptr<MiddleOfWindow> found = middle.lock();
    return found && found->enter(task);
  });
  return made;
}

void MiddleOfWindow::arm(double scale, int64_t steps, bool begins_last, py::object not_imported,
                         bool on_gpu) {
  disarm();
  plan_ = {.scale = scale, .steps = steps, .begins_last = begins_last, .on_gpu = on_gpu};
  assumptions_.forbid(std::move(not_imported));
  expected_grads_.clear();
  armed_ = assumptions_.note();
}

void MiddleOfWindow::await_update(int64_t steps, py::object not_imported) {
  arm(/*scale=*/1, steps, /*begins_last=*/false, std::move(not_imported), /*on_gpu=*/false);
  note_published();
}

void MiddleOfWindow::note_published() {
  const py::object parameters = alive(parameters_);
  if (parameters.is_none()) return;
  for (const py::handle group : attributes().seen.of(parameters)) {
    for (const py::handle parameter : group) {
      expected_grads_.emplace_back(THPVariable_Unpack(parameter.ptr()).grad());
    }
  }
}

void MiddleOfWindow::await_first(double scale, bool opens, py::object not_imported, int64_t steps,
                                 bool begins_last, bool updates) {
  arm(scale, steps, begins_last, std::move(not_imported), /*on_gpu=*/false);
  plan_.awaits_first = true;
  plan_.opens = opens;
  plan_.may_publish = true;
  plan_.updates = updates;
  first_ = plan_;
}

void MiddleOfWindow::set_lanes(const py::list& lanes) {
  lanes_.clear();
  for (const py::handle lane : lanes) {
    auto [key, buckets, limit, makes_sums] =
        lane.cast<std::tuple<int64_t, std::shared_ptr<BucketMap>, int64_t, bool>>();
    lanes_.push_back({key, std::move(buckets), limit, makes_sums});
  }
}

bool MiddleOfWindow::enter(int task) {
  if (!armed_ || at::GradMode::is_enabled()) return false;
  const auto held = adder_->hold();
  const py::gil_scoped_acquire gil;
  if (run_task_ == task) return plan_.opens;  // another thread of the engine has entered
  const py::object window = alive(window_);
  if (!armed_ || runs() || window.is_none() || !check_assumptions(window)) return false;
  // Python refuses to capture a part of a window.
  if (plan_.on_gpu && is_capturing()) return false;
  const int64_t ended = plan_.awaits_first || plan_.steps != 0 ? micro_step(window) : 0;
  const bool is_last = plan_.steps != 0 && ended + 1 >= plan_.steps;
  if (is_last && !plan_.begins_last) return false;
  if (plan_.awaits_first && (ended != 0 || has_run(window))) return false;
  const bool is_alike = !(is_last || plan_.awaits_first);
  armed_ = is_alike;
  auto run = std::make_shared<Run>(Run{task, is_alike, /*is_taken_over=*/false});
  torch::autograd::Engine::get_default_engine().queue_callback([middle = weak_from_this(), run] {
    const std::shared_ptr<MiddleOfWindow> found = middle.lock();
    if (found) found->leave(*run);
  });
  run_task_ = task;
  run_ = run;
  tasks_->set(task, true);
  if (plan_.awaits_first) {
    for (const Lane& lane : lanes_) {
      auto bucket = std::make_shared<Bucket>(/*stream=*/0, lane.limit, /*makes_sums=*/true);
      buckets_.emplace_back(lane.key, bucket);
      lane.buckets->set(task, std::move(bucket));
    }
  }
  had_pending_scale_ = adder_->has_pending_scale();
  if (plan_.opens) {
    adder_->open(task, plan_.scale);
  } else {
    // Nothing is added in this pass, but `end_first` calls `set(index)`: vectors of the right size.
    adder_->unload();
  }
  return plan_.opens;
}

bool MiddleOfWindow::check_assumptions(const py::object& window) {
  const py::object micro = attributes().micro.of(window);
  const bool as_assumed = !is_true(attributes().in_schedule.of(micro)) &&
                          !is_true(attributes().deferred.of(micro)) && !records_.is_consumed() &&
                          assumptions_.hold();
  if (!as_assumed) armed_ = false;
  return as_assumed;
}

bool MiddleOfWindow::has_run(const py::object& window) {
  return is_true(attributes().ran.of(attributes().micro.of(window)));
}

int64_t MiddleOfWindow::micro_step(const py::object& window) {
  return attributes().micro_step.of(window).cast<int64_t>();
}

void MiddleOfWindow::leave(const Run& run) {
  std::vector<int64_t> added;
  std::vector<std::shared_ptr<Bucket>> waiting;
  try {
    {
      const auto held = adder_->hold();
      const py::gil_scoped_acquire gil;
      if (!run.is_taken_over) {
        const py::object window = alive(window_);
        try {
          if (end(run, window, added, waiting)) return;
        } catch (python_error& error) {  // raised by Python code that an operator has called
          error.persist();               // another thread may report it
          note_interruption(window);
          throw;
        } catch (...) {
          note_interruption(window);
          throw;
        }
      }
    }
    // Without the adder's lock: Python takes others.
    const py::gil_scoped_acquire gil;
    if (run.is_taken_over) {
      finish_(run.task);
    } else {
      finish_first_or_last_(plan_.scale, added, waiting);
    }
  } catch (py::error_already_set& error) {
    throw as_engines_own(error);
  }
}

bool MiddleOfWindow::end(const Run& run, const py::object& window, std::vector<int64_t>& added,
                         std::vector<std::shared_ptr<Bucket>>& waiting) {
  for (const auto& each : buckets_) waiting.push_back(each.second);
  added = close(run.task);
  if (window.is_none()) return true;
  if (plan_.steps != 0 && has_stored()) return false;
  if (run.is_alike) {
    end_alike(added);
  } else if (plan_.awaits_first ? !end_first(window, added, waiting) : !end_last(window, added)) {
    return false;
  }
  count_backward(window);
  return true;
}

bool MiddleOfWindow::has_stored() const {
  const py::object parameters = alive(parameters_);
  if (parameters.is_none()) return false;
  for (const py::handle group : attributes().seen.of(parameters)) {
    for (const py::handle parameter : group) {
      if (THPVariable_Unpack(parameter.ptr()).grad().defined()) return true;
    }
  }
  return false;
}

std::vector<int64_t> MiddleOfWindow::close(int task) {
  std::vector<int64_t> added = adder_->close();
  adder_->join(/*is_last=*/true);
  tasks_->drop(task);
  if (!buckets_.empty()) {
    for (const Lane& lane : lanes_) lane.buckets->drop(task);
  }
  let_go();
  return added;
}

bool MiddleOfWindow::end_first(const py::object& window, const std::vector<int64_t>& added,
                               const std::vector<std::shared_ptr<Bucket>>& waiting) {
  if (plan_.steps == 0 || !check_assumptions(window)) return false;
  for (size_t i = 0; i < waiting.size(); ++i) {
    if (!lanes_[i].makes_sums || !waiting[i]->makes_sums(*adder_)) return false;
  }
  records_.note_added(added, adder_->take_made());
  for (const auto& bucket : waiting) {
    const Bucket::Content content = bucket->take();
    records_.adopt(content.slots, content.gradients, plan_.scale);
    for (size_t i = 0; i < content.slots.size(); ++i) {
      adder_->set(content.indices[i], content.gradients[i], plan_.scale);
    }
  }
  adder_->set_generation(records_.advance());
  plan_.awaits_first = false;
  plan_.opens = true;
  armed_ = assumptions_.note(/*only_versions=*/true);
  return true;
}

void MiddleOfWindow::end_alike(const std::vector<int64_t>& added) {
  if (!had_pending_scale_) return;
  if (adder_->is_exposed()) {
    note_added_(added);
  } else {
    records_.note_added(added, adder_->take_made());
  }
  if (armed_) armed_ = assumptions_.note(/*only_versions=*/true);
}

bool MiddleOfWindow::end_last(const py::object& window, const std::vector<int64_t>& added) {
  if (!plan_.may_publish || !check_assumptions(window)) return false;
  records_.note_added(added, adder_->take_made());
  if (records_.has_deferred() || !records_.publish()) return false;
  adder_->release();
  plan_.begins_last = false;  // another one adds to p.grad, which Python does
  if (plan_.updates) note_published();
  armed_ = plan_.updates && assumptions_.note(/*only_versions=*/true);
  return true;
}

void MiddleOfWindow::count_backward(const py::object& window) {
  const py::object micro = attributes().micro.of(window);
  attributes().ran.set(micro, py::bool_(true));
  const py::int_ ended(attributes().num_backwards.of(micro).cast<int64_t>() + 1);
  attributes().num_backwards.set(micro, ended);
}

// As `Window.end_micro_batch` in Python. What that also resets has its initial value here:
// `check_assumptions` excludes schedules and gradients that wait, and `Accumulation` arms with no weights.
void MiddleOfWindow::end_micro_batch(const py::object& window) {
  const py::object micro = attributes().micro.of(window);
  attributes().has_updated.set(window, py::bool_(false));
  attributes().micro_step.set(window, py::int_(micro_step(window) + 1));
  attributes().usual_backwards.set(window, attributes().num_backwards.of(micro));
  attributes().num_backwards.set(micro, py::int_(0));
  attributes().ran.set(micro, py::bool_(false));
}

bool MiddleOfWindow::is_in_step() {
  const py::object inner = alive(inner_), parameters = alive(parameters_);
  if (inner.is_none() || parameters.is_none()) return false;
  const py::object groups = py::getattr(inner, attributes().param_groups);
  const py::object seen = attributes().seen.of(parameters);
  if (!PyList_Check(groups.ptr()) || PyList_GET_SIZE(groups.ptr()) != PyList_GET_SIZE(seen.ptr()))
    return false;
  const TensorIdentity* shown = expected_grads_.empty() ? nullptr : expected_grads_.data();
  const TensorIdentity* const end = expected_grads_.data() + expected_grads_.size();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(seen.ptr()); ++i) {
    if (!has_parameters(PyList_GET_ITEM(groups.ptr(), i), PyList_GET_ITEM(seen.ptr(), i), shown, end))
      return false;
  }
  return true;
}

bool MiddleOfWindow::step() {
  if (!armed_ || plan_.steps == 0 || runs()) return false;
  const py::object window = alive(window_);
  if (window.is_none() || micro_step(window) + 1 >= plan_.steps || !has_run(window)) return false;
  if (!check_assumptions(window) || !is_in_step()) return false;
  end_micro_batch(window);
  return true;
}

bool MiddleOfWindow::end_before_update() {
  if (!armed_ || expected_grads_.empty() || runs()) return false;
  const py::object window = alive(window_);
  const bool found = !window.is_none() && micro_step(window) + 1 == plan_.steps && has_run(window) &&
                     check_assumptions(window) && is_in_step();
  armed_ = false;
  if (found) end_micro_batch(window);
  return found;
}

void MiddleOfWindow::note_update() {
  awaits_clear_ = first_.steps != 0 && assumptions_.note(/*only_versions=*/true);
}

bool MiddleOfWindow::clear() {
  // With callbacks, a profiler may run: `zero_grad()` in Python has ranges that it records.
  if (!std::exchange(awaits_clear_, false) || at::hasCallbacks()) return false;
  const py::gil_scoped_release without;
  const auto held = adder_->hold();
  const py::gil_scoped_acquire gil;
  const py::object window = alive(window_), registry = alive(registry_);
  if (!clears_like_torch(alive(inner_))) return false;
  if (window.is_none() || registry.is_none() || first_.steps == 0 || runs() || micro_step(window) != 0 ||
      has_run(window) || !records_.is_consumed() || !assumptions_.hold() || !is_in_step()) {
    return false;
  }
  const py::object seen = attributes().seen.of(registry);
  if (seen.is_none() || !seen.cast<SeenParameters&>().hold(attributes().all_params.of(registry)))
    return false;
  records_.clear();
  expected_grads_.clear();
  plan_ = first_;
  if (plan_.opens) adder_->offer_again();
  armed_ = assumptions_.note(/*only_versions=*/true);
  return armed_;
}

bool MiddleOfWindow::zero_grad() {
  if (!armed_ || plan_.steps == 0 || runs()) return false;
  const py::object window = alive(window_);
  if (window.is_none()) return false;
  const int64_t ended = micro_step(window);
  return 0 < ended && ended < plan_.steps && !has_run(window) && !records_.is_consumed() &&
         assumptions_.hold();
}

py::object MiddleOfWindow::hand_over() {
  if (!runs()) return py::none();
  const std::shared_ptr<Run> run = run_.lock();
  if (run) run->is_taken_over = true;
  const py::cpp_function watch(
      [run = run_] { return run.expired() ? py::object(py::none()) : py::bool_(true); });
  return py::make_tuple(run_task_, watch, buckets_, plan_.opens);
}

}  // namespace fusedacc::autograd
