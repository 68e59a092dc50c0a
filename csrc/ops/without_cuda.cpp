// What a build without CUDA has in the place of csrc/cuda/.
#ifndef FUSEDACC_CUDA
#include <stdexcept>

#include "../cuda/cuda.h"

namespace fusedacc::cuda {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error("fusedacc: this build has no CUDA kernels; build it again where nvcc is found");
}

}  // namespace

void run(const Work&, const Factors&, uint64_t, int32_t) { refuse(); }
void run_norm(const Work&, const Factors&, uint64_t, const NormRequest&, int32_t) { refuse(); }
void finish_norm(const FinishRequest&, int32_t) { refuse(); }
void add_rows(RowWork, AtenTensorHandle, const ScaleArgument&, int32_t) { refuse(); }
std::string build_info() { return R"("cuda": null, "cuda_architectures": "")"; }

}  // namespace fusedacc::cuda
#endif
