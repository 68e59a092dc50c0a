// Runs checked work on the CPU, shared out among torch's own threads.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>

#include "../common/work.h"
#include "gemm.h"
#include "loops.h"

namespace fusedacc::cpu {

void run(const Work& work, Multipliers by);

// The same with a partial norm for each chunk, or those alone; and the norm of all partials.
void run_norm(const Work& work, Multipliers by, const NormRequest& norm);
void finish_norm(const FinishRequest& finish);

// The rows of a table. Throws if a number is no row, before anything is written.
void add_rows(const RowWork& work, double scale);

// dtype: of the logits.
void softmax(const SoftmaxSlice& slice, Dtype dtype);

// A product into an accumulator, by torch's own BLAS and oneDNN or by loops of our own. A way that does not
// fit the dtypes or the number of tokens is taken as kWhole; so is kRounded where the sum is rounded
// stochastically.
void run_gemm(const GemmRequest& request, GemmMethod way);

// Many of them, experts shared out among the threads, and those with few tokens by loops of our own.
void run_grouped(const GroupedRequest& request);

// The loops for this processor's vector instructions. FUSEDACC_CPU_CAPABILITY lowers them; throws if that
// names anything else than "baseline", "avx2" or "avx512", or more than the processor has.
const Loops& loops();

// A thread's least share, in elements, a multiple of a chunk's: some times what waking a thread costs, which
// differs from machine to machine (see fusedacc/kernels/loop_settings.py).
int64_t grain();

template <typename Context>
void parallel_for(int64_t count, int64_t grain, void (*part)(int64_t, int64_t, void*), Context& context) {
  if (count <= grain) {
    part(0, count, &context);
  } else if (torch_parallel_for(0, count, grain, part, &context) != 0) {
    throw std::runtime_error("fusedacc: torch's thread pool failed");
  }
}

}  // namespace fusedacc::cpu
