// Runs checked work on the CPU, on torch's own threads.
#pragma once

#include "../work.h"

namespace fusedacc::cpu {

void run(const Work& work, double scale);

// "baseline", "avx2" or "avx512": what run() uses here. FUSEDACC_CPU_CAPABILITY lowers it; throws if that
// names anything else, or more than the processor has.
const char* capability();

}  // namespace fusedacc::cpu
