// Recognises a tensor without keeping its memory alive.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fusedacc::autograd {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// `torch.utils.swap_tensors` refuses a tensor to which a weak reference refers. So this object refers weakly
// to the tensor's storage instead: while it does, no other storage has the same address. A sparse tensor has
// no storage, and gets a weak reference.
class TensorIdentity {
 public:
  explicit TensorIdentity(const at::Tensor& tensor) : address_(tensor.unsafeGetTensorImpl()) {
    if (!tensor.defined()) return;
    if (tensor.has_storage()) {
      storage_ = tensor.storage().getWeakStorageImpl();
    } else {
      tensor_ = WeakTensor(tensor.getIntrusivePtr());
    }
  }

  // Whether it is this tensor, with the memory that it had.
  bool refers_to(const at::Tensor& tensor) const {
    if (!has_address_of(tensor)) return false;
    return !storage_.has_value() || tensor.storage().unsafeGetStorageImpl() == storage_->_unsafe_get_target();
  }
  // Whether it is this tensor, possibly with other memory, or one made after this tensor was freed.
  bool has_address_of(const at::Tensor& tensor) const { return tensor.unsafeGetTensorImpl() == address_; }
  // Whether the memory of the tensor is still used.
  bool is_alive() const { return storage_.has_value() ? !storage_->expired() : !tensor_->expired(); }

 private:
  const c10::TensorImpl* address_;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage_;
  std::optional<WeakTensor> tensor_;
};

}  // namespace fusedacc::autograd
