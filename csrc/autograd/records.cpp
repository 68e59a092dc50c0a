#include "records.h"

#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace fusedacc::autograd {
namespace {

py::object interned(const char* name) {
  return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
}

}  // namespace

Attribute::Attribute(const char* name) : name_(interned(name)) {}

PyObject** Attribute::slot_in(PyObject* owner) const {
  const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(owner)));
  if (!class_.is(type)) {
    class_ = py::reinterpret_borrow<py::object>(type);
    const py::object found = py::getattr(class_, name_, py::none());
    const bool is_member = PyObject_TypeCheck(found.ptr(), &PyMemberDescr_Type);
    const PyMemberDef* const member =
        is_member ? reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member : nullptr;
    offset_ = is_member && member->type == T_OBJECT_EX ? member->offset : 0;
  }
  auto** const place = reinterpret_cast<PyObject**>(reinterpret_cast<char*>(owner) + offset_);
  return offset_ == 0 || *place == nullptr ? nullptr : place;
}

py::object Attribute::of(py::handle owner) const {
  PyObject** const slot = slot_in(owner.ptr());
  return slot == nullptr ? py::getattr(owner, name_) : py::reinterpret_borrow<py::object>(*slot);
}

void Attribute::set(py::handle owner, const py::object& value) const {
  PyObject** const slot = slot_in(owner.ptr());
  if (slot == nullptr) return py::setattr(owner, name_, value);
  const py::object former = py::reinterpret_steal<py::object>(*slot);
  *slot = py::object(value).release().ptr();
}

py::object weak(py::handle object) {
  py::object reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(object.ptr(), nullptr));
  if (!reference) throw py::error_already_set();
  return reference;
}

py::object alive(const py::object& reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  PyWeakref_GetRef(reference.ptr(), &found);
  return found == nullptr ? py::object(py::none()) : py::reinterpret_steal<py::object>(found);
#else
  return py::reinterpret_borrow<py::object>(PyWeakref_GET_OBJECT(reference.ptr()));
#endif
}

bool is_true(py::handle object) {
  const int truth = PyObject_IsTrue(object.ptr());
  if (truth < 0) throw py::error_already_set();
  return truth == 1;
}

namespace {

// Never freed, since the interpreter may be gone before.
struct Fields {
  const Attribute slots{"slots"}, generation{"generation"}, num_published{"num_published"};
  const Attribute consumed{"consumed"}, exposed{"exposed"};
  const Attribute scales{"scales"}, num_changes{"num_changes"};
  const Attribute param{"param"}, accumulator{"accumulator"}, grad_state{"grad_state"};
  const Attribute placed{"placed"}, placed_version{"placed_version"}, sparse_bytes{"sparse_bytes"};
  const Attribute buffer{"buffer"};
};

const Fields& fields() {
  static const Fields* const made = new Fields;
  return *made;
}

int64_t increment(const py::object& owner, const Attribute& version) {
  const int64_t next = version.of(owner).cast<int64_t>() + 1;
  version.set(owner, py::int_(next));
  return next;
}

const at::Tensor& tensor_of(const py::object& object) { return THPVariable_Unpack(object.ptr()); }

}  // namespace

SumRecords::SumRecords(const py::tuple& parts)
    : grads_(parts[0]),
      deferred_(parts[1]),
      slots_by_index_(parts[2]),
      not_ours_(parts[3]),
      published_(parts[4]) {}

bool SumRecords::is_consumed() const { return is_true(fields().consumed.of(grads_)); }

bool SumRecords::has_deferred() const { return PyDict_Size(fields().scales.of(deferred_).ptr()) != 0; }

int64_t SumRecords::advance() const { return increment(grads_, fields().generation); }

void SumRecords::note_added(const std::vector<int64_t>& indices,
                            const std::vector<std::pair<int64_t, at::Tensor>>& made) const {
  for (const auto& [index, sum] : made) {
    fields().accumulator.set(slots_by_index_[index],
                             py::reinterpret_steal<py::object>(THPVariable_Wrap(sum)));
    advance();
  }
  const py::dict scales = fields().scales.of(deferred_);
  if (!scales.empty()) increment(deferred_, fields().num_changes);
  for (const int64_t index : indices) {
    const py::object slot = slots_by_index_[index];
    if (scales.contains(slot) && PyDict_DelItem(scales.ptr(), slot.ptr()) != 0) throw py::error_already_set();
    if (!fields().accumulator.of(slot).is_none()) continue;
    fields().accumulator.set(slot, fields().buffer.of(slot));
    advance();
  }
}

void SumRecords::adopt(const std::vector<PyObject*>& slots, const std::vector<at::Tensor>& gradients,
                       double scale) const {
  const py::dict scales = fields().scales.of(deferred_);
  const py::float_ factor(scale);
  for (size_t i = 0; i < slots.size(); ++i) {
    fields().accumulator.set(slots[i], py::reinterpret_steal<py::object>(THPVariable_Wrap(gradients[i])));
    if (scale != 1 && PyDict_SetItem(scales.ptr(), slots[i], factor.ptr()) != 0)
      throw py::error_already_set();
  }
  if (scale != 1) increment(deferred_, fields().num_changes);
}

bool SumRecords::publish() const {
  const py::list slots = fields().slots.of(grads_);
  for (const py::handle slot : slots) {
    const py::object sum = fields().accumulator.of(slot), param = fields().param.of(slot);
    if (sum.is_none() || !fields().grad_state.of(slot).is(not_ours_)) return false;
    const at::Tensor &parameter = tensor_of(param), &gradient = tensor_of(sum);
    const bool fits = gradient.layout() == at::kStrided && gradient.sizes() == parameter.sizes() &&
                      gradient.device() == parameter.device() &&
                      gradient.scalar_type() == parameter.scalar_type();
    if (!fits || !parameter.is_leaf() || parameter.grad().defined() ||
        parameter.grad_dtype() != gradient.scalar_type()) {
      return false;
    }
  }
  for (const py::handle slot : slots) {
    const py::object sum = fields().accumulator.of(slot);
    const at::Tensor& gradient = tensor_of(sum);
    tensor_of(fields().param.of(slot)).mutable_grad() = gradient;
    fields().accumulator.set(slot, py::none());
    fields().grad_state.set(slot, published_);
    fields().placed.set(slot, py::cast(TensorIdentity(gradient)));
    fields().placed_version.set(slot, py::int_(gradient._version()));
    fields().sparse_bytes.set(slot, py::none());
  }
  fields().num_published.set(grads_, py::int_(slots.size()));
  fields().exposed.set(grads_, py::bool_(true));
  advance();
  return true;
}

void SumRecords::clear() const {
  for (const py::handle slot : py::list(fields().slots.of(grads_))) {
    tensor_of(fields().param.of(slot)).mutable_grad().reset();
    fields().grad_state.set(slot, not_ours_);
    fields().placed.set(slot, py::none());
  }
  fields().num_published.set(grads_, py::int_(0));
  fields().consumed.set(grads_, py::bool_(false));
  fields().exposed.set(grads_, py::bool_(false));
  advance();
}

}  // namespace fusedacc::autograd
