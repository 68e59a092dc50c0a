#include "functions.h"

#include <ATen/EmptyTensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <cstdlib>

#include "list_tasks.h"

namespace fusedacc::autograd {
namespace {

// Of libfusedacc.so; csrc/cpu/lists.cpp has them.
struct Kernels {
  void (*run)(const Task*, int64_t, const Multipliers*) = nullptr;
  void (*run_norm)(const Task*, int64_t, const Multipliers*, int32_t, bool, double*) = nullptr;
  double (*join_norms)(const double*, int64_t, int32_t) = nullptr;
} kernels;

// Work that takes longer than letting go of the GIL is worth, in elements: about 20 microseconds.
constexpr int64_t kLong = 1 << 17;

constexpr const char* kCapsule = "fusedacc.BoundList";

PyObject* refuse() { Py_RETURN_FALSE; }

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

// `automatic`: the caller has not looked which backend is asked for.
bool may_pass(bool automatic) {
  const char* hooks = std::getenv("FUSEDACC_NATIVE_HOOKS");
  if (hooks != nullptr && *hooks == '0') return false;
  return nobody_watches() && !(automatic && is_set("FUSEDACC_BACKEND"));
}

// Keeps the items alive, and releases the GIL if the work is long enough.
class Unlocked {
 public:
  Unlocked(int64_t elements, std::initializer_list<const Items*> lists) {
    if (elements < kLong) return;
    for (const Items* list : lists) {
      for (int64_t i = 0; i < list->count; ++i) {
        Py_INCREF(list->items[i]);
        held_.push_back(list->items[i]);
      }
    }
    state_ = PyEval_SaveThread();
  }
  ~Unlocked() {
    if (state_ == nullptr) return;
    PyEval_RestoreThread(state_);
    for (PyObject* object : held_) Py_DECREF(object);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_ = nullptr;
  std::vector<PyObject*> held_;
};

bool norm_kind(PyObject* norm_type, int32_t& number) {
  NormKind kind{};
  if (!PyFloat_CheckExact(norm_type) || !find_norm_kind(PyFloat_AS_DOUBLE(norm_type), kind)) return false;
  number = static_cast<int32_t>(kind);
  return true;
}

// `overwrite` as one bool, or one for each of `count` tensors.
struct Flags {
  bool all = false, ok = false;
  PyObject** each = nullptr;

  Flags(PyObject* overwrite, int64_t count) {
    if (PyBool_Check(overwrite)) {
      all = overwrite == Py_True;
      ok = true;
      return;
    }
    const Items items(overwrite);
    ok = items.ok && items.count == count;
    for (int64_t i = 0; ok && i < count; ++i) ok = PyBool_Check(items.items[i]);
    each = items.items;
  }
};

Reading& reading() {
  static thread_local Reading found;
  return found;
}

// The noise of a call, None or (seed, one stream for each of `count` tensors).
struct Streams {
  int64_t seed = 0;
  const int64_t* each = nullptr;
  bool ok;

  Streams(PyObject* noise, int64_t count) {
    ok = noise == Py_None;
    if (ok || !PyTuple_Check(noise) || PyTuple_GET_SIZE(noise) != 2) return;
    const Items items(PyTuple_GET_ITEM(noise, 1));
    static thread_local std::vector<int64_t> values;
    values.resize(static_cast<size_t>(items.count));
    ok = items.ok && items.count == count && read_integer(PyTuple_GET_ITEM(noise, 0), seed);
    for (int64_t i = 0; ok && i < count; ++i)
      ok = read_integer(items.items[i], values[static_cast<size_t>(i)]);
    each = values.data();
  }
};

// How a call was asked to add: `by`, which tensors are overwritten, whether norms are wanted, and how sums
// are rounded.
struct Options {
  Multipliers by;
  Flags flags;
  bool wants_norm;
  int32_t kind = 0;
  Streams streams;
  bool ok;

  Options(PyObject* scale, PyObject* overwrite, PyObject* beta, PyObject* norm_type, PyObject* noise,
          int64_t count)
      : flags(overwrite, count), wants_norm(norm_type != Py_None), streams(noise, count) {
    ok = flags.ok && read_number(scale, by.scale) && read_number(beta, by.beta) && streams.ok &&
         (!wants_norm || norm_kind(norm_type, kind));
    by.noise.seed = static_cast<uint64_t>(streams.seed);
  }
};

// The partial norms of what is read, after it has been added to unless it only `reads`.
PyObject* run_norm(const Work& work, std::initializer_list<const Items*> lists, Multipliers by, int32_t kind,
                   bool reads) {
  at::Tensor partials = at::detail::empty_cpu({work.chunks}, at::kDouble, false, std::nullopt);
  if (!work.tasks.empty()) {
    const Unlocked unlocked(work.elements, lists);
    kernels.run_norm(work.tasks.data(), static_cast<int64_t>(work.tasks.size()), &by, kind, reads,
                     partials.mutable_data_ptr<double>());
  }
  return THPVariable_Wrap(std::move(partials));
}

// What is read, run: True, or where norms are wanted the partial ones.
PyObject* run(const Work& work, std::initializer_list<const Items*> lists, const Options& options) {
  if (options.wants_norm) {
    RECORD_FUNCTION("fusedacc::scale_accumulate_norm_", std::vector<c10::IValue>());
    return run_norm(work, lists, options.by, options.kind, false);
  }
  RECORD_FUNCTION("fusedacc::scale_accumulate_", std::vector<c10::IValue>());
  if (!work.tasks.empty()) {
    const Unlocked unlocked(work.elements, lists);
    kernels.run(work.tasks.data(), static_cast<int64_t>(work.tasks.size()), &options.by);
  }
  Py_RETURN_TRUE;
}

// (accumulators, gradients, scale, overwrite, beta, norm_type, automatic, bumps, noise)
PyObject* accumulate(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 9 || kernels.run == nullptr || !may_pass(arguments[6] == Py_True)) return refuse();
  const Items accumulators(arguments[0]), gradients(arguments[1]);
  if (!accumulators.ok || !gradients.ok || accumulators.count == 0 || accumulators.count != gradients.count) {
    return refuse();
  }
  const Options options(arguments[2], arguments[3], arguments[4], arguments[5], arguments[8],
                        accumulators.count);
  Reading& read = reading();
  if (!options.ok ||
      !read.match(accumulators, gradients, options.flags.all, options.flags.each, options.streams.each)) {
    return refuse();
  }
  if (arguments[7] == Py_True) read.bump();
  return run(read.work, {&accumulators, &gradients}, options);
}

BoundList* bound_list(PyObject* capsule) {
  return static_cast<BoundList*>(PyCapsule_GetPointer(capsule, kCapsule));
}

// (gradients, scale, overwrite, beta, norm_type, noise)
PyObject* accumulate_bound(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 6 || !may_pass(false)) return refuse();
  BoundList& accumulators = *bound_list(capsule);
  const Items gradients(arguments[0]);
  const Options options(arguments[1], arguments[2], arguments[3], arguments[4], arguments[5],
                        gradients.count);
  Reading& read = reading();
  if (!gradients.ok || !options.ok ||
      !read.match(accumulators, gradients, options.flags.all, options.flags.each, options.streams.each)) {
    return refuse();
  }
  accumulators.bump();
  return run(read.work, {&gradients}, options);
}

// (tensors, norm_type)
PyObject* norm_partials(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  int32_t kind;
  if (count != 2 || kernels.run == nullptr || !may_pass(false) || !norm_kind(arguments[1], kind)) {
    return refuse();
  }
  const Items tensors(arguments[0]);
  Reading& read = reading();
  if (!tensors.ok || tensors.count == 0 || !read.measure(tensors)) return refuse();
  RECORD_FUNCTION("fusedacc::norm_partials", std::vector<c10::IValue>());
  return run_norm(read.work, {&tensors}, {1, 1}, kind, true);
}

at::Tensor scalar(double value, at::ScalarType dtype) {
  at::Tensor found = at::detail::empty_cpu({}, dtype, false, std::nullopt);
  if (dtype == at::kDouble) {
    *found.mutable_data_ptr<double>() = value;
  } else {
    *found.mutable_data_ptr<float>() = static_cast<float>(value);
  }
  return found;
}

// (tensors, norm_type): the norm, and 1 or 0: whether an element was not finite.
PyObject* total_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  int32_t kind;
  if (count != 2 || kernels.run == nullptr || !may_pass(true) || !norm_kind(arguments[1], kind)) {
    return refuse();
  }
  const Items tensors(arguments[0]);
  Reading& read = reading();
  if (!tensors.ok || tensors.count == 0 || !read.measure(tensors) || read.work.tasks.empty()) {
    return refuse();
  }
  const Work& work = read.work;
  RECORD_FUNCTION("fusedacc::total_norm", std::vector<c10::IValue>());
  static thread_local std::vector<double> partials;
  partials.resize(static_cast<size_t>(work.chunks));
  const bool wide = read.wide;
  double norm;
  {
    const Unlocked unlocked(work.elements, {&tensors});
    const Multipliers by{1, 1};
    kernels.run_norm(work.tasks.data(), static_cast<int64_t>(work.tasks.size()), &by, kind, true,
                     partials.data());
    norm = kernels.join_norms(partials.data(), work.chunks, kind);
  }
  PyObject* found = THPVariable_Wrap(scalar(norm, wide ? at::kDouble : at::kFloat));
  PyObject* nonfinite = THPVariable_Wrap(scalar(std::isfinite(norm) ? 0 : 1, at::kFloat));
  PyObject* both = PyTuple_Pack(2, found, nonfinite);
  Py_XDECREF(found);
  Py_XDECREF(nonfinite);
  return both;
}

// What goes wrong here goes wrong in the operators too, which say so in words.
template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyObject* guarded(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  try {
    return function(self, arguments, count);
  } catch (const std::exception&) {
    return refuse();
  }
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyCFunction as_method() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&guarded<function>));
}

PyMethodDef bound_method{"accumulate", as_method<accumulate_bound>(), METH_FASTCALL, nullptr};

// (accumulators, owners of their versions): a function, as accumulate_bound.
PyObject* prepare(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || kernels.run == nullptr || !may_pass(false)) return refuse();
  auto list = std::make_unique<BoundList>();
  if (!list->read(Items(arguments[0])) || !list->own(Items(arguments[1]))) return refuse();
  PyObject* capsule =
      PyCapsule_New(list.get(), kCapsule, [](PyObject* capsule) { delete bound_list(capsule); });
  if (capsule == nullptr) return nullptr;
  list.release();
  PyObject* method = PyCFunction_New(&bound_method, capsule);
  Py_DECREF(capsule);
  return method;
}

// Addresses of the kernels, as above.
PyObject* set_kernels(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) return refuse();
  const auto address = [&](int i) { return PyLong_AsVoidPtr(arguments[i]); };
  kernels.run = reinterpret_cast<decltype(kernels.run)>(address(0));
  kernels.run_norm = reinterpret_cast<decltype(kernels.run_norm)>(address(1));
  kernels.join_norms = reinterpret_cast<decltype(kernels.join_norms)>(address(2));
  Py_RETURN_TRUE;
}

PyMethodDef functions[] = {
    {"accumulate", as_method<accumulate>(), METH_FASTCALL, nullptr},
    {"prepare", as_method<prepare>(), METH_FASTCALL, nullptr},
    {"norm_partials", as_method<norm_partials>(), METH_FASTCALL, nullptr},
    {"total_norm", as_method<total_norm>(), METH_FASTCALL, nullptr},
    {"set_kernels", as_method<set_kernels>(), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void define_lists(PyObject* module) { PyModule_AddFunctions(module, functions); }

}  // namespace fusedacc::autograd
