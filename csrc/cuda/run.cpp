#include "run.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>

// Weak, since a torch without CUDA does not have it and the library must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** stream);

namespace fusedacc::cuda {

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

void run(const Work& work, const Factors& factors, int32_t device_index) {
  launch(work, factors, device_index, current_stream(device_index));
}

void run_norm(const Work& work, const Factors& factors, const NormRequest& norm, int32_t device_index) {
  launch_norm(work, factors, norm, device_index, current_stream(device_index));
}

void finish_norm(const FinishRequest& finish, int32_t device_index) {
  launch_finish(finish, device_index, current_stream(device_index));
}

std::string build_info() {
  const int32_t version = toolkit_version();
  return R"("cuda": ")" + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) +
         R"(", "cuda_architectures": ")" + FUSEDACC_CUDA_ARCHITECTURES + "\"";
}

}  // namespace fusedacc::cuda
