// The operators on lists of tensors, and on rows of a table on a CPU: check the arguments, then run on their
// device.
//
// What all of them keep to:
// - An operator reads its arguments by an ArgumentReader, in the order of its schema in registration.cpp, and
//   owns them until it returns. Results replace the first words of the stack.
// - Nothing is modified before all checks have passed. A failed check throws.
// - A Work points into tensors. Both are valid until the operator returns: a GPU's kernels get their
//   addresses as arguments, and torch frees memory in the order of the stream.
// - Empty lists are allowed. They have no device, so nothing is launched.
#include <cstring>
#include <sstream>

#include "../cpu/cpu.h"
#include "../cuda/cuda.h"
#include "tensor_checks.h"

namespace fusedacc {
namespace {

NormKind norm_kind(double norm_type) {
  NormKind kind;
  if (find_norm_kind(norm_type, kind)) return kind;
  std::ostringstream message;
  message << "fusedacc: norm_type is " << norm_type << "; allowed:";
  for (const double allowed : kNormTypes) message << (allowed == kNormTypes[0] ? " " : " and ") << allowed;
  throw std::runtime_error(message.str());
}

// The arguments of an addition that follow the accumulators or the plan. The members are in the order of the
// schemas, which is the order in which they are read.
struct AddArguments {
  const TensorList gradients;
  const FactorArgument scale;
  const std::vector<bool> overwrite;
  const FactorArgument beta;
  const NoiseArgument noise;

  explicit AddArguments(ArgumentReader& arguments)
      : gradients(arguments.tensors()),
        scale(arguments),
        overwrite(arguments.value<std::vector<bool>>()),
        beta(arguments),
        noise(arguments) {}
};

// Adds to the accumulators of a table.
void accumulate(const AccumulatorTable& table, const AddArguments& arguments) {
  const NoiseArgument& noise = arguments.noise;
  // Kept between calls: freeing blocks of this size makes malloc consolidate all small ones.
  static thread_local Work work;
  table.match(arguments.gradients, arguments.overwrite, noise.streams, work);
  if (table.size() == 0) return;
  const Device device = table.device();
  const Beside beside{"the accumulators are", device};
  const Factors factors{arguments.scale.checked("scale", beside), arguments.beta.checked("beta", beside)};
  run_on(
      device, [&] { cpu::run(work, read_factors<double>(factors, noise.seed)); },
      [&] { cuda::run(work, factors, noise.seed, device.index); });
}

void accumulate_fresh(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const TensorList accumulators(reader.tensors());
  const AddArguments arguments(reader);
  static thread_local std::vector<int64_t> words;
  AccumulatorTable::pack(accumulators, words);
  accumulate(AccumulatorTable(words.data(), static_cast<int64_t>(words.size())), arguments);
}

void accumulate_planned(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const OwnedTensor plan(reader.tensor());
  const AddArguments arguments(reader);
  const TensorView view = view_of(plan.get(), "plan");
  if (view.device != Device::cpu() || view.dtype != aoti_torch_dtype_int64() || view.dims != 1 ||
      view.strides[0] != 1) {
    throw std::runtime_error("fusedacc: plan was not made by fusedacc::prepare");
  }
  accumulate(AccumulatorTable(static_cast<const int64_t*>(view.data), view.sizes[0]), arguments);
}

void prepare(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader arguments(stack);
  const TensorList accumulators(arguments.tensors());
  std::vector<int64_t> words;
  AccumulatorTable::pack(accumulators, words);
  OwnedTensor plan(empty({static_cast<int64_t>(words.size())}, aoti_torch_dtype_int64(), Device::cpu()));
  std::memcpy(data_of(plan), words.data(), words.size() * sizeof(int64_t));
  stack[0] = torch::stable::detail::from(plan.release());
}

void norm_partials(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader arguments(stack);
  const TensorList tensors(arguments.tensors());
  const NormKind kind = norm_kind(arguments.value<double>());
  static thread_local Work work;
  const Device device = read_tensors(tensors, work);
  OwnedTensor partials(empty({work.chunks}, aoti_torch_dtype_float64(), device));
  const NormRequest norm{kind, static_cast<double*>(data_of(partials))};
  run_on(device, [&] { cpu::run_norm(work, norm); }, [&] { cuda::run_norm(work, norm, device.index); });
  stack[0] = torch::stable::detail::from(partials.release());
}

void finish_norm(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader arguments(stack);
  const TensorList tensors(arguments.tensors());
  FinishRequest finish{};
  finish.kind = norm_kind(arguments.value<double>());
  finish.wide = arguments.value<bool>();
  Device device = Device::cpu();
  for (int64_t i = 0; i < tensors.size(); ++i) {
    const Place place{"partials", i};
    const TensorView view = view_of(tensors[i], place);
    if (i == 0) device = view.device;
    if (view.dtype != aoti_torch_dtype_float64() || view.dims != 1 ||
        (view.sizes[0] > 1 && view.strides[0] != 1) || view.device != device) {
      fail(place, "is no contiguous float64 vector on the device of partials[0]");
    }
    finish.partials.push_back({static_cast<const double*>(view.data), view.sizes[0]});
  }
  OwnedTensor norm(empty({}, code_of(finish.wide ? Dtype::kFloat64 : Dtype::kFloat32), device));
  OwnedTensor nonfinite(empty({}, aoti_torch_dtype_float32(), device));
  finish.norm = data_of(norm);
  finish.nonfinite = static_cast<float*>(data_of(nonfinite));
  run_on(device, [&] { cpu::finish_norm(finish); }, [&] { cuda::finish_norm(finish, device.index); });
  stack[0] = torch::stable::detail::from(norm.release());
  stack[1] = torch::stable::detail::from(nonfinite.release());
}

void build_info(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = torch::stable::detail::from(std::string(R"({"torch": ")") + FUSEDACC_TORCH_VERSION + "\", " +
                                         cuda::build_info() + R"(, "cpu_capability": ")" + cpu::loops().name +
                                         "\"}");
}

// Returns a matrix, whose rows must be contiguous.
TensorView matrix(const OwnedTensor& tensor, const char* argument) {
  const TensorView view = view_of(tensor.get(), argument, 2);
  if (view.sizes[0] > 0 && view.sizes[1] > 1 && view.strides[1] != 1) {
    fail(argument,
         "has stride " + std::to_string(view.strides[1]) + " in its second dimension; it must be 1");
  }
  return view;
}

Table read_table(const TensorView& view, const TensorView& gradients) {
  if (view.sizes[0] > 1 && view.strides[0] < view.sizes[1]) {
    fail("table", "has rows of " + std::to_string(view.sizes[1]) + " elements that are " +
                      std::to_string(view.strides[0]) + " apart: they overlap");
  }
  const int32_t pair = checked_pair("gradients", dtype_of(gradients), "the table", dtype_of(view));
  return {view.data, view.strides[0], view.sizes[0], view.sizes[1], pair};
}

RowNumbers read_numbers(const OwnedTensor& tensor, const Beside& table) {
  const TensorView view = view_of(tensor.get(), "indices", 1);
  const bool wide = view.dtype == aoti_torch_dtype_int64();
  if (!wide && view.dtype != aoti_torch_dtype_int32()) fail("indices", "must be int64 or int32");
  check_beside("indices", view, table);
  return {view.data, view.strides[0], view.sizes[0], wide};
}

void accumulate_rows_(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader arguments(stack);
  const OwnedTensor table_tensor(arguments.tensor());
  const OwnedTensor indices(arguments.tensor());
  const OwnedTensor gradients_tensor(arguments.tensor());
  const FactorArgument scale(arguments);
  const auto padding = arguments.value<int64_t>();
  const auto by_frequency = arguments.value<bool>();
  const TensorView table = matrix(table_tensor, "table");
  const TensorView gradients = matrix(gradients_tensor, "gradients");
  check_on_cpu("table", table);
  const Beside beside{"table is", table.device};
  RowWork work{};
  work.table = read_table(table, gradients);
  work.numbers = read_numbers(indices, beside);
  work.gradients = gradients.data;
  work.gradient_stride = gradients.strides[0];
  work.padding = padding;
  work.by_frequency = by_frequency;
  check_beside("gradients", gradients, beside);
  const int64_t wanted[] = {work.numbers.count, work.table.columns};
  if (gradients.sizes[0] != wanted[0] || gradients.sizes[1] != wanted[1]) {
    fail("gradients",
         "has shape " + shape_name(gradients.sizes, 2) + "; it must be " + shape_name(wanted, 2));
  }
  if (overlap(table, gradients)) fail("gradients", "overlaps the table in memory");
  cpu::add_rows(work, read_scale<double>(scale.checked("scale", beside)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedacc, CompositeExplicitAutograd, m) {
  m.impl("scale_accumulate_", &accumulate_fresh);
  m.impl("prepare", &prepare);
  m.impl("accumulate_prepared_", &accumulate_planned);
  m.impl("norm_partials", &norm_partials);
  m.impl("finish_norm", &finish_norm);
  m.impl("build_info", &build_info);
  m.impl("accumulate_rows_", &accumulate_rows_);
}

}  // namespace fusedacc
