// What the operators that multiply have in common: their operands, checked and laid out for BLAS.
#pragma once

#include "../cpu/gemm.h"
#include "arguments.h"
#include "tensor_checks.h"

namespace fusedacc {

// An argument, for as long as its tensor lives.
struct Argument {
  const char* name;
  TensorView view;

  Argument(const char* name, const OwnedTensor& tensor, int64_t dims = 2)
      : name(name), view(view_of(tensor.get(), name, dims)) {}
  // Its last two dimensions.
  cpu::Matrix matrix() const {
    const int64_t rows = view.dims - 2, cols = view.dims - 1;
    return {view.data,          view.sizes[rows],   view.sizes[cols],
            view.strides[rows], view.strides[cols], dtype_of(view)};
  }
};

// Checks left [n, M] and right [n, N] against each other and the accumulator [..., M, N], which must be on a
// CPU.
void check_operands(const Argument& accumulator, const Argument& left, const Argument& right);

// The accumulator as it is to be rounded.
inline cpu::Matrix rounded_matrix(const Argument& accumulator, const Argument& operand,
                                  const NoiseArgument& noise) {
  cpu::Matrix into = accumulator.matrix();
  const int32_t pair =
      rounded_pair(operand.name, dtype_of(operand.view), "accumulator", into.dtype, noise.rounds());
  into.dtype = kPairs[pair].accumulator;
  return into;
}

// Whether the accumulator's matrices have dense rows; refuses those that have dense columns neither.
bool is_row_major(const Argument& accumulator);

// A number, or what a 0-dim tensor beside the accumulator holds.
double factor(const char* name, const OwnedTensor& tensor, StableIValue number);

// The operand itself, or a copy with dense rows, which `memory` then owns.
cpu::Matrix for_blas(const OwnedTensor& tensor, const Argument& operand, OwnedTensor& memory);

}  // namespace fusedacc
