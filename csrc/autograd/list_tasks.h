// Reads lists of tensors from Python into tasks, in one pass over torch's records of them.
#pragma once

#include <Python.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../common/work.h"

namespace fusedacc::autograd {

// The items of a list or a tuple, borrowed; `ok` is false for anything else.
struct Items {
  PyObject** items = nullptr;
  int64_t count = 0;
  bool ok = false;

  Items() = default;
  explicit Items(PyObject* sequence);
};

// Whether calls may bypass the dispatcher now: no mode, no transform and no tracer is active.
bool nobody_watches();

// Reads a float or a 0-dim CPU tensor.
bool read_number(PyObject* object, double& value);

// Reads an int, if it fits.
bool read_integer(PyObject* object, int64_t& value);

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
  bool read(const Items& accumulators);
  // From now on every call increments the versions: once for each counter among these tensors.
  bool own(const Items& tensors);
  void bump();
};

// The tasks of one call, and the tensors that were read. The memory is reused for later calls.
struct Reading {
  Work work;
  std::vector<Range> ranges;
  std::vector<c10::TensorImpl*> written;
  bool wide = false;  // one of the measured tensors is float64

  // Each of these returns false for lists that the operators of libfusedacc.so must handle. `flags` has one
  // bool per tensor, or is null; `streams` has one stream of random bits per tensor, or is null.
  bool match(const Items& accumulators, const Items& gradients, bool overwrite, PyObject** flags,
             const int64_t* streams);
  bool match(const BoundList& accumulators, const Items& gradients, bool overwrite, PyObject** flags,
             const int64_t* streams);
  bool measure(const Items& tensors);
  // Increments the versions of the accumulators that were read last.
  void bump();

 private:
  void clear();
};

}  // namespace fusedacc::autograd
