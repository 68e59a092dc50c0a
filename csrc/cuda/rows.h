// Runs checked work on the rows of a table on a GPU: sorts, finds torch's stream, and launches.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "../common/chunk_plan.h"
#include "../common/row_work.h"

namespace fusedacc::cuda {

// On torch's current stream. `indices` is the tensor of the row numbers, one-dimensional. Nothing waits for
// the device, so a number that is no row is passed over.
void add_rows(RowWork work, AtenTensorHandle indices, const ScaleArgument& scale, int32_t device_index);

}  // namespace fusedacc::cuda
