// The launcher of the kernels on the rows of a table; it knows no torch.
#pragma once

#include "device/row_thread.h"

namespace fusedacc::cuda {

// Of numbers that are sorted. sums: sums_needed(work) elements of the computation's dtype. Throws on a launch
// error.
void launch_rows(const RowWork& work, const ScaleArgument& scale, void* sums, int32_t device_index,
                 void* stream);

}  // namespace fusedacc::cuda
