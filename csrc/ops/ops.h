// The operators as the dispatcher calls them: arguments and results are words on a stack, owned by the
// callee.
#pragma once

#include <torch/csrc/stable/library.h>

namespace fusedacc {

// Lists of tensors: lists.cpp.
void scale_accumulate_(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void prepare(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void accumulate_prepared_(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void scale_accumulate_norm_(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void accumulate_prepared_norm_(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void norm_partials(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void finish_norm(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void build_info(StableIValue* stack, uint64_t inputs, uint64_t outputs);

// Products into a sum: gemm.cpp.
void gemm_accumulate_(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void gemm_problem(StableIValue* stack, uint64_t inputs, uint64_t outputs);

// The rows of a table: rows.cpp.
void accumulate_rows_(StableIValue* stack, uint64_t inputs, uint64_t outputs);

}  // namespace fusedacc
