// Products into sums on a GPU, by the cuBLAS that torch has loaded, on torch's own handle and stream.
#pragma once

#include <functional>
#include <string>

#include "../gemm.h"

namespace fusedacc::cuda {

// Asynchronous; can be captured in a graph.
void run_gemm(const GemmRequest& request, int32_t device_index);

// Why run_gemm cannot run in this process; empty where it can.
std::string gemm_problem();

// Runs `work` with that device current.
void on_device(int32_t device_index, const std::function<void()>& work);

// Writes scale and keep one after the other to `out`: doubles if `wide`, else floats.
void launch_scalars(const ScaleArgument& scale, const ScaleArgument& keep, bool wide, void* out,
                    void* stream);

}  // namespace fusedacc::cuda
