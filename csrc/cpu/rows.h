// Runs checked work on the rows of a table, on torch's own threads.
#pragma once

#include "../clear_work.h"
#include "../row_work.h"

namespace fusedacc::cpu {

// Both throw if a number is no row, before anything is written.
void add_rows(const RowWork& work, double scale);
// `partials` has room for row_partials(table, numbers.count).
void norm_rows(const Table& table, const RowNumbers& numbers, NormKind kind, double* partials);
void clear_if(const ClearWork& work);

}  // namespace fusedacc::cpu
