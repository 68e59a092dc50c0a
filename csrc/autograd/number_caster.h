// Converts a Number between C++ and Python. Include it wherever pybind11 does so.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "number.h"

namespace pybind11::detail {

// A Number is a float or a tensor in Python.
template <>
struct type_caster<fusedacc::autograd::Number> {
 public:
  PYBIND11_TYPE_CASTER(fusedacc::autograd::Number, const_name("float | torch.Tensor"));

  bool load(handle source, bool) {
    if (THPVariable_Check(source.ptr())) {
      value.tensor = THPVariable_Unpack(source.ptr());
      return true;
    }
    value.value = PyFloat_AsDouble(source.ptr());
    if (PyErr_Occurred() == nullptr) return true;
    PyErr_Clear();
    return false;
  }
  static handle cast(const fusedacc::autograd::Number& number, return_value_policy, handle) {
    if (number.on_host()) return PyFloat_FromDouble(number.value);
    return THPVariable_Wrap(number.tensor);
  }
};

}  // namespace pybind11::detail
