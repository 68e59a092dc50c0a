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

// Whether calls may pass by the dispatcher here and now: no mode, no transform and no tracer would see them.
bool nobody_watches();

// A float, or what stands in a 0-dim CPU tensor.
bool read_number(PyObject* object, double& value);

// An int that fits.
bool read_integer(PyObject* object, int64_t& value);

// What is known of an accumulator that stays.
struct Bound {
  void* data;
  int64_t numel;
  int32_t dtype, dims;
  int64_t shape;  // where its sizes start among Accumulators::words; its strides follow
  bool contiguous;
};

// Accumulators that have been checked once; their memory is not kept alive.
struct BoundList {
  std::vector<Bound> bound;
  std::vector<int64_t> words;
  std::vector<Range> ranges;
  std::vector<c10::VariableVersion> versions;

  // False: not for us.
  bool read(const Items& accumulators);
  // Versions are bumped by every call from here on: one for each counter among these tensors.
  bool own(const Items& tensors);
  void bump();
};

// The tasks of one call, and what was read on the way. Kept from call to call.
struct Reading {
  Work work;
  std::vector<Range> ranges;
  std::vector<c10::TensorImpl*> written;
  bool wide = false;  // one of the tensors that were measured is of float64

  // Each of these returns false for lists that are not for us. `flags` is one bool per tensor, or null;
  // `streams` likewise, of sums that are rounded stochastically.
  bool match(const Items& accumulators, const Items& gradients, bool overwrite, PyObject** flags,
             const int64_t* streams);
  bool match(const BoundList& accumulators, const Items& gradients, bool overwrite, PyObject** flags,
             const int64_t* streams);
  bool measure(const Items& tensors);
  // Bumps the versions of the accumulators that were read last.
  void bump();

 private:
  void clear();
};

}  // namespace fusedacc::autograd
