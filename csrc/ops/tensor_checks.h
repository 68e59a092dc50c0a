// An operator's arguments. A boxed function must free the words that it receives. They are owned by the
// classes below, because std::vector<torch::stable::Tensor> allocates several times per tensor. Tensors are
// read through the stable shims, and refused if they would not be memory-safe or do not fit. Nothing is
// modified before all checks have passed. Errors are std::runtime_error.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../common/chunk_plan.h"

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
  // Deletes them, or keeps them until fusedacc_drop_references().
  static void drop(std::unique_ptr<AtenTensorHandle[]> handles, size_t size);

  std::unique_ptr<AtenTensorHandle[]> handles_;
  size_t size_ = 0;
};

// Owns a `Tensor` argument, or nothing for a `Tensor?` that is None.
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

// Reads an operator's arguments, one after the other in the order of its schema. Read each one exactly once,
// and all of them before the first check: a boxed function owns them.
class ArgumentReader {
 public:
  explicit ArgumentReader(const StableIValue* stack) : next_(stack) {}

  AtenTensorHandle tensor() { return reinterpret_cast<AtenTensorHandle>(*next_++); }
  // Null for None.
  AtenTensorHandle optional_tensor() { return take_optional(*next_++); }
  // The word of a `Tensor[]`, for a TensorList.
  StableIValue tensors() { return *next_++; }
  template <typename T>
  T value() {
    return value_of<T>(*next_++);
  }

 private:
  const StableIValue* next_;
};

// `int seed, int[] streams`: random bits for stochastic rounding, one stream per sum; no streams: round to
// nearest.
struct NoiseArgument {
  uint64_t seed;
  std::vector<int64_t> streams;

  explicit NoiseArgument(ArgumentReader& arguments)
      : seed(static_cast<uint64_t>(arguments.value<int64_t>())),
        streams(arguments.value<std::vector<int64_t>>()) {}
};

struct Device {
  int32_t type, index;  // index: -1 on the CPU

  static Device cpu() { return {aoti_torch_device_type_cpu(), -1}; }
  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
  bool operator!=(const Device& other) const { return !(*this == other); }
  std::string name() const;
};

// Runs on_cpu() or on_cuda(), or raises.
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

// Creates a contiguous, uninitialised tensor with at most two dimensions.
AtenTensorHandle empty(std::initializer_list<int64_t> sizes, int32_t dtype, const Device& device);
void* data_of(const OwnedTensor& tensor);

// Valid while the tensor lives.
struct TensorView {
  void* data;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dims;
  int32_t dtype;  // as the shims number it
  Device device;

  // Bytes from the first element to the end of the last; the tensor must not be empty.
  int64_t span(Dtype dtype) const;
};

// A tensor's place among the arguments, for error messages; index < 0: not in a list.
struct Place {
  const char* argument;
  int64_t index;

  Place(const char* argument, int64_t index = -1) : argument(argument), index(index) {}
  std::string str() const;
};

[[noreturn]] void fail(const Place& place, const std::string& problem);

TensorView view_of(AtenTensorHandle tensor, const Place& place);
// The same for a tensor that must have `dims` dimensions.
TensorView view_of(AtenTensorHandle tensor, const Place& place, int64_t dims);
Dtype dtype_of(const TensorView& view);
int32_t code_of(Dtype dtype);  // as the shims number it
std::string shape_name(const int64_t* sizes, int64_t dims);

// The device that a tensor must be on; what: such as "its accumulator is".
struct Beside {
  const char* what;
  Device device;
};
void check_beside(const Place& place, const TensorView& view, const Beside& beside);
void check_on_cpu(const Place& place, const TensorView& view);

// Returns the index in kPairs of a gradient's dtype and `own`, which the error calls `accumulator`.
int32_t checked_pair(const Place& place, Dtype gradient, const char* accumulator, Dtype own);

// Returns whether two matrices, with any strides, overlap.
bool overlap(const TensorView& a, const TensorView& b);

// Checks a number or a 0-dim tensor and returns where to read it. On a GPU the kernel reads it, so that
// nothing waits for the device. tensor: null for the number.
ScaleArgument scalar_argument(const char* name, AtenTensorHandle tensor, double number, const Beside& beside);

// `Tensor? name_tensor, float name`: a factor; the number counts if there is no tensor.
class FactorArgument {
 public:
  explicit FactorArgument(ArgumentReader& arguments)
      : tensor_(arguments.optional_tensor()), number_(arguments.value<double>()) {}

  // Checks it and returns where to read it, while this object lives.
  ScaleArgument checked(const char* name, const Beside& beside) const {
    return scalar_argument(name, tensor_.get(), number_, beside);
  }

 private:
  const OwnedTensor tensor_;
  const double number_;
};

// A checked list of accumulators, packed into 64-bit words so that a tensor can hold it: a header, five words
// per accumulator, their sizes and strides, and their memory ranges in ascending order.
class AccumulatorTable {
 public:
  struct Entry {
    int64_t data;
    int64_t numel;
    int64_t dims;
    int64_t dtype_and_density;
    int64_t shape;  // the word at which its sizes start; its strides follow

    Dtype dtype() const { return static_cast<Dtype>(dtype_and_density & 0xff); }
    bool dense() const { return dtype_and_density >> 8; }
  };
  // Checks the accumulators (dtypes, one device, no overlap within or between them) and writes their table to
  // `words`.
  static void pack(const TensorList& accumulators, std::vector<int64_t>& words);
  // Throws if the words are not a table.
  AccumulatorTable(const int64_t* words, int64_t count);

  int64_t size() const { return header_.count; }
  Device device() const {
    return {static_cast<int32_t>(header_.device_type), static_cast<int32_t>(header_.device_index)};
  }
  const int64_t* sizes(const Entry& entry) const { return words_ + entry.shape; }
  const int64_t* strides(const Entry& entry) const { return words_ + entry.shape + entry.dims; }

  // Checks the gradients against the accumulators and writes the tasks to `work`. overwrite: 0, 1 or size()
  // flags. streams: none, or one per accumulator for stochastic rounding.
  void match(const TensorList& gradients, const std::vector<bool>& overwrite,
             const std::vector<int64_t>& streams, Work& work) const;

 private:
  struct Header {
    int64_t magic, word_count, count, device_type, device_index, range_count, first_range;
  };

  void check_overlap(const TensorView& gradient, int64_t size, int64_t index, int64_t& hint) const;

  const int64_t* words_;
  Header header_;
  const Entry* entries_;
  const Range* ranges_;
};

// Checks tensors that are only read (dtypes, one device) and writes one task per tensor with elements to
// `work`: the tensor as its own gradient. Returns the device, the CPU without tensors.
Device read_tensors(const TensorList& tensors, Work& work);

}  // namespace fusedacc
