// Recognises a tensor without keeping its memory alive.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>

namespace fusedacc::autograd {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// `torch.utils.swap_tensors` refuses a tensor to which a weak reference refers. So this object shares the
// tensor's version counter instead: while it does, no other tensor has both this counter and this address.
class TensorIdentity {
 public:
  explicit TensorIdentity(const at::Tensor& tensor)
      : address_(tensor.unsafeGetTensorImpl()), version_(version_of(tensor)) {}

  // Whether it is this tensor, also if `tensor.data = other` has given it other memory.
  bool refers_to(const at::Tensor& tensor) const {
    return tensor.unsafeGetTensorImpl() == address_ && is_same(version_of(tensor), version_);
  }

 private:
  static c10::VariableVersion version_of(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.unsafeGetTensorImpl()->version_counter() : c10::VariableVersion();
  }
  // Whether both have the same counter. A VariableVersion is a pointer to it.
  static bool is_same(const c10::VariableVersion& one, const c10::VariableVersion& other) {
    static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
    return std::memcmp(&one, &other, sizeof(void*)) == 0;
  }

  const c10::TensorImpl* address_;
  c10::VariableVersion version_;
};

}  // namespace fusedacc::autograd
