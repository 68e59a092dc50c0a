// Runs checked work on the CPU, with torch's own threads.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>

#include "../common/work.h"
#include "gemm.h"
#include "loops.h"

namespace fusedacc::cpu {

void run(const Work& work, Multipliers by);

// The same with a partial norm per chunk, or only the norms; and the norm of all partials.
void run_norm(const Work& work, Multipliers by, const NormRequest& norm);
void finish_norm(const FinishRequest& finish);

// Adds to the rows of a table. Throws if a number is no row, before anything is written.
void add_rows(const RowWork& work, double scale);

// Runs a pass over a slice of the logits. dtype: of the logits.
void softmax(const SoftmaxSlice& slice, Dtype dtype);

// Adds a product into an accumulator by torch's BLAS and oneDNN or by our own loops. A method that does not
// fit the dtypes or the number of tokens is replaced by kWhole; so is kRounded for a stochastically rounded
// sum.
void run_gemm(const GemmRequest& request, GemmMethod way);

// Adds the products of all experts, with experts shared by the threads.
void run_grouped(const GroupedRequest& request);

// Returns the loops for this processor's vector instructions, or for fewer by FUSEDACC_CPU_CAPABILITY. Throws
// if that is not "baseline", "avx2", "avx512" or "avx512_bf16", or exceeds the processor's.
const Loops& loops();

// Returns the fewest elements per thread: a multiple of what waking a thread costs, which differs between
// machines (see fusedacc/kernels/loop_settings.py).
int64_t grain();

// Calls part(begin, end) for parts of [0, count) on torch's threads.
template <typename Part>
void parallel_for(int64_t count, int64_t grain, const Part& part) {
  if (count <= grain) return part(0, count);
  const auto run = [](int64_t begin, int64_t end, void* own) {
    (*static_cast<const Part*>(own))(begin, end);
  };
  if (torch_parallel_for(0, count, grain, run, const_cast<Part*>(&part)) != 0) {
    throw std::runtime_error("fusedacc: torch's thread pool failed");
  }
}

}  // namespace fusedacc::cpu
