#include "arguments.h"

#include <utility>

namespace fusedacc {
namespace {

struct Kept {
  bool keep = false;
  std::vector<std::pair<std::unique_ptr<AtenTensorHandle[]>, size_t>> lists;
};
thread_local Kept kept;

void delete_all(const AtenTensorHandle* handles, size_t size) {
  for (size_t i = 0; i < size; ++i) aoti_torch_delete_tensor_object(handles[i]);
}

}  // namespace

void TensorList::drop(std::unique_ptr<AtenTensorHandle[]> handles, size_t size) {
  if (kept.keep) {
    kept.lists.emplace_back(std::move(handles), size);
  } else {
    delete_all(handles.get(), size);
  }
}

std::string Device::name() const {
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(index);
  if (type == aoti_torch_device_type_meta()) return "meta";
  return "another device";
}

AtenTensorHandle empty(std::initializer_list<int64_t> sizes, int32_t dtype, const Device& device) {
  const int64_t strides[] = {sizes.size() == 2 ? sizes.end()[-1] : 1, 1};
  AtenTensorHandle handle = nullptr;
  FUSEDACC_SHIM(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype,
                                         device.type, device.index < 0 ? 0 : device.index, &handle));
  return handle;
}

void* data_of(const OwnedTensor& tensor) {
  void* data = nullptr;
  FUSEDACC_SHIM(aoti_torch_get_data_ptr(tensor.get(), &data));
  return data;
}

}  // namespace fusedacc

// Recent releases of torch take the GIL whenever the last reference but Python's goes: once per tensor if
// that happens inside an operator, which runs without the GIL, and at half of the cost of a whole call over
// small tensors. A caller that holds the GIL brackets its call with these two and has it happen in the
// second.
extern "C" __attribute__((visibility("default"))) void fusedacc_keep_references() {
  fusedacc::kept.keep = true;
}

extern "C" __attribute__((visibility("default"))) void fusedacc_drop_references() {
  fusedacc::kept.keep = false;
  for (const auto& [handles, size] : fusedacc::kept.lists) fusedacc::delete_all(handles.get(), size);
  fusedacc::kept.lists.clear();
}
