// Operators over lists of tensors, past torch's dispatcher: they read lists from Python into tasks, in one
// pass over torch's records of the tensors.
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ScalarOps.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "../common/chunk_plan.h"
#include "../common/work.h"
#include "hook.h"
#include "lists.h"

namespace fusedacc::autograd {
namespace {

// The items of a list or a tuple, borrowed; `ok` is false for anything else.
struct Items {
  PyObject** items = nullptr;
  int64_t count = 0;
  bool ok = false;

  Items() = default;
  explicit Items(PyObject* sequence) : ok(PyList_CheckExact(sequence) || PyTuple_CheckExact(sequence)) {
    if (!ok) return;
    items = PySequence_Fast_ITEMS(sequence);
    count = PySequence_Fast_GET_SIZE(sequence);
  }
};

// What is read of a tensor is fetched this many tensors ahead, one pointer of the chain after another: Python
// object, torch's record, the records of its storage and version. Lists of small tensors are cold as a rule.
constexpr int64_t kStep = 6;

using Keys = c10::DispatchKeySet;

// The keys of a CPU tensor made in inference mode, and of an ordinary one: no subclass, no wrapper, no lazy
// bits.
Keys inference_keys() {
  return Keys(c10::DispatchKey::CPU) |
         c10::getAutocastRelatedKeySetFromBackend(c10::BackendComponent::CPUBit);
}
Keys ordinary_keys() {
  return inference_keys() | c10::getAutogradRelatedKeySetFromBackend(c10::BackendComponent::CPUBit);
}

inline bool is_tensor(PyObject* object) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == THPVariableClass || type == ParameterClass;
}

inline c10::TensorImpl* record_of(PyObject* object) {
  return reinterpret_cast<THPVariable*>(object)->cdata.unsafeGetTensorImpl();
}

inline void fetch_record(const c10::TensorImpl* record) {
  const char* from = reinterpret_cast<const char*>(record);
  for (size_t byte = 0; byte < sizeof(c10::TensorImpl); byte += 64) __builtin_prefetch(from + byte);
}

inline void fetch_storage(const c10::TensorImpl* record) {
  const auto* storage = reinterpret_cast<const char*>(record->unsafe_storage().unsafeGetStorageImpl());
  __builtin_prefetch(storage);
  __builtin_prefetch(storage + 64);
}

inline void fetch_version(const c10::TensorImpl* record) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  void* counter;
  std::memcpy(&counter, &record->version_counter(), sizeof(counter));
  __builtin_prefetch(counter, 1);
}

struct Read {
  c10::TensorImpl* record;
  int32_t dtype;
};

inline bool read_record(PyObject* object, Read& found) {
  found.record = record_of(object);
  static const Keys ordinary = ordinary_keys(), inference = inference_keys();
  const Keys keys = found.record->key_set();
  if (keys != ordinary && keys != inference) return false;
  found.dtype = dtype_number(c10::typeMetaToScalarType(found.record->dtype()));
  return found.dtype >= 0;
}

// Calls visit(i) for each i in order, with the records of all lists on their way. False where one of the
// items is no tensor, or a visit has returned false.
template <bool fetches_versions, int lists, typename Visit>
inline bool walk(const Items (&of)[lists], Visit&& visit) {
  const int64_t count = of[0].count;
  for (int64_t i = -3 * kStep; i < count; ++i) {
    for (int list = 0; list < lists; ++list) {
      PyObject** items = of[list].items;
      if (i + 3 * kStep < count) __builtin_prefetch(items[i + 3 * kStep]);
      const int64_t near = i + 2 * kStep, nearer = i + kStep;
      if (near >= 0 && near < count) {
        if (!is_tensor(items[near])) return false;
        fetch_record(record_of(items[near]));
      }
      if (nearer >= 0 && nearer < count) {
        const c10::TensorImpl* record = record_of(items[nearer]);
        fetch_storage(record);
        if (fetches_versions && list == 0) fetch_version(record);
      }
    }
    if (i >= 0 && !visit(i)) return false;
  }
  return true;
}

// The pair of a gradient and its sum, or -1.
inline int32_t pair_of(int32_t gradient, int32_t accumulator, bool stochastically) {
  const int32_t pair = find_pair(static_cast<Dtype>(gradient), static_cast<Dtype>(accumulator));
  return stochastically ? stochastic(pair) : pair;
}

// Whether `size` bytes from `data` on meet none of the ranges but `own`, which they may equal.
inline bool is_apart(const std::vector<Range>& ranges, const void* data, int64_t size, int64_t own,
                     int64_t& hint) {
  const auto begin = reinterpret_cast<int64_t>(data);
  const Range* range =
      find_overlap(ranges.data(), static_cast<int64_t>(ranges.size()), begin, begin + size, hint);
  return range == nullptr || (range->index == own && range->begin == begin && range->end == begin + size);
}

// Reads a float or a 0-dim CPU tensor.
bool read_number(PyObject* object, double& value) {
  if (PyFloat_CheckExact(object)) {
    value = PyFloat_AS_DOUBLE(object);
    return true;
  }
  Read found;
  if (!is_tensor(object) || !read_record(object, found) || found.record->dim() != 0) return false;
  value = read_scale<double>({static_cast<const c10::TensorImpl*>(found.record)->data(), 0, found.dtype});
  return true;
}

// Reads an int, if it fits.
bool read_integer(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

// Whether calls may bypass the dispatcher now: no mode, no transform and no tracer is active.
bool nobody_watches() {
  static const uint64_t usual = (c10::default_included_set | c10::autocast_dispatch_keyset).raw_repr();
  const uint64_t included = c10::impl::tls_local_dispatch_key_set().included_.raw_repr();
  return (included & ~usual) == 0 && !at::impl::torch_function_mode_enabled();
}

// The checked facts of an accumulator.
struct Bound {
  void* data;
  int64_t numel;
  int32_t dtype, dims;
  int64_t shape;  // where its sizes start among Accumulators::words; its strides follow
  bool contiguous;
};

// Accumulators that were checked once. Their memory is not kept alive.
struct BoundList {
  std::vector<Bound> bound;
  std::vector<int64_t> words;
  std::vector<Range> ranges;
  std::vector<c10::VariableVersion> versions;

  // Returns false if the operators of libfusedacc.so must handle the list.
  bool read(const Items& accumulators) {
    if (!accumulators.ok) return false;
    bound.reserve(static_cast<size_t>(accumulators.count));
    for (int64_t i = 0; i < accumulators.count; ++i) {
      PyObject* object = accumulators.items[i];
      Read found;
      if (!is_tensor(object) || !read_record(object, found)) return false;
      c10::TensorImpl& record = *found.record;
      if (!record.is_contiguous() && !record.is_non_overlapping_and_dense()) return false;
      auto* data = static_cast<char*>(record.mutable_data());
      const auto begin = reinterpret_cast<int64_t>(data);
      const int64_t size = record.numel() * element_size(static_cast<Dtype>(found.dtype));
      if (size > 0) ranges.push_back({begin, begin + size, i});
      bound.push_back({data, record.numel(), found.dtype, static_cast<int32_t>(record.dim()),
                       static_cast<int64_t>(words.size()), record.is_contiguous()});
      words.insert(words.end(), record.sizes().begin(), record.sizes().end());
      words.insert(words.end(), record.strides().begin(), record.strides().end());
    }
    return sort_ranges(ranges) == ranges.size();
  }
  // From now on every call increments the versions: once for each counter among these tensors.
  bool own(const Items& tensors) {
    if (!tensors.ok) return false;
    for (int64_t i = 0; i < tensors.count; ++i) {
      if (!is_tensor(tensors.items[i])) return false;
      const c10::VariableVersion& version = record_of(tensors.items[i])->version_counter();
      if (version.enabled()) versions.push_back(version);
    }
    return true;
  }
  void bump() {
    for (c10::VariableVersion& version : versions) version.bump();
  }
};

// How gradients are added: with one flag for all or one for each, and if sums are rounded stochastically with
// one stream of random bits for each.
struct How {
  bool overwrite = false;
  PyObject** flags = nullptr;
  const int64_t* streams = nullptr;

  Task task(int64_t i, void* accumulator, const void* gradient, int64_t numel, int32_t pair) const {
    Task task{accumulator, gradient, numel, 0, pair, -1, flags == nullptr ? overwrite : flags[i] == Py_True};
    if (streams != nullptr) task.stream = static_cast<uint64_t>(streams[i]);
    return task;
  }
};

// The tasks of one call, and the tensors that were read. The memory is reused for later calls.
struct Reading {
  Work work;
  std::vector<Range> ranges;
  std::vector<c10::TensorImpl*> written;
  bool wide = false;  // one of the measured tensors is float64

  // Each of these returns false for lists that the operators of libfusedacc.so must handle.
  bool match(const Items& accumulators, const Items& gradients, const How& how) {
    clear();
    bool ascending = true;
    int64_t past = 0;
    const bool all = walk<true>({accumulators, gradients}, [&](int64_t i) {
      Read accumulator, gradient;
      if (!read_record(accumulators.items[i], accumulator) || !read_record(gradients.items[i], gradient))
        return false;
      c10::TensorImpl &into = *accumulator.record, &from = *gradient.record;
      const int32_t pair = pair_of(gradient.dtype, accumulator.dtype, how.streams != nullptr);
      if (pair < 0 || into.sizes() != from.sizes()) return false;
      if (!(into.is_contiguous() && from.is_contiguous()) &&
          !(into.is_non_overlapping_and_dense() && into.strides() == from.strides())) {
        return false;
      }
      written.push_back(&into);
      const int64_t numel = into.numel();
      if (numel == 0) return true;
      void* data = into.mutable_data();
      const auto begin = reinterpret_cast<int64_t>(data);
      const int64_t end = begin + numel * element_size(kPairs[pair].accumulator);
      ascending = ascending && begin >= past;
      past = end;
      ranges.push_back({begin, end, static_cast<int64_t>(work.tasks.size())});
      work.push(how.task(i, data, static_cast<const c10::TensorImpl&>(from).data(), numel, pair));
      return true;
    });
    if (!all || (!ascending && sort_ranges(ranges) < ranges.size())) return false;
    int64_t hint = 0;
    for (size_t i = 0; i < work.tasks.size(); ++i) {
      const Task& task = work.tasks[i];
      const int64_t size = task.numel * element_size(kPairs[task.pair].gradient);
      if (!is_apart(ranges, task.gradient, size, static_cast<int64_t>(i), hint)) return false;
    }
    return true;
  }

  bool match(const BoundList& accumulators, const Items& gradients, const How& how) {
    clear();
    if (gradients.count != static_cast<int64_t>(accumulators.bound.size())) return false;
    int64_t hint = 0;
    return walk<false>({gradients}, [&](int64_t i) {
      const Bound& own = accumulators.bound[static_cast<size_t>(i)];
      Read gradient;
      if (!read_record(gradients.items[i], gradient)) return false;
      const c10::TensorImpl& from = *gradient.record;
      const int32_t pair = pair_of(gradient.dtype, own.dtype, how.streams != nullptr);
      const int64_t *sizes = accumulators.words.data() + own.shape, *strides = sizes + own.dims;
      if (pair < 0 || from.dim() != own.dims || !std::equal(sizes, strides, from.sizes().data()))
        return false;
      if (!(own.contiguous && from.is_contiguous()) &&
          !std::equal(strides, strides + own.dims, from.strides().data())) {
        return false;
      }
      if (own.numel == 0) return true;
      const void* data = from.data();
      const int64_t size = own.numel * element_size(kPairs[pair].gradient);
      if (!is_apart(accumulators.ranges, data, size, i, hint)) return false;
      work.push(how.task(i, own.data, data, own.numel, pair));
      return true;
    });
  }

  bool measure(const Items& tensors) {
    clear();
    return walk<false>({tensors}, [&](int64_t i) {
      Read found;
      if (!read_record(tensors.items[i], found)) return false;
      c10::TensorImpl& record = *found.record;
      if (!record.is_contiguous() && !record.is_non_overlapping_and_dense()) return false;
      const auto dtype = static_cast<Dtype>(found.dtype);
      const int32_t pair = find_pair(dtype, dtype);
      if (pair < 0) return false;
      wide = wide || dtype == Dtype::kFloat64;
      if (record.numel() == 0) return true;
      const void* data = static_cast<const c10::TensorImpl&>(record).data();
      work.push({const_cast<void*>(data), data, record.numel(), 0, pair, -1, false});
      return true;
    });
  }

  // Increments the versions of the accumulators that were read last.
  void bump() {
    for (c10::TensorImpl* record : written) {
      if (record->version_counter().enabled()) record->bump_version();
    }
  }

 private:
  void clear() {
    work.clear();
    ranges.clear();
    written.clear();
    wide = false;
  }
};

// Of libfusedacc.so; csrc/cpu/lists.cpp has them.
struct Kernels {
  void (*run)(const Task*, int64_t, const Multipliers*) = nullptr;
  void (*run_norm)(const Task*, int64_t, int32_t, double*) = nullptr;
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

Reading& reading() {
  static thread_local Reading found;
  return found;
}

// How a call was asked to add: `by`, which tensors are overwritten, and how sums are rounded.
struct Options {
  Multipliers by;
  How how;
  bool ok;

  // overwrite: one bool, or one for each of `count` tensors. noise: None or (seed, one stream for each).
  Options(PyObject* scale, PyObject* overwrite, PyObject* beta, PyObject* noise, int64_t count) {
    ok = read_flags(overwrite, count) && read_number(scale, by.scale) && read_number(beta, by.beta) &&
         (noise == Py_None || read_streams(noise, count));
  }

 private:
  bool read_flags(PyObject* overwrite, int64_t count) {
    if (PyBool_Check(overwrite)) {
      how.overwrite = overwrite == Py_True;
      return true;
    }
    const Items items(overwrite);
    how.flags = items.items;
    return items.ok && items.count == count &&
           std::all_of(items.items, items.items + count, [](PyObject* flag) { return PyBool_Check(flag); });
  }

  bool read_streams(PyObject* noise, int64_t count) {
    int64_t seed;
    if (!PyTuple_Check(noise) || PyTuple_GET_SIZE(noise) != 2) return false;
    const Items items(PyTuple_GET_ITEM(noise, 1));
    if (!items.ok || items.count != count || !read_integer(PyTuple_GET_ITEM(noise, 0), seed)) return false;
    static thread_local std::vector<int64_t> values;
    values.resize(static_cast<size_t>(count));
    by.noise.seed = static_cast<uint64_t>(seed);
    how.streams = values.data();
    for (int64_t i = 0; i < count; ++i) {
      if (!read_integer(items.items[i], values[static_cast<size_t>(i)])) return false;
    }
    return true;
  }
};

// Adds what was read, and returns True.
PyObject* run(const Work& work, std::initializer_list<const Items*> lists, const Options& options) {
  RECORD_FUNCTION("fusedacc::scale_accumulate_", std::vector<c10::IValue>());
  if (!work.tasks.empty()) {
    const Unlocked unlocked(work.elements, lists);
    kernels.run(work.tasks.data(), static_cast<int64_t>(work.tasks.size()), &options.by);
  }
  Py_RETURN_TRUE;
}

// (accumulators, gradients, scale, overwrite, beta, noise, automatic, bumps)
PyObject* accumulate(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 8 || kernels.run == nullptr || !may_pass(arguments[6] == Py_True)) return refuse();
  const Items accumulators(arguments[0]), gradients(arguments[1]);
  if (!accumulators.ok || !gradients.ok || accumulators.count == 0 || accumulators.count != gradients.count) {
    return refuse();
  }
  const Options options(arguments[2], arguments[3], arguments[4], arguments[5], accumulators.count);
  Reading& read = reading();
  if (!options.ok || !read.match(accumulators, gradients, options.how)) return refuse();
  if (arguments[7] == Py_True) read.bump();
  return run(read.work, {&accumulators, &gradients}, options);
}

BoundList* bound_list(PyObject* capsule) {
  return static_cast<BoundList*>(PyCapsule_GetPointer(capsule, kCapsule));
}

// (gradients, scale, overwrite, beta, noise)
PyObject* accumulate_bound(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5 || !may_pass(false)) return refuse();
  BoundList& accumulators = *bound_list(capsule);
  const Items gradients(arguments[0]);
  const Options options(arguments[1], arguments[2], arguments[3], arguments[4], gradients.count);
  Reading& read = reading();
  if (!gradients.ok || !options.ok || !read.match(accumulators, gradients, options.how)) return refuse();
  accumulators.bump();
  return run(read.work, {&gradients}, options);
}

// Reads (tensors, norm_type); false where the operators must compute the norm.
bool read_norm(PyObject* const* arguments, Py_ssize_t count, bool automatic, Items& tensors, int32_t& kind) {
  if (count != 2 || kernels.run == nullptr || !may_pass(automatic) || !norm_kind(arguments[1], kind)) {
    return false;
  }
  tensors = Items(arguments[0]);
  return tensors.ok && tensors.count != 0 && reading().measure(tensors);
}

// (tensors, norm_type)
PyObject* norm_partials(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  int32_t kind;
  Items tensors;
  if (!read_norm(arguments, count, false, tensors, kind)) return refuse();
  RECORD_FUNCTION("fusedacc::norm_partials", std::vector<c10::IValue>());
  const Work& work = reading().work;
  at::Tensor partials = at::detail::empty_cpu({work.chunks}, at::kDouble, false, std::nullopt);
  if (!work.tasks.empty()) {
    const Unlocked unlocked(work.elements, {&tensors});
    kernels.run_norm(work.tasks.data(), static_cast<int64_t>(work.tasks.size()), kind,
                     partials.mutable_data_ptr<double>());
  }
  return THPVariable_Wrap(std::move(partials));
}

// (tensors, norm_type): the norm, and 1 or 0: whether an element was not finite.
PyObject* total_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  int32_t kind;
  Items tensors;
  if (!read_norm(arguments, count, true, tensors, kind) || reading().work.tasks.empty()) return refuse();
  const Work& work = reading().work;
  RECORD_FUNCTION("fusedacc::total_norm", std::vector<c10::IValue>());
  static thread_local std::vector<double> partials;
  partials.resize(static_cast<size_t>(work.chunks));
  const bool wide = reading().wide;
  double norm;
  {
    const Unlocked unlocked(work.elements, {&tensors});
    kernels.run_norm(work.tasks.data(), static_cast<int64_t>(work.tasks.size()), kind, partials.data());
    norm = kernels.join_norms(partials.data(), work.chunks, kind);
  }
  using at::detail::scalar_tensor_static;
  PyObject* found =
      THPVariable_Wrap(wide ? scalar_tensor_static(norm, at::kDouble, at::kCPU)
                            : scalar_tensor_static(static_cast<float>(norm), at::kFloat, at::kCPU));
  PyObject* nonfinite = THPVariable_Wrap(scalar_tensor_static(!std::isfinite(norm), at::kFloat, at::kCPU));
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
