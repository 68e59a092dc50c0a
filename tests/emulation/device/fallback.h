// Runs an operator on CUDA tensors with the CPU's kernel.
#pragma once

#include <ATen/core/stack.h>

namespace c10 {
class OperatorHandle;
}

namespace emulation {

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace emulation
