// The operators on lists of tensors: check the arguments, then run on their device.
#include <cstring>

#include "../cpu/cpu.h"
#include "../cuda/cuda.h"
#include "tensor_checks.h"

namespace fusedacc {
namespace {

NormKind norm_kind(StableIValue norm_type) {
  const double value = value_of<double>(norm_type);
  NormKind kind;
  if (find_norm_kind(value, kind)) return kind;
  throw std::runtime_error("fusedacc: norm_type is " + std::to_string(value) + "; allowed: 2 and inf");
}

StableIValue run_norm(const Work& work, const Factors& factors, uint64_t seed, NormKind kind, bool reads,
                      const Device& device) {
  OwnedTensor partials(empty({work.chunks}, aoti_torch_dtype_float64(), device));
  const NormRequest norm{kind, static_cast<double*>(data_of(partials)), reads};
  run_on(
      device, [&] { cpu::run_norm(work, read_factors<double>(factors, seed), norm); },
      [&] { cuda::run_norm(work, factors, seed, norm, device.index); });
  return torch::stable::detail::from(partials.release());
}

// stack: ..., gradients, scale_tensor, scale, overwrite, norm_type (if wants_norm), keep_tensor, keep, seed,
// streams.
void accumulate(const AccumulatorTable& table, StableIValue* stack, bool wants_norm) {
  const TensorList gradients(stack[1]);
  const OwnedTensor scale_tensor(take_optional(stack[2]));
  const auto overwrite = value_of<std::vector<bool>>(stack[4]);
  const StableIValue* beta = stack + (wants_norm ? 6 : 5);
  const OwnedTensor beta_tensor(take_optional(beta[0]));
  const NoiseArgument noise(beta + 2);
  const NormKind kind = wants_norm ? norm_kind(stack[5]) : NormKind::kTwo;
  // Kept between calls: freeing blocks of this size makes malloc consolidate all small ones.
  static thread_local Work work;
  table.match(gradients, overwrite, noise.streams, work);
  const Device device = table.device();
  const auto factor = [&](const char* name, const OwnedTensor& tensor, StableIValue value) {
    if (table.size() == 0) return ScaleArgument{};
    return scalar_argument(name, tensor.get(), value_of<double>(value), {"the accumulators are", device});
  };
  const Factors factors{factor("scale", scale_tensor, stack[3]), factor("keep", beta_tensor, beta[1])};
  if (wants_norm) {
    stack[0] = run_norm(work, factors, noise.seed, kind, false, device);
  } else if (table.size() > 0) {
    run_on(
        device, [&] { cpu::run(work, read_factors<double>(factors, noise.seed)); },
        [&] { cuda::run(work, factors, noise.seed, device.index); });
  }
}

template <bool wants_norm>
void accumulate_fresh(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList accumulators(stack[0]);
  static thread_local std::vector<int64_t> words;
  AccumulatorTable::pack(accumulators, words);
  accumulate(AccumulatorTable(words.data(), static_cast<int64_t>(words.size())), stack, wants_norm);
}

template <bool wants_norm>
void accumulate_planned(StableIValue* stack, uint64_t, uint64_t) {
  const OwnedTensor plan(reinterpret_cast<AtenTensorHandle>(stack[0]));
  const TensorView view = view_of(plan.get(), "plan");
  if (view.device != Device::cpu() || view.dtype != aoti_torch_dtype_int64() || view.dims != 1 ||
      view.strides[0] != 1) {
    throw std::runtime_error("fusedacc: plan was not made by fusedacc::prepare");
  }
  accumulate(AccumulatorTable(static_cast<const int64_t*>(view.data), view.sizes[0]), stack, wants_norm);
}

void prepare(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList accumulators(stack[0]);
  std::vector<int64_t> words;
  AccumulatorTable::pack(accumulators, words);
  OwnedTensor plan(empty({static_cast<int64_t>(words.size())}, aoti_torch_dtype_int64(), Device::cpu()));
  std::memcpy(data_of(plan), words.data(), words.size() * sizeof(int64_t));
  stack[0] = torch::stable::detail::from(plan.release());
}

void norm_partials(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors(stack[0]);
  const NormKind kind = norm_kind(stack[1]);
  static thread_local Work work;
  const Device device = read_tensors(tensors, work);
  stack[0] = run_norm(work, {}, 0, kind, true, device);
}

void finish_norm(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors(stack[0]);
  FinishRequest finish{norm_kind(stack[1]), {}, nullptr, nullptr, value_of<bool>(stack[2])};
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
  OwnedTensor found(empty({}, aoti_torch_dtype_float32(), device));
  finish.norm = data_of(norm);
  finish.found = static_cast<float*>(data_of(found));
  run_on(device, [&] { cpu::finish_norm(finish); }, [&] { cuda::finish_norm(finish, device.index); });
  stack[0] = torch::stable::detail::from(norm.release());
  stack[1] = torch::stable::detail::from(found.release());
}

void build_info(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = torch::stable::detail::from(std::string(R"({"torch": ")") + FUSEDACC_TORCH_VERSION + "\", " +
                                         cuda::build_info() + R"(, "cpu_capability": ")" + cpu::loops().name +
                                         "\"}");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedacc, CompositeExplicitAutograd, m) {
  m.impl("scale_accumulate_", &accumulate_fresh<false>);
  m.impl("prepare", &prepare);
  m.impl("accumulate_prepared_", &accumulate_planned<false>);
  m.impl("scale_accumulate_norm_", &accumulate_fresh<true>);
  m.impl("accumulate_prepared_norm_", &accumulate_planned<true>);
  m.impl("norm_partials", &norm_partials);
  m.impl("finish_norm", &finish_norm);
  m.impl("build_info", &build_info);
}

}  // namespace fusedacc
