#include "middle_of_window.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace fusedacc::autograd {
namespace {

py::object interned(const char* name) {
  return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
}

// The attributes that are read and written here; never freed, since the interpreter may be gone before.
struct Names {
  const py::object micro = interned("micro"), micro_step = interned("micro_step");
  const py::object usual_backwards = interned("usual_backwards"), has_updated = interned("has_updated");
  const py::object ran = interned("ran"), num_backwards = interned("num_backwards");
  const py::object in_schedule = interned("in_schedule"), deferred = interned("deferred");
  const py::object param_groups = interned("param_groups"), params = interned("params");
  const py::object seen = interned("_seen");
};

const Names& names() {
  static const Names* const made = new Names;
  return *made;
}

py::object weak(const py::handle object) {
  py::object reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(object.ptr(), nullptr));
  if (!reference) throw py::error_already_set();
  return reference;
}

// The object of a weak reference, or none.
py::object alive(const py::object& reference) {
  return py::reinterpret_steal<py::object>(PyObject_CallNoArgs(reference.ptr()));
}

// The engine rethrows only this kind of error in the thread that has called backward(). Needs the GIL.
python_error as_engines_own(py::error_already_set& error) {
  const py::gil_scoped_acquire gil;
  error.restore();
  python_error known;
  known.persist();
  return known;
}

bool is_true(const py::handle object) {
  const int truth = PyObject_IsTrue(object.ptr());
  if (truth < 0) throw py::error_already_set();
  return truth == 1;
}

// Whether a group has these parameters, by identity, and every p.grad is None or, if `shown` is not null, the
// next tensor there in the parameter's dtype.
bool has_parameters(const py::handle group, const py::handle known, const WeakTensor*& shown,
                    const WeakTensor* end) {
  if (!PyDict_CheckExact(group.ptr())) return false;
  PyObject* params = PyDict_GetItemWithError(group.ptr(), names().params.ptr());
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
    } else if (gradient.unsafeGetTensorImpl() != shown++->_unsafe_get_target() ||
               gradient.scalar_type() != own.scalar_type()) {
      return false;
    }
  }
  return true;
}

}  // namespace

Assumptions::Assumptions(const py::list& is_false, const py::list& stays) {
  for (const auto& pairs : {is_false, stays}) {
    for (const py::handle pair : pairs) {
      py::object name = py::reinterpret_borrow<py::object>(pair[py::int_(1)]);
      PyObject* const kept = name.release().ptr();
      PyObject* shared = kept;
      PyUnicode_InternInPlace(&shared);
      attributes_.push_back(
          {weak(pair[py::int_(0)]), py::reinterpret_steal<py::object>(shared), py::object()});
    }
  }
  num_false_ = is_false.size();
}

bool Assumptions::note() {
  for (size_t i = num_false_; i < attributes_.size(); ++i) {
    Attribute& attribute = attributes_[i];
    const py::object owner = alive(attribute.owner);
    if (owner.is_none()) return false;
    attribute.value = py::getattr(owner, attribute.name);
  }
  return hold();
}

bool Assumptions::hold() const {
  if (!not_imported_.is_none()) {
    if (py::reinterpret_steal<py::object>(PyImport_GetModule(not_imported_.ptr()))) return false;
    if (PyErr_Occurred()) throw py::error_already_set();
  }
  py::object owner;
  for (size_t i = 0; i < attributes_.size(); ++i) {
    const Attribute& attribute = attributes_[i];
    // Python has one weak reference for each object, so neighbours with the same owner are read together.
    if (i == 0 || !attribute.owner.is(attributes_[i - 1].owner)) owner = alive(attribute.owner);
    if (owner.is_none()) return false;
    const py::object now = py::getattr(owner, attribute.name);
    if (i < num_false_ ? is_true(now) : !now.is(attribute.value)) return false;
  }
  return true;
}

MiddleOfWindow::MiddleOfWindow(const py::tuple& owners, py::object on_paid, const py::tuple& assumptions,
                               std::shared_ptr<ImmediateAdder> adder, std::shared_ptr<GraphTasks> tasks)
    : window_(weak(owners[0])),
      inner_(weak(owners[1])),
      parameters_(weak(owners[2])),
      on_end_(owners[3]),
      on_edge_(owners[4]),
      on_paid_(std::move(on_paid)),
      assumptions_(assumptions[0], assumptions[1]),
      adder_(std::move(adder)),
      tasks_(std::move(tasks)) {}

std::shared_ptr<MiddleOfWindow> MiddleOfWindow::make(const py::tuple& owners, py::object on_paid,
                                                     const py::tuple& assumptions,
                                                     std::shared_ptr<ImmediateAdder> adder,
                                                     std::shared_ptr<GraphTasks> tasks) {
  const std::shared_ptr<MiddleOfWindow> made(
      new MiddleOfWindow(owners, std::move(on_paid), assumptions, std::move(adder), std::move(tasks)),
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

void MiddleOfWindow::arm(double scale, int64_t steps, bool begins_last, py::object not_imported, bool owes) {
  plan_ = {.scale = scale, .steps = steps, .begins_last = begins_last, .owes = owes};
  assumptions_.forbid(std::move(not_imported));
  published_.clear();
  armed_ = assumptions_.note();
}

void MiddleOfWindow::await_update(int64_t steps, py::object not_imported) {
  arm(/*scale=*/1, steps, /*begins_last=*/false, std::move(not_imported), /*owes=*/false);
  const py::object parameters = alive(parameters_);
  if (parameters.is_none()) return;
  for (const py::handle group : py::getattr(parameters, names().seen)) {
    for (const py::handle parameter : group) {
      published_.emplace_back(THPVariable_Unpack(parameter.ptr()).grad().getIntrusivePtr());
    }
  }
}

void MiddleOfWindow::await_first(double scale, bool opens, py::object not_imported) {
  plan_ = {.scale = scale, .awaits_first = true, .opens = opens};
  assumptions_.forbid(std::move(not_imported));
  armed_ = assumptions_.note();
}

void MiddleOfWindow::set_lanes(const py::list& lanes) {
  lanes_.clear();
  for (const py::handle lane : lanes) {
    auto [key, buckets, limit] = lane.cast<std::tuple<int64_t, std::shared_ptr<BucketMap>, int64_t>>();
    lanes_.push_back({key, std::move(buckets), limit});
  }
}

bool MiddleOfWindow::enter(int task) {
  if (!armed_ || at::GradMode::is_enabled()) return false;
  const auto held = adder_->hold();
  const py::gil_scoped_acquire gil;
  const py::object window = alive(window_);
  if (!armed_ || runs() || window.is_none() || !may_begin(window)) return false;
  const int64_t ended = plan_.awaits_first || plan_.steps != 0 ? micro_step(window) : 0;
  const bool is_last = plan_.steps != 0 && ended + 1 >= plan_.steps;
  if (is_last && !plan_.begins_last) return false;
  if (plan_.awaits_first && (ended != 0 || has_run(window))) return false;
  const bool is_alike = !(is_last || plan_.awaits_first);
  armed_ = is_alike;
  auto run = std::make_shared<Run>(Run{task, is_alike, /*is_pythons=*/false});
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
  if (plan_.opens) adder_->open(task, plan_.scale);
  return plan_.opens;
}

bool MiddleOfWindow::may_begin(const py::object& window) {
  const py::object micro = py::getattr(window, names().micro);
  armed_ = !is_true(py::getattr(micro, names().in_schedule)) &&
           !is_true(py::getattr(micro, names().deferred)) && assumptions_.hold();
  return armed_;
}

bool MiddleOfWindow::has_run(const py::object& window) {
  return is_true(py::getattr(py::getattr(window, names().micro), names().ran));
}

int64_t MiddleOfWindow::micro_step(const py::object& window) {
  return py::getattr(window, names().micro_step).cast<int64_t>();
}

void MiddleOfWindow::leave(const Run& run) {
  std::vector<int64_t> added;
  std::vector<std::shared_ptr<Bucket>> waiting;
  try {
    {
      const auto held = adder_->hold();
      const py::gil_scoped_acquire gil;
      if (!run.is_pythons) {
        for (const auto& each : buckets_) waiting.push_back(each.second);
        added = close(run.task);
      }
      if (run.is_alike && !run.is_pythons) return count(std::move(added));
    }
    // Without the adder's lock: Python takes others.
    const py::gil_scoped_acquire gil;
    if (run.is_pythons) {
      on_end_(run.task);
    } else {
      on_edge_(plan_.scale, added, waiting);
    }
  } catch (py::error_already_set& error) {
    throw as_engines_own(error);
  }
}

std::vector<int64_t> MiddleOfWindow::close(int task) {
  std::vector<int64_t> added = adder_->close();
  tasks_->drop(task);
  if (!buckets_.empty()) {
    for (const Lane& lane : lanes_) lane.buckets->drop(task);
  }
  let_go();
  return added;
}

void MiddleOfWindow::count(std::vector<int64_t> added) {
  if (plan_.owes) {
    on_paid_(std::move(added));
    plan_.owes = adder_->owes();
    if (armed_) armed_ = assumptions_.note();
  }
  const py::object window = alive(window_);
  if (window.is_none()) return;
  const py::object micro = py::getattr(window, names().micro);
  py::setattr(micro, names().ran, py::bool_(true));
  const py::int_ ended(py::getattr(micro, names().num_backwards).cast<int64_t>() + 1);
  py::setattr(micro, names().num_backwards, ended);
}

bool MiddleOfWindow::is_in_step() {
  const py::object inner = alive(inner_), parameters = alive(parameters_);
  if (inner.is_none() || parameters.is_none()) return false;
  const py::object groups = py::getattr(inner, names().param_groups);
  const py::object seen = py::getattr(parameters, names().seen);
  if (!PyList_Check(groups.ptr()) || PyList_GET_SIZE(groups.ptr()) != PyList_GET_SIZE(seen.ptr()))
    return false;
  const WeakTensor* shown = published_.empty() ? nullptr : published_.data();
  const WeakTensor* const end = published_.data() + published_.size();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(seen.ptr()); ++i) {
    if (!has_parameters(PyList_GET_ITEM(groups.ptr(), i), PyList_GET_ITEM(seen.ptr(), i), shown, end))
      return false;
  }
  return true;
}

bool MiddleOfWindow::step() {
  if (!armed_ || plan_.steps == 0 || runs()) return false;
  const py::object window = alive(window_);
  if (window.is_none()) return false;
  const py::object micro = py::getattr(window, names().micro);
  const int64_t ended = micro_step(window) + 1;
  if (ended >= plan_.steps || !is_true(py::getattr(micro, names().ran))) return false;
  if (!may_begin(window) || !is_in_step()) return false;
  py::setattr(window, names().has_updated, py::bool_(false));
  py::setattr(window, names().micro_step, py::int_(ended));
  py::setattr(window, names().usual_backwards, py::getattr(micro, names().num_backwards));
  py::setattr(micro, names().num_backwards, py::int_(0));
  py::setattr(micro, names().ran, py::bool_(false));
  return true;
}

bool MiddleOfWindow::ends() {
  if (!armed_ || published_.empty() || runs()) return false;
  const py::object window = alive(window_);
  const bool found = !window.is_none() && micro_step(window) + 1 == plan_.steps && has_run(window) &&
                     may_begin(window) && is_in_step();
  armed_ = false;
  return found;
}

bool MiddleOfWindow::zero_grad() {
  if (!armed_ || plan_.steps == 0 || runs()) return false;
  const py::object window = alive(window_);
  if (window.is_none()) return false;
  const int64_t ended = micro_step(window);
  return 0 < ended && ended < plan_.steps && !has_run(window) && assumptions_.hold();
}

py::object MiddleOfWindow::running() {
  if (!runs()) return py::none();
  const std::shared_ptr<Run> run = run_.lock();
  if (run) run->is_pythons = true;
  const py::cpp_function watch(
      [run = run_] { return run.expired() ? py::object(py::none()) : py::bool_(true); });
  return py::make_tuple(run_task_, watch, buckets_, plan_.opens);
}

}  // namespace fusedacc::autograd
