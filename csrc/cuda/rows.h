// Runs checked work on the rows of a table on a GPU: sorts, finds torch's stream, and launches.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "../chunk_plan.h"
#include "../clear_work.h"
#include "../row_work.h"

namespace fusedacc::cuda {

// On torch's current stream. `indices` is the tensor of the row numbers, one-dimensional. Nothing waits for
// the device, so a number that is no row is passed over.
void add_rows(RowWork work, AtenTensorHandle indices, const ScaleArgument& scale, int32_t device_index);
// `partials` has room for row_partials(table, the number of indices).
void norm_rows(const Table& table, RowNumbers numbers, AtenTensorHandle indices, NormKind kind,
               double* partials, int32_t device_index);
// The flag is read on the device.
void clear_if(const ClearWork& work, int32_t device_index);

}  // namespace fusedacc::cuda
