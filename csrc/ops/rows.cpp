// The operator accumulate_rows_: check the arguments, then run on their device.
#include "../cpu/cpu.h"
#include "../cuda/cuda.h"
#include "tensor_checks.h"

namespace fusedacc {
namespace {

// Returns a matrix, whose rows must be contiguous.
TensorView matrix(const OwnedTensor& tensor, const char* argument) {
  const TensorView view = view_of(tensor.get(), argument, 2);
  if (view.sizes[1] > 1 && view.strides[1] != 1) {
    fail(argument,
         "has stride " + std::to_string(view.strides[1]) + " in its second dimension; it must be 1");
  }
  return view;
}

Table read_table(const TensorView& view, const TensorView& gradients, bool stochastically) {
  if (view.sizes[0] > 1 && view.strides[0] < view.sizes[1]) {
    fail("table", "has rows of " + std::to_string(view.sizes[1]) + " elements that are " +
                      std::to_string(view.strides[0]) + " apart: they overlap");
  }
  const int32_t pair =
      rounded_pair("gradients", dtype_of(gradients), "the table", dtype_of(view), stochastically);
  return {view.data, view.strides[0], view.sizes[0], view.sizes[1], pair};
}

RowNumbers read_numbers(const OwnedTensor& tensor, const Beside& table) {
  const TensorView view = view_of(tensor.get(), "indices", 1);
  const bool wide = view.dtype == aoti_torch_dtype_int64();
  if (!wide && view.dtype != aoti_torch_dtype_int32()) fail("indices", "must be int64 or int32");
  check_beside("indices", view, table);
  return {view.data, view.strides[0], view.sizes[0], wide, nullptr};
}

// stack: table, indices, gradients, scale_tensor, scale, padding, by_frequency, seed, streams.
void accumulate_rows_(StableIValue* stack, uint64_t, uint64_t) {
  const OwnedTensor table_tensor(reinterpret_cast<AtenTensorHandle>(stack[0]));
  const OwnedTensor indices(reinterpret_cast<AtenTensorHandle>(stack[1]));
  const OwnedTensor gradients_tensor(reinterpret_cast<AtenTensorHandle>(stack[2]));
  const OwnedTensor scale_tensor(take_optional(stack[3]));
  const NoiseArgument noise(stack + 7);
  const TensorView table = matrix(table_tensor, "table"), gradients = matrix(gradients_tensor, "gradients");
  const Beside beside{"table is", table.device};
  const RowWork work{read_table(table, gradients, noise.rounds()),
                     read_numbers(indices, beside),
                     gradients.data,
                     gradients.strides[0],
                     value_of<int64_t>(stack[5]),
                     value_of<bool>(stack[6]),
                     noise.noise()};
  check_beside("gradients", gradients, beside);
  const int64_t wanted[] = {work.numbers.count, work.table.columns};
  if (gradients.sizes[0] != wanted[0] || gradients.sizes[1] != wanted[1]) {
    fail("gradients",
         "has shape " + shape_name(gradients.sizes, 2) + "; it must be " + shape_name(wanted, 2));
  }
  if (overlap(table, gradients)) fail("gradients", "overlaps the table in memory");
  const double number = value_of<double>(stack[4]);
  const ScaleArgument scale = scalar_argument("scale", scale_tensor.get(), number, beside);
  run_on(
      table.device, [&] { cpu::add_rows(work, read_scale<double>(scale)); },
      [&] { cuda::add_rows(work, indices.get(), scale, table.device.index); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedacc, CompositeExplicitAutograd, m) {
  m.impl("accumulate_rows_", &accumulate_rows_);
}

}  // namespace fusedacc
