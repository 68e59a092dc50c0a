// Random bits by vectors, and the sums that are rounded by them. Included by loops_impl.h, and compiled like
// it for each set of vector instructions.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "../common/functors.h"

namespace fusedacc::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kCounterBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kCounterBytes = 32;
#else
constexpr int64_t kCounterBytes = 16;
#endif
// One word of several counters, each in the lower half of 64 bits; what stands in the upper half is no
// matter.
using CounterWords = uint64_t __attribute__((vector_size(kCounterBytes)));
constexpr int64_t kCounters = kCounterBytes / 8;
// What a call of make_bits() makes is a multiple of this.
constexpr int64_t kBitsStep = kCounters * random::kElements;

inline CounterWords times(CounterWords words, uint32_t by) {
  [[maybe_unused]] const CounterWords all = CounterWords{} + by;
#if defined(__AVX512F__)
  return reinterpret_cast<CounterWords>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(words), reinterpret_cast<__m512i>(all)));
#elif defined(__AVX2__)
  return reinterpret_cast<CounterWords>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(words), reinterpret_cast<__m256i>(all)));
#elif defined(__SSE2__)
  return reinterpret_cast<CounterWords>(
      _mm_mul_epu32(reinterpret_cast<__m128i>(words), reinterpret_cast<__m128i>(all)));
#else
  return (words & 0xffffffffu) * by;
#endif
}

// Upper halves in the place of lower ones, by a shuffle: other units do it than those that multiply and
// shift.
inline CounterWords upper(CounterWords words) {
#if defined(__clang__)
  return words >> 32;  // of which it makes what it likes
#else
  using Halves = uint32_t __attribute__((vector_size(kCounterBytes)));
  Halves order;
  for (int64_t i = 0; i < 2 * kCounters; ++i) order[i] = static_cast<uint32_t>(i | 1);
  return reinterpret_cast<CounterWords>(__builtin_shuffle(reinterpret_cast<Halves>(words), order));
#endif
}

// Elements of both in turns: 0 of the first, 0 of the second, 1 of the first ...
inline void store_in_turns(uint16_t* to, CounterWords first, CounterWords second) {
#if defined(__clang__)
  uint64_t turns[2 * kCounters];
  for (int64_t i = 0; i < 2 * kCounters; ++i) turns[i] = i % 2 ? second[i / 2] : first[i / 2];
  std::memcpy(to, turns, sizeof(turns));
#else
  CounterWords order;
  for (int64_t i = 0; i < kCounters; ++i) order[i] = static_cast<uint64_t>(i / 2 + i % 2 * kCounters);
  const CounterWords lower = __builtin_shuffle(first, second, order);
  const CounterWords higher = __builtin_shuffle(first, second, order + kCounters / 2);
  std::memcpy(to, &lower, sizeof(lower));
  std::memcpy(to + kBitsStep / 2, &higher, sizeof(higher));
#endif
}

// random::philox() for elements [begin, begin + count) of a stream, which begin with a counter: 16 bits each.
// There is room for a multiple of kBitsStep.
inline void make_bits(const Noise& noise, int64_t begin, int64_t count, uint16_t* bits) {
  constexpr uint64_t kLower = 0xffffffffu;
  CounterWords block;
  for (int64_t i = 0; i < kCounters; ++i) block[i] = static_cast<uint64_t>(begin / random::kElements + i);
  for (int64_t at = 0; at < count; at += kBitsStep, block += kCounters) {
    CounterWords a = block, b = block >> 32;
    CounterWords c = CounterWords{} + (noise.stream & kLower), d = CounterWords{} + (noise.stream >> 32);
    uint64_t x = noise.seed & kLower, y = noise.seed >> 32;
#pragma GCC unroll 7
    for (int32_t round = 0; round < random::kRounds; ++round) {
      const CounterWords p = times(a, random::kMultipliers[0]), q = times(c, random::kMultipliers[1]);
      a = upper(q) ^ b ^ x;
      b = q;
      c = upper(p) ^ d ^ y;
      d = p;
      x = (x + random::kWeyl[0]) & kLower;
      y = (y + random::kWeyl[1]) & kLower;
    }
    const CounterWords first = (a & kLower) | (b << 32), second = (c & kLower) | (d << 32);
    store_in_turns(bits + at, first, second);
  }
}

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#define FUSEDACC_PAIRS_BY_VECTOR

// Two bfloat16 in each word, or one in its upper half, which is a float then.
using PairWords = uint32_t __attribute__((vector_size(kCounterBytes)));
using PairFloats = float __attribute__((vector_size(kCounterBytes)));
constexpr int64_t kPairElements = kCounterBytes / 2;

inline PairFloats multiply_add(PairFloats a, PairFloats b, PairFloats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#else
  return _mm256_fmadd_ps(a, b, c);
#endif
}

// Whether one of the words is `limit` at least; none has its highest bit.
inline bool reaches(PairWords words, uint32_t limit) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epu32_mask(reinterpret_cast<__m512i>(words), _mm512_set1_epi32(limit)) != 0;
#else
  const __m256i above = _mm256_cmpgt_epi32(reinterpret_cast<__m256i>(words), _mm256_set1_epi32(limit - 1));
  return !_mm256_testz_si256(above, above);
#endif
}

// beta * old + scale * fresh by ScaleAccumulate, for kPairElements of bfloat16: rounded stochastically, or
// false with nothing done where one comes near infinity or is none.
template <bool has_beta>
inline bool add_pairs_by_vector(void* accumulator, const void* gradient, const void* noise, float scale,
                                float beta) {
  constexpr uint32_t kUpper = 0xffff0000u, kMagnitude = 0x7fffffffu;
  PairWords old, fresh, bits;
  std::memcpy(&old, accumulator, sizeof(old));
  std::memcpy(&fresh, gradient, sizeof(fresh));
  std::memcpy(&bits, noise, sizeof(bits));
  const PairFloats by = PairFloats{} + scale;
  const auto sum = [&](PairWords from, PairWords into) {
    PairFloats kept = reinterpret_cast<PairFloats>(into);
    if (has_beta) kept = kept * beta;
    return reinterpret_cast<PairWords>(multiply_add(by, reinterpret_cast<PairFloats>(from), kept));
  };
  const PairWords lower = sum(fresh << 16, old << 16), higher = sum(fresh & kUpper, old & kUpper);
  const PairWords one = lower & kMagnitude, other = higher & kMagnitude;
  if (reaches(one > other ? one : other, 0x7f7f0000u)) return false;
  const PairWords both = ((lower + (bits & 0xffffu)) >> 16) | ((higher + (bits >> 16)) & kUpper);
  std::memcpy(accumulator, &both, sizeof(both));
  return true;
}
#endif

// The bits of elements, of one or of two neighbours; and of what needs none.
struct Bits {
  const uint16_t* values;

  FUSEDACC_INLINE uint32_t operator[](int64_t i) const { return values[i]; }
  FUSEDACC_INLINE uint32_t pair(int64_t i) const {
    uint32_t both;
    std::memcpy(&both, values + i, sizeof(both));
    return both;
  }
};
struct NoBits {
  FUSEDACC_INLINE uint32_t operator[](int64_t) const { return 0; }
  FUSEDACC_INLINE uint32_t pair(int64_t) const { return 0; }
};

}  // namespace
}  // namespace fusedacc::cpu
