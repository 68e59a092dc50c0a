#include "ops.h"

#include <cstring>

#include "../cpu/cpu.h"
#include "dispatch.h"
#ifdef FUSEDACC_CUDA
#include "../cuda/cuda.h"
#endif

namespace fusedacc {

#ifndef FUSEDACC_CUDA
namespace cuda {
void run(const Work&, const Factors&, int32_t) { refuse_cuda(); }
void run_norm(const Work&, const Factors&, const NormRequest&, int32_t) { refuse_cuda(); }
void finish_norm(const FinishRequest&, int32_t) { refuse_cuda(); }
}  // namespace cuda
#endif

namespace {

StableIValue run_norm(const Work& work, const Factors& factors, NormKind kind, bool reads,
                      const Device& device) {
  OwnedTensor partials(empty(1, work.chunks, aoti_torch_dtype_float64(), device));
  const NormRequest norm{kind, static_cast<double*>(data_of(partials)), reads};
  run_on(
      device, [&] { cpu::run_norm(work, read_factors<double>(factors), norm); },
      [&] { cuda::run_norm(work, factors, norm, device.index); });
  return torch::stable::detail::from(partials.release());
}

// stack: ..., gradients, scale_tensor, scale, overwrite, where the norm is wanted norm_type, keep_tensor,
// keep.
void accumulate(const AccumulatorTable& table, StableIValue* stack, bool wants_norm) {
  const TensorList gradients(stack[1]);
  const OwnedTensor scale_tensor(take_optional(stack[2]));
  const std::vector<bool> overwrite = take_flags(stack[4]);
  const StableIValue* keep = stack + (wants_norm ? 6 : 5);
  const OwnedTensor keep_tensor(take_optional(keep[0]));
  const NormKind kind = wants_norm ? norm_kind(stack[5]) : NormKind::kTwo;
  // Kept from call to call: freeing blocks of this size makes malloc tidy up all the small ones.
  static thread_local Work work;
  table.match(gradients, overwrite, work);
  const Device device{table.device_type(), table.device_index()};
  const auto factor = [&](const char* name, const OwnedTensor& tensor, StableIValue value) {
    if (table.size() == 0) return ScaleArgument{};
    return scalar_argument(name, tensor.get(), number(value),
                           {"the accumulators are", device.type, device.index});
  };
  const Factors factors{factor("scale", scale_tensor, stack[3]), factor("keep", keep_tensor, keep[1])};
  if (wants_norm) {
    stack[0] = run_norm(work, factors, kind, false, device);
  } else if (table.size() > 0) {
    run_on(
        device, [&] { cpu::run(work, read_factors<double>(factors)); },
        [&] { cuda::run(work, factors, device.index); });
  }
}

void accumulate_fresh(StableIValue* stack, bool wants_norm) {
  const TensorList accumulators(stack[0]);
  static thread_local std::vector<int64_t> words;
  AccumulatorTable::pack(accumulators, words);
  accumulate(AccumulatorTable(words.data(), static_cast<int64_t>(words.size())), stack, wants_norm);
}

void accumulate_planned(StableIValue* stack, bool wants_norm) {
  const OwnedTensor plan(reinterpret_cast<AtenTensorHandle>(stack[0]));
  const TensorView view = view_of(plan.get(), {"plan", -1});
  if (view.device_type != aoti_torch_device_type_cpu() || view.dtype != aoti_torch_dtype_int64() ||
      view.dims != 1 || view.strides[0] != 1) {
    throw std::runtime_error("fusedacc: plan was not made by fusedacc::prepare");
  }
  accumulate(AccumulatorTable(static_cast<const int64_t*>(view.data), view.sizes[0]), stack, wants_norm);
}

}  // namespace

void scale_accumulate_(StableIValue* stack, uint64_t, uint64_t) { accumulate_fresh(stack, false); }
void scale_accumulate_norm_(StableIValue* stack, uint64_t, uint64_t) { accumulate_fresh(stack, true); }
void accumulate_prepared_(StableIValue* stack, uint64_t, uint64_t) { accumulate_planned(stack, false); }
void accumulate_prepared_norm_(StableIValue* stack, uint64_t, uint64_t) { accumulate_planned(stack, true); }

void prepare(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList accumulators(stack[0]);
  std::vector<int64_t> words;
  AccumulatorTable::pack(accumulators, words);
  OwnedTensor plan(empty(1, static_cast<int64_t>(words.size()), aoti_torch_dtype_int64(),
                         {aoti_torch_device_type_cpu(), -1}));
  std::memcpy(data_of(plan), words.data(), words.size() * sizeof(int64_t));
  stack[0] = torch::stable::detail::from(plan.release());
}

void norm_partials(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors(stack[0]);
  const NormKind kind = norm_kind(stack[1]);
  static thread_local Work work;
  Device device;
  read_tensors(tensors, work, device.type, device.index);
  stack[0] = run_norm(work, {}, kind, true, device);
}

void finish_norm(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList tensors(stack[0]);
  FinishRequest finish{norm_kind(stack[1]), {}, nullptr, nullptr, torch::stable::detail::to<bool>(stack[2])};
  Device device{aoti_torch_device_type_cpu(), -1};
  for (int64_t i = 0; i < tensors.size(); ++i) {
    const Place place{"partials", i};
    const TensorView view = view_of(tensors[i], place);
    if (i == 0) device = {view.device_type, view.device_index};
    if (view.dtype != aoti_torch_dtype_float64() || view.dims != 1 ||
        (view.sizes[0] > 1 && view.strides[0] != 1) || view.device_type != device.type ||
        view.device_index != device.index) {
      throw std::runtime_error("fusedacc: " + place.str() +
                               " is no contiguous float64 vector on the device of partials[0]");
    }
    finish.partials.push_back({static_cast<const double*>(view.data), view.sizes[0]});
  }
  OwnedTensor norm(
      empty(0, 1, finish.wide ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32(), device));
  OwnedTensor found(empty(0, 1, aoti_torch_dtype_float32(), device));
  finish.norm = data_of(norm);
  finish.found = static_cast<float*>(data_of(found));
  run_on(device, [&] { cpu::finish_norm(finish); }, [&] { cuda::finish_norm(finish, device.index); });
  stack[0] = torch::stable::detail::from(norm.release());
  stack[1] = torch::stable::detail::from(found.release());
}

void build_info(StableIValue* stack, uint64_t, uint64_t) {
#ifdef FUSEDACC_CUDA
  const std::string cuda = cuda::build_info();
#else
  const std::string cuda = R"("cuda": null, "cuda_architectures": "")";
#endif
  stack[0] = torch::stable::detail::from(std::string(R"({"torch": ")") + FUSEDACC_TORCH_VERSION + "\", " +
                                         cuda + R"(, "cpu_capability": ")" + cpu::capability() + "\"}");
}

}  // namespace fusedacc
