// Shares work out among torch's own threads.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>

#include "loops.h"

namespace fusedacc::cpu {

// A thread's least share, in elements, a multiple of a chunk's: some times what waking a thread costs, which
// differs from machine to machine (see fusedacc/kernels/grain_size.py).
int64_t grain();

// The loops for this processor's vector instructions.
const Loops& loops();

template <typename Context>
void parallel_for(int64_t count, int64_t grain, void (*part)(int64_t, int64_t, void*), Context& context) {
  if (count <= grain) {
    part(0, count, &context);
  } else if (torch_parallel_for(0, count, grain, part, &context) != 0) {
    throw std::runtime_error("fusedacc: torch's thread pool failed");
  }
}

}  // namespace fusedacc::cpu
