#include "list_tasks.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>

#include "../common/chunk_plan.h"
#include "immediate_add.h"

namespace fusedacc::autograd {
namespace {

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

inline bool read(PyObject* object, Read& found) {
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

inline Task task_of(void* accumulator, const void* gradient, int64_t numel, int32_t pair, bool overwrite,
                    const int64_t* stream) {
  Task task{accumulator, gradient, numel, 0, pair, -1, overwrite};
  if (stream != nullptr) task.stream = static_cast<uint64_t>(*stream);
  return task;
}

// Whether `size` bytes from `data` on meet none of the ranges but `own`, which they may equal.
inline bool is_apart(const std::vector<Range>& ranges, const void* data, int64_t size, int64_t own,
                     int64_t& hint) {
  const auto begin = reinterpret_cast<int64_t>(data);
  const Range* range =
      find_overlap(ranges.data(), static_cast<int64_t>(ranges.size()), begin, begin + size, hint);
  return range == nullptr || (range->index == own && range->begin == begin && range->end == begin + size);
}

}  // namespace

Items::Items(PyObject* sequence) {
  if (PyList_CheckExact(sequence)) {
    items = reinterpret_cast<PyListObject*>(sequence)->ob_item;
    count = PyList_GET_SIZE(sequence);
    ok = true;
  } else if (PyTuple_CheckExact(sequence)) {
    items = reinterpret_cast<PyTupleObject*>(sequence)->ob_item;
    count = PyTuple_GET_SIZE(sequence);
    ok = true;
  }
}

bool read_number(PyObject* object, double& value) {
  if (PyFloat_CheckExact(object)) {
    value = PyFloat_AS_DOUBLE(object);
    return true;
  }
  Read found;
  if (!is_tensor(object) || !read(object, found) || found.record->dim() != 0) return false;
  value = read_scale<double>({static_cast<const c10::TensorImpl*>(found.record)->data(), 0, found.dtype});
  return true;
}

bool read_integer(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

bool nobody_watches() {
  static const uint64_t usual = (c10::default_included_set | c10::autocast_dispatch_keyset).raw_repr();
  const uint64_t included = c10::impl::tls_local_dispatch_key_set().included_.raw_repr();
  return (included & ~usual) == 0 && !at::impl::torch_function_mode_enabled();
}

bool BoundList::read(const Items& accumulators) {
  if (!accumulators.ok) return false;
  bound.reserve(static_cast<size_t>(accumulators.count));
  for (int64_t i = 0; i < accumulators.count; ++i) {
    PyObject* object = accumulators.items[i];
    Read found;
    if (!is_tensor(object) || !autograd::read(object, found)) return false;
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

bool BoundList::own(const Items& tensors) {
  if (!tensors.ok) return false;
  for (int64_t i = 0; i < tensors.count; ++i) {
    if (!is_tensor(tensors.items[i])) return false;
    const c10::VariableVersion& version = record_of(tensors.items[i])->version_counter();
    if (version.enabled()) versions.push_back(version);
  }
  return true;
}

void BoundList::bump() {
  for (c10::VariableVersion& version : versions) version.bump();
}

void Reading::clear() {
  work.clear();
  ranges.clear();
  written.clear();
  wide = false;
}

bool Reading::match(const Items& accumulators, const Items& gradients, bool overwrite, PyObject** flags,
                    const int64_t* streams) {
  clear();
  bool ascending = true;
  int64_t past = 0;
  const bool all = walk<true>({accumulators, gradients}, [&](int64_t i) {
    Read accumulator, gradient;
    if (!read(accumulators.items[i], accumulator) || !read(gradients.items[i], gradient)) return false;
    c10::TensorImpl &into = *accumulator.record, &from = *gradient.record;
    const int32_t pair = pair_of(gradient.dtype, accumulator.dtype, streams != nullptr);
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
    work.push(task_of(data, static_cast<const c10::TensorImpl&>(from).data(), numel, pair,
                      flags == nullptr ? overwrite : flags[i] == Py_True,
                      streams == nullptr ? nullptr : streams + i));
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

bool Reading::match(const BoundList& accumulators, const Items& gradients, bool overwrite, PyObject** flags,
                    const int64_t* streams) {
  clear();
  if (gradients.count != static_cast<int64_t>(accumulators.bound.size())) return false;
  int64_t hint = 0;
  return walk<false>({gradients}, [&](int64_t i) {
    const Bound& own = accumulators.bound[static_cast<size_t>(i)];
    Read gradient;
    if (!read(gradients.items[i], gradient)) return false;
    const c10::TensorImpl& from = *gradient.record;
    const int32_t pair = pair_of(gradient.dtype, own.dtype, streams != nullptr);
    const int64_t *sizes = accumulators.words.data() + own.shape, *strides = sizes + own.dims;
    if (pair < 0 || from.dim() != own.dims || !std::equal(sizes, strides, from.sizes().data())) return false;
    if (!(own.contiguous && from.is_contiguous()) &&
        !std::equal(strides, strides + own.dims, from.strides().data())) {
      return false;
    }
    if (own.numel == 0) return true;
    const void* data = from.data();
    const int64_t size = own.numel * element_size(kPairs[pair].gradient);
    if (!is_apart(accumulators.ranges, data, size, i, hint)) return false;
    work.push(task_of(own.data, data, own.numel, pair, flags == nullptr ? overwrite : flags[i] == Py_True,
                      streams == nullptr ? nullptr : streams + i));
    return true;
  });
}

bool Reading::measure(const Items& tensors) {
  clear();
  return walk<false>({tensors}, [&](int64_t i) {
    Read found;
    if (!read(tensors.items[i], found)) return false;
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

void Reading::bump() {
  for (c10::TensorImpl* record : written) {
    if (record->version_counter().enabled()) record->bump_version();
  }
}

}  // namespace fusedacc::autograd
