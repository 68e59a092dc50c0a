#include "norm_loops_impl.h"

namespace fusedacc::cpu {

const Loops kAvx512Loops = loops_of_this_file("avx512");

}  // namespace fusedacc::cpu
