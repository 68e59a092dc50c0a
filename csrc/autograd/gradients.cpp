#include "gradients.h"

#include "../common/dtypes.h"

namespace fusedacc::autograd {

bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kUsual =
      c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::ADInplaceOrView,
                           c10::DispatchKey::AutogradFunctionality}) |
      c10::autocast_dispatch_keyset;
  return (tensor.key_set() - kUsual).highestFunctionalityKey() == c10::DispatchKey::Undefined;
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  if (a.is_contiguous() && b.is_contiguous()) return true;
  return a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

int32_t dtype_number(at::ScalarType dtype) {
#define FUSEDACC_CASE(name, enumerator, Element, Scalar) \
  case at::ScalarType::Scalar:                           \
    return static_cast<int32_t>(Dtype::enumerator);
  switch (dtype) {
    FUSEDACC_DTYPES(FUSEDACC_CASE)
    default:
      return -1;
  }
#undef FUSEDACC_CASE
}

bool are_pair(at::ScalarType gradient, at::ScalarType sum) {
  const int32_t from = dtype_number(gradient), to = dtype_number(sum);
  return find_pair(static_cast<Dtype>(from), static_cast<Dtype>(to)) >= 0;
}

namespace {

// Whether only the tensor refers to its Python wrapper.
template <class Wrapper>
bool is_idle(const Wrapper& wrapper) {
  if constexpr (requires { wrapper.has_unique_reference(); }) {
    return wrapper.has_unique_reference();
  } else {
    return false;  // this torch does not count the wrapper as a reference
  }
}

}  // namespace

bool is_sole(const at::Tensor& gradient) {
  const size_t references = gradient.use_count();
  return references == 1 || (references == 2 && is_idle(*gradient.unsafeGetTensorImpl()->pyobj_slot()));
}

bool is_adoptable(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (!same_layout(gradient, parameter) || !is_plain(gradient) || gradient.requires_grad()) return false;
  if (gradient.is_inference()) return false;  // a sum needs a version counter
  const size_t users = gradient.storage().use_count();
  // A transposed product is a view of a tensor that only the view refers to.
  return gradient.is_view() ? users == 2 && gradient._base().use_count() == 1 : users == 1;
}

}  // namespace fusedacc::autograd
