// The operators on the rows of a table, as the dispatcher calls them.
#pragma once

#include <torch/csrc/stable/library.h>

namespace fusedacc {

void accumulate_rows_(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void row_partials(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void clear_if_(StableIValue* stack, uint64_t inputs, uint64_t outputs);

}  // namespace fusedacc
