// Runs checked work on a GPU. lists.cpp and gemm.cpp find torch's stream and cuBLAS; the .cu files, which
// know no torch, launch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "../common/chunk_plan.h"
#include "../common/gemm.h"

namespace fusedacc::cuda {

// Torch's current stream of that device; throws where torch has no CUDA.
void* current_stream(int32_t device_index);

// On torch's current stream of that device. Asynchronous; copies nothing; can be captured in a graph.
void run(const Work& work, const Factors& factors, int32_t device_index);

// As many partial norms are read by one block.
constexpr int64_t kMostPartials = 32768;

// The same with a partial norm for each chunk, or those alone, and the end of it: one small launch, or two.
void run_norm(const Work& work, const Factors& factors, const NormRequest& norm, int32_t device_index);
void finish_norm(const FinishRequest& finish, int32_t device_index);

// One launch per dtype pair and layout kind, of up to about a thousand tensors each. Throws on a launch
// error.
void launch(const Work& work, const Factors& factors, int32_t device_index, void* stream);

void launch_norm(const Work& work, const Factors& factors, const NormRequest& norm, int32_t device_index,
                 void* stream);
void launch_finish(const FinishRequest& finish, int32_t device_index, void* stream);

// A product into a sum, by the cuBLAS that torch has loaded, on torch's own handle and stream. Asynchronous;
// can be captured in a graph.
void run_gemm(const GemmRequest& request, int32_t device_index);

// Why run_gemm cannot run in this process; empty where it can.
std::string gemm_problem();

// Runs `work` with that device current.
void on_device(int32_t device_index, const std::function<void()>& work);

// Writes scale and keep one after the other to `out`: doubles if `wide`, else floats.
void launch_scalars(const ScaleArgument& scale, const ScaleArgument& keep, bool wide, void* out,
                    void* stream);

int32_t toolkit_version();  // as CUDART_VERSION: 13000 for 13.0

// The fields "cuda" and "cuda_architectures" of a JSON object.
std::string build_info();

}  // namespace fusedacc::cuda
