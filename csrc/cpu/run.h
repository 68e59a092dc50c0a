// Runs checked work on the CPU, on torch's own threads.
#pragma once

#include "../work.h"

namespace fusedacc::cpu {

void run(const Work& work, Multipliers by);

// The same with a partial norm for each chunk, or those alone; and the norm of all partials.
void run_norm(const Work& work, Multipliers by, const NormRequest& norm);
void finish_norm(const FinishRequest& finish);

// "baseline", "avx2" or "avx512": what run() uses here. FUSEDACC_CPU_CAPABILITY lowers it; throws if that
// names anything else, or more than the processor has.
const char* capability();

}  // namespace fusedacc::cpu
