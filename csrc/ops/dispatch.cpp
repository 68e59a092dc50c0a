#include "dispatch.h"

#include <limits>

namespace fusedacc {

AtenTensorHandle empty(int64_t dims, int64_t size, int32_t dtype, const Device& device) {
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  FUSEDACC_SHIM(aoti_torch_empty_strided(dims, &size, &stride, dtype, device.type,
                                         device.index < 0 ? 0 : device.index, &handle));
  return handle;
}

void* data_of(const OwnedTensor& tensor) {
  void* data = nullptr;
  FUSEDACC_SHIM(aoti_torch_get_data_ptr(tensor.get(), &data));
  return data;
}

NormKind norm_kind(StableIValue norm_type) {
  const double value = number(norm_type);
  if (value == 2) return NormKind::kTwo;
  if (value == std::numeric_limits<double>::infinity()) return NormKind::kInfinity;
  throw std::runtime_error("fusedacc: norm_type is " + std::to_string(value) + "; allowed: 2 and inf");
}

}  // namespace fusedacc
