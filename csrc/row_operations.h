// The operator on the rows of a table, as the dispatcher calls it.
#pragma once

#include <torch/csrc/stable/library.h>

namespace fusedacc {

void accumulate_rows_(StableIValue* stack, uint64_t inputs, uint64_t outputs);

}  // namespace fusedacc
