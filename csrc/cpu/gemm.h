// Products into sums on the CPU, by torch's own BLAS and oneDNN.
#pragma once

#include "../gemm.h"

namespace fusedacc::cpu {

// bfloat16_products: bfloat16 operands are multiplied as torch multiplies them, which rounds the product to
// bfloat16 before it is added to a float32 sum; else they are cast to float32 first.
void run_gemm(const GemmRequest& request, bool bfloat16_products);

}  // namespace fusedacc::cpu
