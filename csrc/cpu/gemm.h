// Products into sums on the CPU, by torch's own BLAS and oneDNN.
#pragma once

#include "../gemm.h"
#include "gemm_ways.h"

namespace fusedacc::cpu {

// A way that does not fit the dtypes is taken as kWhole.
void run_gemm(const GemmRequest& request, Way way);

}  // namespace fusedacc::cpu
