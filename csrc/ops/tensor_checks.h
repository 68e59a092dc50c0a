// Reads tensors through the stable shims and refuses what would not be memory-safe or not what was asked for.
// Nothing is modified before all checks of a call have passed. Errors are std::runtime_error.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../common/chunk_plan.h"
#include "arguments.h"

namespace fusedacc {

// Borrowed: valid while the tensor lives.
struct TensorView {
  void* data;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dims;
  int32_t dtype;  // as the shims number it
  Device device;

  // The bytes from the first element to the end of the last, where there are any.
  int64_t span(Dtype dtype) const;
};

// Where a tensor stands among the arguments, for error messages; index < 0: not in a list.
struct Place {
  const char* argument;
  int64_t index;

  Place(const char* argument, int64_t index = -1) : argument(argument), index(index) {}
  std::string str() const;
};

[[noreturn]] void fail(const Place& place, const std::string& problem);

TensorView view_of(AtenTensorHandle tensor, const Place& place);
// The same of a tensor that must have so many dimensions.
TensorView view_of(AtenTensorHandle tensor, const Place& place, int64_t dims);
Dtype dtype_of(const TensorView& view);
int32_t code_of(Dtype dtype);  // as the shims number it
std::string shape_name(const int64_t* sizes, int64_t dims);

// What a tensor must be beside: "its accumulator is" on that device.
struct Beside {
  const char* what;
  Device device;
};
void check_beside(const Place& place, const TensorView& view, const Beside& beside);

// The index in kPairs of a gradient's dtype and that of `accumulator`, as it is called in the error.
int32_t checked_pair(const Place& place, Dtype gradient, const char* accumulator, Dtype own);

// The same, of the pair that rounds stochastically if that is asked for.
int32_t rounded_pair(const Place& place, Dtype gradient, const char* accumulator, Dtype own,
                     bool stochastically);

// Of matrices with any strides.
bool overlap(const TensorView& a, const TensorView& b);

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
  // Checks the accumulators by themselves (dtypes, one device, no overlap within or between them) and writes
  // their table to `words`.
  static void pack(const TensorList& accumulators, std::vector<int64_t>& words);
  // Throws if the words are not a table.
  AccumulatorTable(const int64_t* words, int64_t count);

  int64_t size() const { return header_.count; }
  Device device() const {
    return {static_cast<int32_t>(header_.device_type), static_cast<int32_t>(header_.device_index)};
  }
  const int64_t* sizes(const Entry& entry) const { return words_ + entry.shape; }
  const int64_t* strides(const Entry& entry) const { return words_ + entry.shape + entry.dims; }

  // Checks the gradients against the accumulators and writes what to do to `work`; overwrite: 0, 1 or size()
  // flags; streams: none, or one for each accumulator, which is rounded stochastically.
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

// Checks tensors that are only read (dtypes, one device) and writes one task for each with elements to
// `work`: the tensor as its own gradient. Returns the device: without tensors the CPU.
Device read_tensors(const TensorList& tensors, Work& work);

}  // namespace fusedacc
