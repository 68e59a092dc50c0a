#include "module_attribute.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace fusedacc::autograd {
namespace {

// torch.nn.Module.__getattr__ when fusedacc was imported. It looks for parameters first.
PyObject* getattr_of_torch = nullptr;

// Whether the type defines neither the attribute nor how attributes are read. Then an instance's attribute is
// in its __dict__, or __getattr__ of torch.nn.Module finds it.
bool has_ordinary_access(PyTypeObject* type, PyObject* name) {
  static PyObject* const getattribute = PyUnicode_InternFromString("__getattribute__");
  static PyObject* const getattr = PyUnicode_InternFromString("__getattr__");
  static PyObject* const of_object = _PyType_Lookup(&PyBaseObject_Type, getattribute);
  return _PyType_Lookup(type, name) == nullptr && _PyType_Lookup(type, getattr) == getattr_of_torch &&
         _PyType_Lookup(type, getattribute) == of_object;
}

// Returns a borrowed reference to the module's parameter (or None) of this name if getattr would return it;
// else null, without an error.
PyObject* find_parameter(PyObject* module, PyObject* name) {
  static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
  if (!has_ordinary_access(Py_TYPE(module), name)) return nullptr;
  const auto entries = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  PyObject* found = nullptr;
  if (entries && PyDict_GetItemWithError(entries.ptr(), name) == nullptr) {
    PyObject* const named = PyDict_GetItemWithError(entries.ptr(), parameters);
    if (named != nullptr && PyDict_CheckExact(named)) found = PyDict_GetItemWithError(named, name);
  }
  PyErr_Clear();
  return found;
}

PyObject* attribute(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "attribute(module, name) takes two arguments");
    return nullptr;
  }
  PyObject* const found = find_parameter(arguments[0], arguments[1]);
  return found == nullptr ? PyObject_GetAttr(arguments[0], arguments[1]) : Py_NewRef(found);
}

PyMethodDef attribute_functions[] = {
    {"attribute", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&attribute)), METH_FASTCALL,
     nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void define_attribute(PyObject* module) {
  py::object function = py::module_::import("torch.nn").attr("Module").attr("__getattr__");
  getattr_of_torch = function.release().ptr();
  PyModule_AddFunctions(module, attribute_functions);
}

}  // namespace fusedacc::autograd
