#include "norm_loops_impl.h"

namespace fusedacc::cpu {

const Loops kBaselineLoops = loops_of_this_file("baseline");

}  // namespace fusedacc::cpu
