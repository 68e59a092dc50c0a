// Runs checked work on the CPU, with torch's own threads.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>

#include "../common/work.h"
#include "gemm.h"
#include "loops.h"

namespace fusedacc::cpu {

void run(const Work& work, Multipliers by);

// Computes a partial norm per chunk, and the norm of all partials.
void run_norm(const Work& work, const NormRequest& norm);
void finish_norm(const FinishRequest& finish);

// Adds to the rows of a table. Throws if a number is no row, before anything is written.
void add_rows(const RowWork& work, double scale);

// Runs a pass over a slice of the logits. dtype: of the logits.
void softmax(const SoftmaxSlice& slice, Dtype dtype);

// Adds a product into an accumulator by torch's BLAS and oneDNN or by our own loops. kWhole replaces a method
// that does not fit the dtypes or the number of tokens.
void run_gemm(const GemmRequest& request, GemmMethod method);

// Adds the products of all experts, with experts shared by the threads.
void run_grouped(const GroupedRequest& request);

// The fewest elements per thread: adding fewer takes less time than waking a thread does.
constexpr int64_t kGrain = 131072;

// Calls part(begin, end) for parts of [0, count) on torch's threads.
template <typename Part>
void parallel_for(int64_t count, int64_t grain, const Part& part) {
  if (count <= grain) return part(0, count);
  const auto run = [](int64_t begin, int64_t end, void* context) {
    (*static_cast<const Part*>(context))(begin, end);
  };
  if (torch_parallel_for(0, count, grain, run, const_cast<Part*>(&part)) != 0) {
    throw std::runtime_error("fusedacc: torch's thread pool failed");
  }
}

}  // namespace fusedacc::cpu
