// Runs checked work on a GPU. run.cpp finds torch's stream; accumulate.cu, which knows no torch, launches.
#pragma once

#include <cstdint>
#include <string>

#include "../chunk_plan.h"

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

int32_t toolkit_version();  // as CUDART_VERSION: 13000 for 13.0

// The fields "cuda" and "cuda_architectures" of a JSON object.
std::string build_info();

}  // namespace fusedacc::cuda
