// The interface of the CPU loops: a table of functions per vector instruction set, all compiled from
// loops_impl.h.
#pragma once

#include <cstdint>

#include "../common/dtypes.h"
#include "../common/norm_functors.h"
#include "../common/softmax.h"
#include "../common/work.h"
#include "gemm.h"

namespace fusedacc::cpu {

// Tokens that `Loops::AddRankK` accepts for 16-bit accumulators, at most: those of all classes but the last.
constexpr int64_t kRankTokens = kTokenClasses[kClasses - 2];

// A row's number, and the position of one of its gradients.
struct RowPlace {
  int64_t row, position;
};

// The gradients of one row: places[i].position * stride elements after `data`.
struct RowGradients {
  const void* data;
  int64_t stride;
  const RowPlace* places;
  int64_t count;  // never 0
};

struct Loops {
  // Elements [begin, end) of a flat task, in units of elements.
  using Flat = void (*)(void* accumulator, const void* gradient, int64_t begin, int64_t end, Multipliers by,
                        bool overwrite);
  // The same for a loop nest; positions count in the nest's order.
  using Strided = void (*)(void* accumulator, const void* gradient, const StridedLayout& layout,
                           int64_t begin, int64_t end, Multipliers by, bool overwrite);

  // The partial norm of positions [begin, end) of a tensor, a chunk. layout: null if it is flat.
  using Norm = double (*)(const void* tensor, const StridedLayout* layout, int64_t begin, int64_t end);
  // Columns [begin, end) of a row.
  using AddRow = void (*)(void* row, const RowGradients& gradients, int64_t begin, int64_t end,
                          const Multipliers& by, bool by_frequency);
  // A product of at least one token, rounded once to a 16-bit accumulator, which allows at most kRankTokens.
  // Any strides but for the accumulator's rows, which are dense.
  using AddRankK = void (*)(const GemmRequest& request);
  // Tokens [begin, end) of a slice.
  using Softmax = void (*)(const SoftmaxSlice& slice, int64_t begin, int64_t end);

  const char* name;
  int64_t norm_ahead_bytes;  // how far ahead norms prefetch; 0: not at all
  Flat flat[kPairCount];
  Strided strided[kPairCount];
  Norm norm[kNormKinds][kPairCount];  // by the pair of the tensor's dtype with itself
  AddRow add_row[kNearestPairCount];
  AddRankK add_rank_k[kNearestPairCount];
  Softmax softmax[kDtypeCount];
};

// Bytes from which an overwritten accumulator is written past the caches: an ordinary store would first read
// the line that it replaces. Measured with bfloat16 into float32, it takes two thirds of the time.
constexpr int64_t kStreamBytes = 4 << 20;

// How far ahead norms prefetch, except on processors with AVX512-BF16 but without AMX: an AMD EPYC reads
// float32 norms 1.16 to 1.34 times as fast without (benchmarks/NOTES.md).
constexpr int64_t kAheadBytes = 2048;

extern const Loops kBaselineLoops;
#if defined(__x86_64__)
extern const Loops kAvx2Loops;
extern const Loops kAvx512Loops;
// kAvx512Loops, but products of bfloat16 are made by AVX512-BF16. Call it only on a processor that has this.
Loops avx512_bf16_loops(int64_t norm_ahead_bytes);
#endif

// Returns the loops for this processor's vector instructions, or for fewer by FUSEDACC_CPU_CAPABILITY. Throws
// if that is not "baseline", "avx2", "avx512" or "avx512_bf16", or exceeds the processor's.
const Loops& loops();

}  // namespace fusedacc::cpu
