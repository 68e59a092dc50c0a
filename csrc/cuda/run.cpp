#include "run.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>

// Weak, since a torch without CUDA does not have it and the library must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** stream);

namespace fusedacc::cuda {

void run(const Work& work, const ScaleArgument& scale, int32_t device_index) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw std::runtime_error("fusedacc: this torch has no CUDA");
  }
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device_index, &stream) != 0) {
    throw std::runtime_error("fusedacc: torch has no current stream for cuda:" +
                             std::to_string(device_index));
  }
  launch(work, scale, device_index, stream);
}

std::string build_info() {
  const int32_t version = toolkit_version();
  return R"("cuda": ")" + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) +
         R"(", "cuda_architectures": ")" + FUSEDACC_CUDA_ARCHITECTURES + "\"";
}

}  // namespace fusedacc::cuda
