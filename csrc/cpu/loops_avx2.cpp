#include "norm_loops_impl.h"

namespace fusedacc::cpu {

const Loops kAvx2Loops = loops_of_this_file("avx2");

}  // namespace fusedacc::cpu
