// The operator gemm_accumulate_: its arguments, checked, for torch's BLAS and oneDNN on a CPU. Elsewhere
// fusedacc/kernels/matmul_eager.py has torch's own products.
#include "../cpu/gemm.h"

#include "../cpu/cpu.h"
#include "products.h"

namespace fusedacc {
namespace {

using cpu::GemmRequest;
using cpu::Matrix;

// stack: accumulator, left, right, scale_tensor, scale, keep_tensor, keep, way, seed, streams.
void gemm_accumulate_(StableIValue* stack, uint64_t, uint64_t) {
  const OwnedTensor accumulator_tensor(reinterpret_cast<AtenTensorHandle>(stack[0]));
  const OwnedTensor left_tensor(reinterpret_cast<AtenTensorHandle>(stack[1]));
  const OwnedTensor right_tensor(reinterpret_cast<AtenTensorHandle>(stack[2]));
  const OwnedTensor scale_tensor(take_optional(stack[3]));
  const OwnedTensor beta_tensor(take_optional(stack[5]));
  const NoiseArgument noise(stack + 8);
  const Argument accumulator("accumulator", accumulator_tensor);
  const Argument left("left", left_tensor), right("right", right_tensor);
  check_operands(accumulator, left, right);
  const double scale = factor("scale", scale_tensor, stack[4]), beta = factor("keep", beta_tensor, stack[6]);
  const int64_t way = value_of<int64_t>(stack[7]);
  if (way < 0 || way > static_cast<int64_t>(cpu::Way::kRankK)) {
    fail("way", "is " + std::to_string(way) + "; allowed: those of csrc/cpu/gemm.h");
  }
  const Matrix into = rounded_matrix(accumulator, left, noise);
  if (into.rows == 0 || into.cols == 0) return;
  const bool row_major = is_row_major(accumulator);
  OwnedTensor left_memory(nullptr), right_memory(nullptr);
  const Matrix first = for_blas(left_tensor, left, left_memory);
  const Matrix second = for_blas(right_tensor, right, right_memory);
  // By columns it is the transpose that has dense rows: right^T left.
  const GemmRequest request = row_major
                                  ? GemmRequest{into, first, second, scale, beta, noise.noise()}
                                  : GemmRequest{into.transposed(), second, first, scale, beta, noise.noise()};
  cpu::run_gemm(request, static_cast<cpu::Way>(way));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedacc, CompositeExplicitAutograd, m) {
  m.impl("gemm_accumulate_", &gemm_accumulate_);
}

}  // namespace fusedacc
