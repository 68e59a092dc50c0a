// Runs checked work on a GPU, on torch's current stream of that device. Asynchronous, copies nothing, and can
// be captured in a graph. Throws on a launch error, and if torch has no CUDA. Torch-free.
#pragma once

#include <stdexcept>
#include <string>

#include "../common/chunk_plan.h"

namespace fusedacc::cuda {

// One launch per dtype pair and kind of layout, for up to about a thousand tensors. seed: for stochastic
// rounding.
void run(const Work& work, const Factors& factors, uint64_t seed, int32_t device_index);

// Partial norms that one block reads, at most.
constexpr int64_t kMostPartials = 32768;

// Computes a partial norm per chunk, and the norm of all partials, in one small launch or two.
void run_norm(const Work& work, const NormRequest& norm, int32_t device_index);
void finish_norm(const FinishRequest& finish, int32_t device_index);

// The fields "cuda" and "cuda_architectures" of a JSON object.
std::string build_info();

#if !defined(FUSEDACC_CUDA) && !defined(__CUDACC__)
[[noreturn]] inline void refuse() {
  throw std::runtime_error("fusedacc: this build has no CUDA kernels; build it again where nvcc is found");
}

inline void run(const Work&, const Factors&, uint64_t, int32_t) { refuse(); }
inline void run_norm(const Work&, const NormRequest&, int32_t) { refuse(); }
inline void finish_norm(const FinishRequest&, int32_t) { refuse(); }
inline std::string build_info() { return R"("cuda": null, "cuda_architectures": "")"; }
#endif

}  // namespace fusedacc::cuda
