// Ownership of an operator's arguments: a boxed function receives them as words it must free. Written by hand
// because std::vector<torch::stable::Tensor> allocates several times per tensor. And devices, and new tensors
// on them.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/random.h"

namespace fusedacc {

inline void check_shim(AOTITorchError code, const char* call) {
  if (code != 0) throw std::runtime_error(std::string("fusedacc: ") + call + " failed");
}
#define FUSEDACC_SHIM(call) ::fusedacc::check_shim((call), #call)

// Owns the tensors of a `Tensor[]` argument.
class TensorList {
 public:
  explicit TensorList(StableIValue argument) {
    const auto list = reinterpret_cast<StableListHandle>(argument);
    size_t size = 0;
    torch_list_size(list, &size);
    handles_ = std::make_unique<AtenTensorHandle[]>(size);
    StableIValue element;
    while (size_ < size && torch_list_get_item(list, size_, &element) == 0) {
      handles_[size_++] = reinterpret_cast<AtenTensorHandle>(element);
    }
    torch_delete_list(list);
  }
  ~TensorList() { drop(std::move(handles_), size_); }
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;

  int64_t size() const { return static_cast<int64_t>(size_); }
  AtenTensorHandle operator[](int64_t i) const { return handles_[i]; }

 private:
  // Deletes them, or puts them by until fusedacc_drop_references().
  static void drop(std::unique_ptr<AtenTensorHandle[]> handles, size_t size);

  std::unique_ptr<AtenTensorHandle[]> handles_;
  size_t size_ = 0;
};

// Owns a `Tensor` argument, or none for a `Tensor?` that is None.
class OwnedTensor {
 public:
  explicit OwnedTensor(AtenTensorHandle handle) : handle_(handle) {}
  ~OwnedTensor() { reset(nullptr); }
  OwnedTensor(const OwnedTensor&) = delete;
  OwnedTensor& operator=(const OwnedTensor&) = delete;

  AtenTensorHandle get() const { return handle_; }
  void reset(AtenTensorHandle handle) {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
    handle_ = handle;
  }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_;
};

// An optional argument is null or points to a word on the heap.
inline AtenTensorHandle take_optional(StableIValue argument) {
  const auto inner = torch::stable::detail::to<std::optional<AtenTensorHandle>>(argument);
  return inner.value_or(nullptr);
}

template <typename T>
T value_of(StableIValue argument) {
  return torch::stable::detail::to<T>(argument);
}

// `int seed, int[] streams`: of which random bits sums are rounded by, one stream each; none: to nearest.
struct NoiseArgument {
  uint64_t seed;
  std::vector<int64_t> streams;

  explicit NoiseArgument(const StableIValue* stack)
      : seed(static_cast<uint64_t>(value_of<int64_t>(stack[0]))),
        streams(value_of<std::vector<int64_t>>(stack[1])) {}

  // Of an operator with one sum.
  bool rounds() const { return !streams.empty(); }
  Noise noise() const {
    if (streams.size() > 1) throw std::runtime_error("fusedacc: streams has more than one value for one sum");
    return rounds() ? Noise{seed, static_cast<uint64_t>(streams[0])} : Noise{};
  }
};

struct Device {
  int32_t type, index;  // index: -1 on the CPU

  static Device cpu() { return {aoti_torch_device_type_cpu(), -1}; }
  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
  bool operator!=(const Device& other) const { return !(*this == other); }
  std::string name() const;
};

// Runs on_cpu() or on_cuda(), or says why neither.
template <typename OnCpu, typename OnCuda>
void run_on(const Device& device, OnCpu&& on_cpu, OnCuda&& on_cuda) {
  if (device.type == aoti_torch_device_type_cpu()) {
    on_cpu();
  } else if (device.type == aoti_torch_device_type_cuda()) {
    on_cuda();
  } else {
    throw std::runtime_error("fusedacc: tensors are on " + device.name() +
                             "; only cpu and cuda are supported");
  }
}

// Contiguous and uninitialised, of up to two dimensions.
AtenTensorHandle empty(std::initializer_list<int64_t> sizes, int32_t dtype, const Device& device);
void* data_of(const OwnedTensor& tensor);

}  // namespace fusedacc
