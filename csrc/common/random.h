// Random bits for sums that are rounded stochastically: a function of seed, tensor, addition and element, and
// of nothing else, so that they are the same for every launch shape, number of threads and backend.
//
// Philox 4x32 with 7 rounds, the fewest with which it passes BigCrush (Salmon, Moraes, Dror, Shaw: Parallel
// Random Numbers: As Easy as 1, 2, 3; 2011). One counter has the bits of 8 neighbouring elements. Torch-free.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FUSEDACC_INLINE __host__ __device__ __forceinline__
#else
#define FUSEDACC_INLINE inline __attribute__((always_inline))
#endif

namespace fusedacc {

// Which bits a pass takes. stream: the parameter's number, and above its 32 bits the number of the addition.
// first: the number of the element at hand, which is its offset in memory from the tensor's first one.
struct Noise {
  uint64_t seed = 0, stream = 0;
  int64_t first = 0;

  FUSEDACC_INLINE Noise from(int64_t offset) const { return {seed, stream, first + offset}; }
};

namespace random {

constexpr int32_t kRounds = 7;
constexpr uint32_t kMultipliers[] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32_t kWeyl[] = {0x9E3779B9u, 0xBB67AE85u};
constexpr int64_t kElements = 8;  // of one counter

struct Words {
  uint32_t values[4];
};

// Counter number `block` of a stream.
FUSEDACC_INLINE Words philox(const Noise& noise, uint64_t block) {
  uint32_t a = static_cast<uint32_t>(block), b = static_cast<uint32_t>(block >> 32);
  uint32_t c = static_cast<uint32_t>(noise.stream), d = static_cast<uint32_t>(noise.stream >> 32);
  constexpr uint32_t kX = kWeyl[0], kY = kWeyl[1];  // device code has no such arrays
  uint32_t x = static_cast<uint32_t>(noise.seed), y = static_cast<uint32_t>(noise.seed >> 32);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int32_t round = 0; round < kRounds; ++round) {
    const uint64_t p = static_cast<uint64_t>(a) * kMultipliers[0];
    const uint64_t q = static_cast<uint64_t>(c) * kMultipliers[1];
    a = static_cast<uint32_t>(q >> 32) ^ b ^ x;
    b = static_cast<uint32_t>(q);
    c = static_cast<uint32_t>(p >> 32) ^ d ^ y;
    d = static_cast<uint32_t>(p);
    x += kX;
    y += kY;
  }
  return {{a, b, c, d}};
}

// The 16 bits of one of a counter's elements. By selects: a GPU has no registers that can be indexed.
FUSEDACC_INLINE uint32_t bits_of(const Words& words, int32_t element) {
  const uint32_t* values = words.values;
  const uint32_t lower = element & 2 ? values[1] : values[0], upper = element & 2 ? values[3] : values[2];
  return (element & 4 ? upper : lower) >> (element & 1 ? 16 : 0) & 0xffffu;
}

// Those of the element that is `offset` further.
FUSEDACC_INLINE uint32_t bits_at(const Noise& noise, int64_t offset) {
  const uint64_t number = static_cast<uint64_t>(noise.first + offset);
  return bits_of(philox(noise, number / kElements), static_cast<int32_t>(number % kElements));
}

}  // namespace random
}  // namespace fusedacc
