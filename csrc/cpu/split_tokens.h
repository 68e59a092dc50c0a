// For how many tokens a float32 product is cut up for the threads. Torch-free.
#pragma once

#include <cstdint>

namespace fusedacc::cpu {

// With a few dozen tokens a thread gets through parts of a few rows faster than BLAS through the whole: a
// quarter less time at 64 tokens, where MKL goes over to packing its operands. SPLIT_TOKENS of
// fusedacc/gemm.py is the same range.
constexpr bool are_split_tokens(int64_t tokens) { return 48 <= tokens && tokens <= 100; }

}  // namespace fusedacc::cpu
