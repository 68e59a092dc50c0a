// The CPU loops' interface: one table of functions per vector instruction set, all compiled from
// loops_impl.h.
#pragma once

#include <cstdint>

#include "../pairs.h"
#include "../work.h"

namespace fusedacc::cpu {

struct Loops {
  // Elements [begin, end) of a flat task, in units of elements.
  using Flat = void (*)(void* accumulator, const void* gradient, int64_t begin, int64_t end, double scale,
                        bool overwrite);
  // The same of a loop nest; positions count in the nest's order.
  using Strided = void (*)(void* accumulator, const void* gradient, const StridedLayout& layout,
                           int64_t begin, int64_t end, double scale, bool overwrite);

  const char* name;
  Flat flat[kPairCount];
  Strided strided[kPairCount];
};

extern const Loops kBaselineLoops;
#if defined(__x86_64__)
extern const Loops kAvx2Loops;
extern const Loops kAvx512Loops;
#endif

}  // namespace fusedacc::cpu
