#include "operations.h"

#include <cstring>

#include "chunk_plan.h"
#include "cpu/run.h"
#include "stable_arguments.h"
#include "tensor_checks.h"
#ifdef FUSEDACC_CUDA
#include "cuda/run.h"
#endif

namespace fusedacc {
namespace {

// Checks the scale and says where to read it: on a GPU by the kernel, so that nothing waits for the device.
ScaleArgument scale_argument(const AccumulatorTable& table, AtenTensorHandle tensor, double number) {
  if (tensor == nullptr) return {nullptr, number, 0};
  const TensorView view = view_of(tensor, {"scale", -1});
  const Dtype dtype = dtype_of(view);
  if (view.dims != 0) throw std::runtime_error("fusedacc: scale must be a number or a 0-dim tensor");
  if (dtype == Dtype::kOther) {
    throw std::runtime_error(
        "fusedacc: scale is a tensor of a dtype that is not float32, bfloat16, float16 or float64");
  }
  if (view.device_type != table.device_type() || view.device_index != table.device_index()) {
    throw std::runtime_error("fusedacc: scale is on " + device_name(view.device_type, view.device_index) +
                             " but the accumulators are on " +
                             device_name(table.device_type(), table.device_index()));
  }
  return {view.data, 0, static_cast<int32_t>(dtype)};
}

void run(const AccumulatorTable& table, const TensorList& gradients, AtenTensorHandle scale_tensor,
         double scale, const std::vector<bool>& overwrite) {
  // Kept from call to call: freeing blocks of this size makes malloc tidy up all the small ones.
  static thread_local Work work;
  table.match(gradients, overwrite, work);
  if (table.size() == 0) return;
  const ScaleArgument argument = scale_argument(table, scale_tensor, scale);
  if (table.on_cpu()) {
    cpu::run(work, read_scale<double>(argument));
  } else if (table.device_type() == aoti_torch_device_type_cuda()) {
#ifdef FUSEDACC_CUDA
    cuda::run(work, argument, table.device_index());
#else
    throw std::runtime_error("fusedacc: this build has no CUDA kernels; build it again where nvcc is found");
#endif
  } else {
    throw std::runtime_error("fusedacc: accumulators are on " +
                             device_name(table.device_type(), table.device_index()) +
                             "; only cpu and cuda are supported");
  }
}

double number(StableIValue argument) { return torch::stable::detail::to<double>(argument); }

}  // namespace

void scale_accumulate_(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList accumulators(stack[0]);
  const TensorList gradients(stack[1]);
  const OwnedTensor scale_tensor(take_optional(stack[2]));
  const std::vector<bool> overwrite = take_flags(stack[4]);
  static thread_local std::vector<int64_t> words;
  AccumulatorTable::pack(accumulators, words);
  run(AccumulatorTable(words.data(), static_cast<int64_t>(words.size())), gradients, scale_tensor.get(),
      number(stack[3]), overwrite);
}

void prepare(StableIValue* stack, uint64_t, uint64_t) {
  const TensorList accumulators(stack[0]);
  std::vector<int64_t> words;
  AccumulatorTable::pack(accumulators, words);
  const int64_t size = static_cast<int64_t>(words.size()), stride = 1;
  AtenTensorHandle handle = nullptr;
  FUSEDACC_SHIM(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_int64(),
                                         aoti_torch_device_type_cpu(), 0, &handle));
  OwnedTensor plan(handle);
  void* data = nullptr;
  FUSEDACC_SHIM(aoti_torch_get_data_ptr(handle, &data));
  std::memcpy(data, words.data(), words.size() * sizeof(int64_t));
  stack[0] = torch::stable::detail::from(plan.release());
}

void accumulate_prepared_(StableIValue* stack, uint64_t, uint64_t) {
  const OwnedTensor plan(reinterpret_cast<AtenTensorHandle>(stack[0]));
  const TensorList gradients(stack[1]);
  const OwnedTensor scale_tensor(take_optional(stack[2]));
  const std::vector<bool> overwrite = take_flags(stack[4]);
  const TensorView view = view_of(plan.get(), {"plan", -1});
  if (view.device_type != aoti_torch_device_type_cpu() || view.dtype != aoti_torch_dtype_int64() ||
      view.dims != 1 || view.strides[0] != 1) {
    throw std::runtime_error("fusedacc: plan was not made by fusedacc::prepare");
  }
  run(AccumulatorTable(static_cast<const int64_t*>(view.data), view.sizes[0]), gradients, scale_tensor.get(),
      number(stack[3]), overwrite);
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
