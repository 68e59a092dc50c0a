#include "operation_helpers.h"

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

ScaleArgument scale_argument(const Device& device, const char* name, AtenTensorHandle tensor, double number) {
  if (tensor == nullptr) return {nullptr, number, 0};
  const TensorView view = view_of(tensor, {name, -1});
  const Dtype dtype = dtype_of(view);
  const std::string what = std::string("fusedacc: ") + name;
  if (view.dims != 0) throw std::runtime_error(what + " must be a number or a 0-dim tensor");
  if (dtype == Dtype::kOther) {
    throw std::runtime_error(what +
                             " is a tensor of a dtype that is not float32, bfloat16, float16 or float64");
  }
  if (!device.holds(view)) {
    throw std::runtime_error(what + " is on " + device_name(view.device_type, view.device_index) +
                             " but the accumulators are on " + device.name());
  }
  return {view.data, 0, static_cast<int32_t>(dtype)};
}

}  // namespace fusedacc
