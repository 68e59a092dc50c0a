#include "ops.h"

#include "../cpu/cpu.h"
#include "dispatch.h"
#ifdef FUSEDACC_CUDA
#include "../cuda/rows.h"
#endif

namespace fusedacc {

#ifndef FUSEDACC_CUDA
namespace cuda {
void add_rows(RowWork, AtenTensorHandle, const ScaleArgument&, int32_t) { refuse_cuda(); }
}  // namespace cuda
#endif

namespace {

[[noreturn]] void fail(const char* argument, const std::string& problem) {
  throw std::runtime_error("fusedacc: " + std::string(argument) + " " + problem);
}

// A matrix whose rows have their elements side by side.
TensorView matrix(AtenTensorHandle tensor, const char* argument) {
  const TensorView view = view_of(tensor, {argument, -1});
  if (view.dims != 2) fail(argument, "has " + std::to_string(view.dims) + " dimensions; it must have 2");
  if (view.sizes[1] > 1 && view.strides[1] != 1) {
    fail(argument,
         "has stride " + std::to_string(view.strides[1]) + " in its second dimension; it must be 1");
  }
  return view;
}

bool is_empty(const TensorView& view) { return view.sizes[0] == 0 || view.sizes[1] == 0; }

Table read_table(const TensorView& view, const TensorView& gradients) {
  if (view.sizes[0] > 1 && view.strides[0] < view.sizes[1]) {
    fail("table", "has rows of " + std::to_string(view.sizes[1]) + " elements that are " +
                      std::to_string(view.strides[0]) + " apart: they overlap");
  }
  const Dtype fresh = dtype_of(gradients), own = dtype_of(view);
  const int32_t pair = find_pair(fresh, own);
  if (pair < 0) {
    fail("gradients", std::string("has ") + dtype_name(fresh) + " and the table " + dtype_name(own) +
                          "; allowed: " + kAllowedPairs);
  }
  return {view.data, view.strides[0], view.sizes[0], view.sizes[1], pair};
}

RowNumbers read_numbers(AtenTensorHandle tensor, const Device& device) {
  const TensorView view = view_of(tensor, {"indices", -1});
  const bool wide = view.dtype == aoti_torch_dtype_int64();
  if (!wide && view.dtype != aoti_torch_dtype_int32()) fail("indices", "must be int64 or int32");
  if (view.dims != 1) {
    fail("indices", "has " + std::to_string(view.dims) + " dimensions; it must have 1");
  }
  if (!device.holds(view)) fail("indices", "is not on " + device.name() + ", where the table is");
  return {view.data, view.strides[0], view.sizes[0], wide, nullptr};
}

// The bytes from a matrix's first element to the end of its last.
int64_t span(const TensorView& view) {
  const int64_t last = (view.sizes[0] - 1) * view.strides[0] + view.sizes[1] - 1;
  return (last + 1) * element_size(dtype_of(view));
}

bool overlap(const TensorView& a, const TensorView& b) {
  if (is_empty(a) || is_empty(b)) return false;
  const auto *first = static_cast<const char*>(a.data), *second = static_cast<const char*>(b.data);
  return first < second + span(b) && second < first + span(a);
}

}  // namespace

// stack: table, indices, gradients, scale_tensor, scale, padding, by_frequency.
void accumulate_rows_(StableIValue* stack, uint64_t, uint64_t) {
  const OwnedTensor table(reinterpret_cast<AtenTensorHandle>(stack[0]));
  const OwnedTensor indices(reinterpret_cast<AtenTensorHandle>(stack[1]));
  const OwnedTensor gradients(reinterpret_cast<AtenTensorHandle>(stack[2]));
  const OwnedTensor scale_tensor(take_optional(stack[3]));
  const TensorView sums = matrix(table.get(), "table"), fresh = matrix(gradients.get(), "gradients");
  const Device device{sums.device_type, sums.device_index};
  RowWork work{read_table(sums, fresh),
               read_numbers(indices.get(), device),
               fresh.data,
               fresh.strides[0],
               torch::stable::detail::to<int64_t>(stack[5]),
               torch::stable::detail::to<bool>(stack[6])};
  if (!device.holds(fresh)) fail("gradients", "is not on " + device.name() + ", where the table is");
  if (fresh.sizes[0] != work.numbers.count || fresh.sizes[1] != work.table.columns) {
    fail("gradients", "has shape [" + std::to_string(fresh.sizes[0]) + ", " + std::to_string(fresh.sizes[1]) +
                          "]; it must be [" + std::to_string(work.numbers.count) + ", " +
                          std::to_string(work.table.columns) + "]");
  }
  if (overlap(sums, fresh)) fail("gradients", "overlaps the table in memory");
  const ScaleArgument scale =
      scalar_argument("scale", scale_tensor.get(), number(stack[4]), {"table is", device.type, device.index});
  run_on(
      device, [&] { cpu::add_rows(work, read_scale<double>(scale)); },
      [&] { cuda::add_rows(work, indices.get(), scale, device.index); });
}

}  // namespace fusedacc
