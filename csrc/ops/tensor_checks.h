// Reads tensors through the stable shims and refuses what would not be memory-safe or not be the sum that was
// asked for. Nothing is modified before all checks of a call have passed. Errors are std::runtime_error.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../common/chunk_plan.h"
#include "../common/dtypes.h"
#include "../common/work.h"
#include "arguments.h"

namespace fusedacc {

// Borrowed: valid while the tensor lives.
struct TensorView {
  void* data;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dims;
  int32_t dtype;  // as the shims number it
  int32_t device_type;
  int32_t device_index;  // -1 on the CPU
};

// Where a tensor stands among the arguments, for error messages; index < 0: not in a list.
struct Place {
  const char* argument;
  int64_t index;

  std::string str() const;
};

TensorView view_of(AtenTensorHandle tensor, Place place);
Dtype dtype_of(const TensorView& view);
std::string device_name(int32_t type, int32_t index);

// What a scalar must be beside: "the accumulators are" on that device.
struct Beside {
  const char* what;
  int32_t device_type, device_index;
};

// Checks a number or a 0-dim tensor and says where to read it: on a GPU by the kernel, so that nothing waits
// for the device. tensor: null for the number.
ScaleArgument scalar_argument(const char* name, AtenTensorHandle tensor, double number, const Beside& beside);

// A checked list of accumulators, packed into 64-bit words so that it can be kept in a tensor:
// a header, five words an accumulator, their sizes and strides, and their memory ranges in ascending order.
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
  struct Range {
    int64_t begin, end, index;
  };

  // Checks the accumulators by themselves (dtypes, one device, no overlap within or between them) and writes
  // their table to `words`.
  static void pack(const TensorList& accumulators, std::vector<int64_t>& words);
  // Throws if the words are not a table.
  AccumulatorTable(const int64_t* words, int64_t count);

  int64_t size() const { return header_.count; }
  bool on_cpu() const { return header_.device_type == aoti_torch_device_type_cpu(); }
  int32_t device_type() const { return static_cast<int32_t>(header_.device_type); }
  int32_t device_index() const { return static_cast<int32_t>(header_.device_index); }
  const Entry& operator[](int64_t i) const { return entries_[i]; }
  const int64_t* sizes(const Entry& entry) const { return words_ + entry.shape; }
  const int64_t* strides(const Entry& entry) const { return words_ + entry.shape + entry.dims; }

  // Checks the gradients against the accumulators and writes what to do to `work`; overwrite: 0, 1 or size()
  // flags.
  void match(const TensorList& gradients, const std::vector<bool>& overwrite, Work& work) const;

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

// Checks tensors that are only read (dtypes, one device) and writes one task for each with elements to
// `work`: the tensor as its own gradient. Without tensors the device is the CPU.
void read_tensors(const TensorList& tensors, Work& work, int32_t& device_type, int32_t& device_index);

}  // namespace fusedacc
