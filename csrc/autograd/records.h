// Reads and writes Python's records of a window and of its sums.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "immediate_add.h"

namespace fusedacc::autograd {

// An attribute of objects of one class. If the class has a slot for it (`__slots__`), it is read and written
// there, because a look-up by name touches many more cache lines. Needs the GIL.
class Attribute {
 public:
  explicit Attribute(pybind11::object name) : name_(std::move(name)) {}
  explicit Attribute(const char* name);
  // Both throw what Python raises.
  pybind11::object of(pybind11::handle owner) const;
  void set(pybind11::handle owner, const pybind11::object& value) const;

 private:
  // Where the slot of this object is; null if it has none, or if it is empty.
  PyObject** slot_in(PyObject* owner) const;

  pybind11::object name_;
  mutable pybind11::object class_;  // of the last owner
  mutable Py_ssize_t offset_ = 0;   // of the slot in its objects; 0: there is none
};

// A weak reference to the object, and the object of a weak reference, or none.
pybind11::object weak(pybind11::handle object);
pybind11::object alive(const pybind11::object& reference);
bool is_true(pybind11::handle object);

// What was seen of ordinary parameters, so that one call tells whether they are as they were.
class SeenParameters {
 public:
  // None if one of them is not ordinary.
  static std::shared_ptr<SeenParameters> look_at(const pybind11::list& parameters) {
    auto found = std::make_shared<SeenParameters>();
    for (const pybind11::handle parameter : parameters) {
      if (!THPVariable_Check(parameter.ptr())) return nullptr;
      const at::Tensor& tensor = THPVariable_Unpack(parameter.ptr());
      if (!is_ordinary(tensor)) return nullptr;
      found->each_.push_back(seen(tensor));
    }
    return found;
  }

  // Whether the same parameters, which are alive, have the same memory, dtype, shape and AccumulateGrad node,
  // and require gradients as they did.
  bool hold(const pybind11::list& parameters) const {
    if (parameters.size() != each_.size()) return false;
    for (size_t i = 0; i < each_.size(); ++i) {
      const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(parameters.ptr(), i));
      if (!is_ordinary(tensor) || each_[i] != seen(tensor)) return false;
    }
    return true;
  }

 private:
  static bool is_ordinary(const at::Tensor& tensor) {
    return (tensor.is_cpu() || tensor.is_cuda()) && is_plain(tensor);
  }
  using Seen = std::tuple<const void*, at::ScalarType, bool, const void*, at::DimVector>;
  static Seen seen(const at::Tensor& tensor) {
    const bool is_trained = tensor.requires_grad();
    const void* const node =
        is_trained ? torch::autograd::impl::try_get_grad_accumulator(tensor).get() : nullptr;
    return {tensor.const_data_ptr(), tensor.scalar_type(), is_trained, node, at::DimVector(tensor.sizes())};
  }
  std::vector<Seen> each_;
};

// Python's records of the private sums: `ParamGrads`, `DeferredScales`, the slots by native index, and the
// `GradState`s NOT_OURS and PUBLISHED. All methods need the GIL.
class SumRecords {
 public:
  explicit SumRecords(const pybind11::tuple& parts);

  // Whether an update has consumed what p.grad holds.
  bool is_consumed() const;
  bool has_deferred() const;
  // Increments the version of the sums, and returns it.
  int64_t advance() const;
  // As `NativeHooks.note_added`: their deferred scales were applied, or they were written into their reduce
  // buckets. made: sums in new memory, by their slot's index.
  void note_added(const std::vector<int64_t>& indices,
                  const std::vector<std::pair<int64_t, at::Tensor>>& made) const;
  // Makes gradients, each times `scale`, the sums of slots that have none.
  void adopt(const std::vector<PyObject*>& slots, const std::vector<at::Tensor>& gradients,
             double scale) const;
  // As `ParamGrads.publish_all`: whether it was done, and p.grad is a sum for every parameter. Leaves
  // everything as it is where a parameter is not ordinary.
  bool publish() const;
  // As `ParamGrads.clear`, where every p.grad is a sum.
  void clear() const;

 private:
  const pybind11::object grads_, deferred_;
  const pybind11::list slots_by_index_;
  const pybind11::object not_ours_, published_;
};

}  // namespace fusedacc::autograd
