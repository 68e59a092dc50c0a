// Runs checked work on the rows of a table, on torch's own threads.
#pragma once

#include "../row_work.h"

namespace fusedacc::cpu {

// Throws if a number is no row, before anything is written.
void add_rows(const RowWork& work, double scale);

}  // namespace fusedacc::cpu
