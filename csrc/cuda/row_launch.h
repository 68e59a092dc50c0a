// The launchers of the kernels on the rows of a table; they know no torch.
#pragma once

#include "../clear_work.h"
#include "row_thread.h"

namespace fusedacc::cuda {

// Of numbers that are sorted. sums: sums_needed(work) elements of the computation's dtype. Throw on a launch
// error.
void launch_rows(const RowWork& work, const ScaleArgument& scale, void* sums, int32_t device_index,
                 void* stream);
void launch_row_norms(const Table& table, const RowNumbers& numbers, NormKind kind, double* partials,
                      int32_t device_index, void* stream);
void launch_clear(const ClearWork& work, int32_t device_index, void* stream);

}  // namespace fusedacc::cuda
