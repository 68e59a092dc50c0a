// The operators that allocate, resize or share the device's memory, and operators that only CUDA has.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "fallback.h"
#include "memory.h"
#include "order.h"
#include "torch_device.h"

namespace emulation {
namespace {

using at::Tensor;

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), kKeys, dtype.value_or(at::kFloat), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys,
                                           dtype.value_or(at::kFloat));
}

Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size),
                                                    C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const int64_t elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, c10::SymInt(elements), c10::SymInt(1));
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

void record_stream(Tensor& self, at::Stream stream) { record_use(self.storage().data(), stream.id()); }

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  const size_t kept = std::min(bytes, storage.nbytes());
  c10::DataPtr data = device_allocator()->allocate(bytes);
  if (kept > 0) std::memcpy(data.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (bytes > self.storage().nbytes()) resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
  return self;
}

// Products of 16-bit operands with a float32 result. The CPU has no kernel for them.
Tensor& mm_wide(const Tensor& a, const Tensor& b, at::ScalarType, Tensor& out) {
  return out.copy_(at::mm(a.to(at::kFloat), b.to(at::kFloat)));
}
Tensor& addmm_wide(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType,
                   const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  return out.copy_(at::addmm(self.to(at::kFloat), a.to(at::kFloat), b.to(at::kFloat), beta, alpha));
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("record_stream", record_stream);
  library.impl("resize_", resize);
  library.impl("mm.dtype_out", mm_wide);
  library.impl("addmm.dtype_out", addmm_wide);
  // The composite copy_ would copy through the device of its target.
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace
}  // namespace emulation

// Implements UntypedStorage.resize_(). storage: its StorageImpl.
extern "C" __attribute__((visibility("default"))) void emu_resize_storage(void* storage, size_t bytes) {
  emulation::resize_storage(*static_cast<c10::StorageImpl*>(storage), bytes);
}
