// Runs checked work on the CPU, on torch's own threads.
#pragma once

#include "../common/gemm.h"
#include "../common/row_work.h"
#include "../common/work.h"
#include "gemm_ways.h"

namespace fusedacc::cpu {

void run(const Work& work, Multipliers by);

// The same with a partial norm for each chunk, or those alone; and the norm of all partials.
void run_norm(const Work& work, Multipliers by, const NormRequest& norm);
void finish_norm(const FinishRequest& finish);

// The rows of a table. Throws if a number is no row, before anything is written.
void add_rows(const RowWork& work, double scale);

// A product into a sum, by torch's own BLAS and oneDNN. A way that does not fit the dtypes is taken as
// kWhole.
void run_gemm(const GemmRequest& request, Way way);

// "baseline", "avx2" or "avx512": what run() uses here. FUSEDACC_CPU_CAPABILITY lowers it; throws if that
// names anything else, or more than the processor has.
const char* capability();

}  // namespace fusedacc::cpu
