#include "../ops/tensor_checks.h"
#include "launch.h"

// Weak, because the library must also load in a torch without CUDA.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
__attribute__((weak)) AOTITorchError aoti_torch_create_cuda_guard(int32_t device_index, void** guard);
__attribute__((weak)) AOTITorchError aoti_torch_delete_cuda_guard(void* guard);
}

namespace fusedacc::cuda {

DeviceGuard::DeviceGuard(int32_t device_index) {
  if (aoti_torch_create_cuda_guard == nullptr) throw std::runtime_error("fusedacc: this torch has no CUDA");
  if (aoti_torch_create_cuda_guard(device_index, &guard_) != 0) {
    throw std::runtime_error("fusedacc: torch cannot make cuda:" + std::to_string(device_index) +
                             " the current device");
  }
}

DeviceGuard::~DeviceGuard() { aoti_torch_delete_cuda_guard(guard_); }

void* current_stream(int32_t device_index) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw std::runtime_error("fusedacc: this torch has no CUDA");
  }
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device_index, &stream) != 0) {
    throw std::runtime_error("fusedacc: torch has no current stream for cuda:" +
                             std::to_string(device_index));
  }
  return stream;
}

void finish_norm(const FinishRequest& finish, int32_t device_index) {
  Work work;
  const int32_t pair = find_pair(Dtype::kFloat64, Dtype::kFloat64);
  for (const auto& [data, count] : finish.partials) {
    if (count > 0) work.push({const_cast<double*>(data), data, count, 0, pair, -1, false});
  }
  if (work.elements <= kMostPartials) return launch_finish(finish, device_index);
  // Partials of partials: many blocks read the partials, and one block reads the results.
  const OwnedTensor joined(
      empty({work.chunks}, aoti_torch_dtype_float64(), {aoti_torch_device_type_cuda(), device_index}));
  auto* norms = static_cast<double*>(data_of(joined));
  run_norm(work, {finish.kind, norms}, device_index);
  FinishRequest last = finish;
  last.partials = {{norms, work.chunks}};
  launch_finish(last, device_index);
}

// launch_problem() for Python: null if kernels can be launched. The text lasts until the thread's next call.
extern "C" __attribute__((visibility("default"))) const char* fusedacc_launch_problem(int32_t device_index) {
  thread_local std::string problem;
  try {
    problem = launch_problem(device_index);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  return problem.empty() ? nullptr : problem.c_str();
}

std::string build_info() {
  const int32_t version = toolkit_version();
  return R"("cuda": ")" + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) +
         R"(", "cuda_architectures": ")" + FUSEDACC_CUDA_ARCHITECTURES + "\"";
}

}  // namespace fusedacc::cuda
