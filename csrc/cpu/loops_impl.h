// The CPU loops, written for the compiler to vectorise. Each loops_*.cpp includes this file once and is
// compiled for other instructions; the unnamed namespace keeps the copies apart.
//
// What the loops rely on:
// - csrc/ops has checked the memory: accumulators overlap neither each other nor gradients, except that a
//   gradient may be its own accumulator.
// - A run of elements may begin at any element of a tensor, and at any address that its dtype allows.
// What they keep to:
// - In an addition, each element gets the bits that the functor gives for it alone, however a pass is divided
//   among threads, and whichever instructions it uses.
// - Random bits depend on an element's number in its tensor. functor.from(n) is the functor for a run that
//   begins n elements later.
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "../common/functors.h"
#include "loops.h"

// A gradient may be its own accumulator: equal addresses, which create no dependence between iterations.
#if defined(__clang__)
#define FUSEDACC_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define FUSEDACC_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace fusedacc::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kCounterBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kCounterBytes = 32;
#else
constexpr int64_t kCounterBytes = 16;
#endif
// One word of several counters, each in the lower half of 64 bits; the upper half is ignored.
using CounterWords = uint64_t __attribute__((vector_size(kCounterBytes)));
constexpr int64_t kCounters = kCounterBytes / 8;
// make_bits() writes a multiple of this many elements.
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

// Moves upper halves to the lower ones by a shuffle, which uses other execution units than multiplications
// and shifts.
inline CounterWords upper(CounterWords words) {
#if defined(__clang__)
  return words >> 32;  // clang chooses the instruction
#else
  using Halves = uint32_t __attribute__((vector_size(kCounterBytes)));
  Halves order;
  for (int64_t i = 0; i < 2 * kCounters; ++i) order[i] = static_cast<uint32_t>(i | 1);
  return reinterpret_cast<CounterWords>(__builtin_shuffle(reinterpret_cast<Halves>(words), order));
#endif
}

// Interleaves elements: 0 of the first, 0 of the second, 1 of the first ...
inline void store_in_turns(uint16_t* to, CounterWords first, CounterWords second) {
  uint64_t turns[2 * kCounters];
  for (int64_t i = 0; i < 2 * kCounters; ++i) turns[i] = i % 2 ? second[i / 2] : first[i / 2];
  std::memcpy(to, turns, sizeof(turns));
}

// Evaluates random::philox() for elements [begin, begin + count) of a stream, 16 bits each. `begin` starts a
// counter; `bits` has room for a multiple of kBitsStep.
inline void make_bits(const Noise& noise, int64_t begin, int64_t count, uint16_t* bits) {
  constexpr uint64_t kLower = 0xffffffffu;
  CounterWords block;
  for (int64_t i = 0; i < kCounters; ++i) block[i] = static_cast<uint64_t>(begin / random::kElements + i);
  for (int64_t at = 0; at < count; at += kBitsStep) {
    CounterWords a = block;
    CounterWords b = block >> 32;
    CounterWords c = CounterWords{} + (noise.stream & kLower);
    CounterWords d = CounterWords{} + (noise.stream >> 32);
    uint64_t x = noise.seed & kLower;
    uint64_t y = noise.seed >> 32;
#pragma GCC unroll 7
    for (int32_t round = 0; round < random::kRounds; ++round) {
      const CounterWords p = times(a, random::kMultipliers[0]);
      const CounterWords q = times(c, random::kMultipliers[1]);
      a = upper(q) ^ b ^ x;
      b = q;
      c = upper(p) ^ d ^ y;
      d = p;
      x = (x + random::kWeyl[0]) & kLower;
      y = (y + random::kWeyl[1]) & kLower;
    }
    const CounterWords first = (a & kLower) | (b << 32);
    const CounterWords second = (c & kLower) | (d << 32);
    store_in_turns(bits + at, first, second);
    block += kCounters;
  }
}

// Vectors of numbers that are computed with.
using Floats = float __attribute__((vector_size(kCounterBytes)));
using Doubles = double __attribute__((vector_size(kCounterBytes)));

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#define FUSEDACC_PAIRS_BY_VECTOR

// Two bfloat16 in each word, or one in its upper half, which then is a float.
using PairWords = uint32_t __attribute__((vector_size(kCounterBytes)));
constexpr int64_t kPairElements = kCounterBytes / 2;

// Returns whether a word is at least `limit`; no word has its highest bit set.
inline bool reaches(PairWords words, uint32_t limit) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epu32_mask(reinterpret_cast<__m512i>(words), _mm512_set1_epi32(limit)) != 0;
#else
  const __m256i above = _mm256_cmpgt_epi32(reinterpret_cast<__m256i>(words), _mm256_set1_epi32(limit - 1));
  return !_mm256_testz_si256(above, above);
#endif
}

// beta * old + scale * fresh as ScaleAccumulate, for kPairElements of bfloat16, rounded stochastically.
// Returns false, with nothing done, if an element is close to infinity, infinite or nan.
template <bool has_beta>
inline bool add_pairs_by_vector(void* accumulator, const void* gradient, const void* noise, float scale,
                                float beta) {
  constexpr uint32_t kUpper = 0xffff0000u;
  constexpr uint32_t kMagnitude = 0x7fffffffu;
  PairWords old;
  PairWords fresh;
  PairWords bits;
  std::memcpy(&old, accumulator, sizeof(old));
  std::memcpy(&fresh, gradient, sizeof(fresh));
  std::memcpy(&bits, noise, sizeof(bits));
  const Floats by = Floats{} + scale;
  const auto sum = [&](PairWords from, PairWords into) {
    Floats term = reinterpret_cast<Floats>(into);
    if (has_beta) term = term * beta;
    return reinterpret_cast<PairWords>(multiply_add(by, reinterpret_cast<Floats>(from), term));
  };
  const PairWords lower = sum(fresh << 16, old << 16);
  const PairWords higher = sum(fresh & kUpper, old & kUpper);
  const PairWords lower_magnitude = lower & kMagnitude;
  const PairWords higher_magnitude = higher & kMagnitude;
  const PairWords largest = lower_magnitude > higher_magnitude ? lower_magnitude : higher_magnitude;
  if (reaches(largest, 0x7f7f0000u)) return false;
  const PairWords both = ((lower + (bits & 0xffffu)) >> 16) | ((higher + (bits >> 16)) & kUpper);
  std::memcpy(accumulator, &both, sizeof(both));
  return true;
}
#endif

#if defined(__AVX512BF16__)
// Multiplies two bfloat16 in each word and adds both products. Subnormal numbers count as zero.
inline Floats multiply_add(PairWords a, PairWords b, Floats c) {
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
#endif

// Random bits of one element or of two neighbours; or zeros.
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

constexpr int64_t kLineBytes = 64;

// Stores whole lines past the caches. `to` is aligned to a line.
inline void stream_lines(void* to, const void* from, int64_t bytes) {
#if defined(__AVX512F__)
  for (int64_t i = 0; i < bytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(to) + i),
                        _mm512_loadu_si512(static_cast<const char*>(from) + i));
  }
#elif defined(__SSE2__)
  for (int64_t i = 0; i < bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(to) + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + i)));
  }
#else
  std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

inline void end_of_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Visits positions [begin, end) of a loop nest in pieces of its innermost dimension: visit(offset of the
// first element in the accumulator, the same in the gradient, elements).
template <typename Visit>
inline void for_each_row(const StridedLayout& layout, int64_t begin, int64_t end, Visit&& visit) {
  const int32_t inner = layout.dims - 1;
  int64_t index[kMaxDims];
  int64_t rest = begin;
  int64_t target = 0;
  int64_t source = 0;
  for (int32_t d = inner; d >= 0; --d) {
    index[d] = rest % layout.sizes[d];
    rest /= layout.sizes[d];
    target += index[d] * layout.accumulator_strides[d];
    source += index[d] * layout.gradient_strides[d];
  }
  for (int64_t position = begin; position < end;) {
    const int64_t left = layout.sizes[inner] - index[inner];
    const int64_t count = left < end - position ? left : end - position;
    visit(target, source, count);
    position += count;
    // Go to the start of the next row.
    target -= index[inner] * layout.accumulator_strides[inner];
    source -= index[inner] * layout.gradient_strides[inner];
    index[inner] = 0;
    for (int32_t d = inner - 1; d >= 0; --d) {
      target += layout.accumulator_strides[d];
      source += layout.gradient_strides[d];
      if (++index[d] < layout.sizes[d]) break;
      target -= index[d] * layout.accumulator_strides[d];
      source -= index[d] * layout.gradient_strides[d];
      index[d] = 0;
    }
  }
}

// Returns 1 / scale if scale is a power of two and not extreme, else 0.
template <typename Compute>
inline Compute exact_inverse(Compute scale) {
  int exponent;
  const Compute fraction = std::frexp(scale < 0 ? -scale : scale, &exponent);
  const int most = sizeof(Compute) == 4 ? 120 : 1000;
  return fraction == Compute(0.5) && exponent > -most && exponent < most ? 1 / scale : 0;
}

// Not std::min, which the linker would make one function of for all instruction sets.
FUSEDACC_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

template <int32_t pair>
struct PairLoops {
  using Gradient = GradientOf<pair>;
  using Accumulator = AccumulatorOf<pair>;
  using Functor = ScaleAccumulate<Gradient, Accumulator>;
  using Compute = typename Functor::Compute;

  static constexpr bool kInPairs = std::is_same_v<Gradient, BFloat16> &&
                                   (kIsStochastic<Accumulator> || std::is_same_v<Accumulator, BFloat16>);
  // Elements per call of make_bits().
  static constexpr int64_t kBitsBlock = 256;

  // Calls visit(first, length, their bits) for all `count` elements in order. With noise, each call has at
  // most kBitsBlock elements, and only the first may begin in the middle of a block of random bits. While
  // bits are computed, the next elements' memory is prefetched; otherwise a pass would take the sum of both
  // times.
  template <typename Visit>
  static FUSEDACC_INLINE void with_bits(const void* accumulator, const void* gradient, int64_t count,
                                        const Functor& functor, Visit&& visit) {
    if constexpr (Functor::kStochastic) {
      alignas(kLineBytes) uint16_t bits[kBitsBlock];
      for (int64_t first = 0; first < count;) {
        const int64_t number = functor.noise.first + first;
        const int64_t before = number % random::kElements;
        const int64_t length = lesser(count - first, kBitsBlock - before);
        fetch_next(accumulator, first, length, sizeof(Accumulator));
        fetch_next(gradient, first, length, sizeof(Gradient));
        make_bits(functor.noise, number - before, before + length, bits);
        visit(first, length, Bits{bits + before});
        first += length;
      }
    } else {
      visit(int64_t{0}, count, NoBits());
    }
  }

  static FUSEDACC_INLINE void fetch_next(const void* from, int64_t first, int64_t length, int64_t size) {
    const auto* bytes = static_cast<const char*>(from) + (first + kBitsBlock) * size;
    for (int64_t byte = 0; byte < length * size; byte += kLineBytes) __builtin_prefetch(bytes + byte);
  }

  static void overwrite_run(Accumulator* accumulator, const Gradient* gradient, int64_t count,
                            Functor functor) {
    with_bits(accumulator, gradient, count, functor, [&](int64_t first, int64_t length, auto bits) {
      Accumulator* into = accumulator + first;
      const Gradient* from = gradient + first;
      FUSEDACC_INDEPENDENT
      for (int64_t i = 0; i < length; ++i) into[i] = functor.overwrite(from[i], bits[i]);
    });
  }

  // Overwrites elements past the caches; `block` receives them first. Only whole lines of the accumulator are
  // stored past the caches; the elements before and behind them are copied.
  static void stream_block(Accumulator* accumulator, const Gradient* gradient, int64_t count, Functor functor,
                           Accumulator* block) {
    overwrite_run(block, gradient, count, functor);
    constexpr int64_t size = sizeof(Accumulator);
    const int64_t past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(accumulator) % kLineBytes);
    const int64_t head = lesser((kLineBytes - past_line) % kLineBytes / size, count);
    const int64_t line_bytes = (count - head) * size / kLineBytes * kLineBytes;
    const int64_t tail = head + line_bytes / size;
    std::memcpy(accumulator, block, static_cast<size_t>(head * size));
    stream_lines(accumulator + head, block + head, line_bytes);
    std::memcpy(accumulator + tail, block + tail, static_cast<size_t>((count - tail) * size));
  }

  static void stream_run(Accumulator* accumulator, const Gradient* gradient, int64_t count, Functor functor) {
    constexpr int64_t kBlock = 4096 / sizeof(Accumulator);
    alignas(kLineBytes) Accumulator block[kBlock];
    for (int64_t i = 0; i < count; i += kBlock) {
      stream_block(accumulator + i, gradient + i, lesser(kBlock, count - i), functor.from(i), block);
    }
    end_of_stream();
  }

  template <bool has_beta>
  static void add_run(Accumulator* accumulator, const Gradient* gradient, int64_t count, Functor functor) {
#if defined(FUSEDACC_SLOW_FMA)
    const Compute inverse = exact_inverse(functor.scale);
    if (inverse != 0) {
      add_products<has_beta>(accumulator, gradient, count, functor, inverse);
      return;
    }
#endif
    add_elements<has_beta>(accumulator, gradient, count, functor);
  }

  template <bool has_beta>
  static void add_elements(Accumulator* accumulator, const Gradient* gradient, int64_t count,
                           Functor functor) {
    with_bits(accumulator, gradient, count, functor, [&](int64_t first, int64_t length, auto bits) {
      Accumulator* into = accumulator + first;
      const Gradient* from = gradient + first;
      int64_t done = 0;
      if constexpr (kInPairs) {
        done = length / 2 * 2;
        add_pairs<has_beta>(into, from, done, functor, bits);
      }
      FUSEDACC_INDEPENDENT
      for (int64_t i = done; i < length; ++i) {
        into[i] = functor.template add<has_beta>(from[i], into[i], bits[i]);
      }
    });
  }

  // The same for an even number of bfloat16, two per 32-bit word, without packing or unpacking.
  template <bool has_beta, typename BitsOf>
  static void add_pairs(Accumulator* accumulator, const Gradient* gradient, int64_t count, Functor functor,
                        BitsOf bits) {
    int64_t done = 0;
#if defined(FUSEDACC_PAIRS_BY_VECTOR)
    if constexpr (Functor::kStochastic) {
      for (; done + kPairElements <= count; done += kPairElements) {
        if (add_pairs_by_vector<has_beta>(accumulator + done, gradient + done, bits.values + done,
                                          functor.scale, functor.beta)) {
          continue;
        }
        for (int64_t i = done; i < done + kPairElements; ++i) {
          accumulator[i] = functor.template add<has_beta>(gradient[i], accumulator[i], bits[i]);
        }
      }
    }
#endif
    FUSEDACC_INDEPENDENT
    for (int64_t i = done; i < count; i += 2) {
      const uint32_t old = load_pair(accumulator + i);
      const uint32_t fresh = load_pair(gradient + i);
      const auto add = [&](uint32_t from, uint32_t into, uint32_t noise) {
        const Compute before = bits_as<float>(into);
        const Compute term = has_beta ? functor.beta * before : before;
        const Compute sum = fused_multiply_add(functor.scale, bits_as<float>(from), term);
        return narrow<Accumulator, Compute>(sum, noise).bits;
      };
      constexpr uint32_t kUpper = 0xffff0000u;
      const uint32_t noise = bits.pair(i);
      const uint32_t lower = add(fresh << 16, old << 16, noise & 0xffffu);
      const uint32_t higher = add(fresh & kUpper, old & kUpper, noise >> 16);
      const uint32_t both = lower | higher << 16;
      std::memcpy(accumulator + i, &both, sizeof(both));
    }
  }

  template <typename T>
  static FUSEDACC_INLINE uint32_t load_pair(const T* from) {
    uint32_t both;
    std::memcpy(&both, from, sizeof(both));
    return both;
  }

  // Products with a power of two are exact unless they leave the range. Then a plain sum has the bits of the
  // fused one, and is much faster without an FMA instruction. inverse: 1 / scale, by which each product is
  // checked; a block with an inexact one is added by add_elements().
  template <bool has_beta>
  static void add_products(Accumulator* accumulator, const Gradient* gradient, int64_t count, Functor functor,
                           Compute inverse) {
    constexpr int64_t kBlock = 256;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t length = lesser(kBlock, count - begin);
      Accumulator* into = accumulator + begin;
      const Gradient* from = gradient + begin;
      int32_t rounded = 0;
      if (inverse != 1 && inverse != -1) {
        for (int64_t i = 0; i < length; ++i) {
          const Compute value = widen(from[i]);
          rounded |= functor.scale * value * inverse != value;
        }
      }
      if (rounded) {
        add_elements<has_beta>(into, from, length, functor.from(begin));
        continue;
      }
      with_bits(into, from, length, functor.from(begin), [&](int64_t first, int64_t count, auto bits) {
        FUSEDACC_INDEPENDENT
        for (int64_t i = 0; i < count; ++i) {
          Accumulator& element = into[first + i];
          element = functor.template add_product<has_beta>(functor.scale * widen(from[first + i]), element,
                                                           bits[i]);
        }
      });
    }
  }

  static void row(Accumulator* accumulator, const Gradient* gradient, int64_t count, Functor functor,
                  bool overwrite) {
    if (overwrite && count * static_cast<int64_t>(sizeof(Accumulator)) >= kStreamBytes) {
      stream_run(accumulator, gradient, count, functor);
    } else if (overwrite) {
      overwrite_run(accumulator, gradient, count, functor);
    } else if (functor.beta == 1) {
      add_run<false>(accumulator, gradient, count, functor);
    } else {
      add_run<true>(accumulator, gradient, count, functor);
    }
  }

  static void strided_row(Accumulator* accumulator, const Gradient* gradient, int64_t accumulator_stride,
                          int64_t gradient_stride, int64_t count, Functor functor, bool overwrite) {
    for (int64_t i = 0; i < count; ++i) {
      Accumulator& element = accumulator[i * accumulator_stride];
      const Gradient value = gradient[i * gradient_stride];
      const uint32_t bits = functor.bits_at(i * accumulator_stride);
      element = overwrite ? functor.overwrite(value, bits) : functor.add(value, element, bits);
    }
  }

  static void flat(void* accumulator, const void* gradient, int64_t begin, int64_t end, Multipliers by,
                   bool overwrite) {
    row(static_cast<Accumulator*>(accumulator) + begin, static_cast<const Gradient*>(gradient) + begin,
        end - begin, Functor(by).from(begin), overwrite);
  }

  static void strided(void* accumulator, const void* gradient, const StridedLayout& layout, int64_t begin,
                      int64_t end, Multipliers by, bool overwrite) {
    auto* target = static_cast<Accumulator*>(accumulator);
    auto* source = static_cast<const Gradient*>(gradient);
    const Functor functor(by);
    const int64_t target_step = layout.accumulator_strides[layout.dims - 1];
    const int64_t source_step = layout.gradient_strides[layout.dims - 1];
    for_each_row(layout, begin, end, [&](int64_t to, int64_t from, int64_t count) {
      if (target_step == 1 && source_step == 1) {
        row(target + to, source + from, count, functor.from(to), overwrite);
      } else {
        strided_row(target + to, source + from, target_step, source_step, count, functor.from(to), overwrite);
      }
    });
  }
};

// Columns per block: their sums stay in the first-level cache.
constexpr int64_t kRowBlock = 2048;

template <int32_t pair>
struct RowLoops {
  using Gradient = GradientOf<pair>;
  using Accumulator = AccumulatorOf<pair>;
  using Functor = RowAccumulate<Gradient, Accumulator>;
  using Compute = typename Functor::Compute;

  static void add(void* row, const RowGradients& gradients, int64_t begin, int64_t end, const Multipliers& by,
                  bool by_frequency) {
    auto* target = static_cast<Accumulator*>(row);
    if (gradients.count == 1) {
      const ScaleAccumulate<Gradient, Accumulator> functor(by);
      PairLoops<pair>::row(target + begin, at(gradients, 0) + begin, end - begin, functor, false);
      return;
    }
    const Functor functor(by);
    for (int64_t column = begin; column < end; column += kRowBlock) {
      const int64_t length = lesser(kRowBlock, end - column);
      alignas(kLineBytes) Compute sums[kRowBlock];
      sum(sums, gradients, column, length);
      if (by_frequency) {
        for (int64_t i = 0; i < length; ++i) sums[i] = Functor::mean(sums[i], gradients.count);
      }
      Accumulator* into = target + column;
      FUSEDACC_INDEPENDENT
      for (int64_t i = 0; i < length; ++i) into[i] = functor.add(sums[i], into[i]);
    }
  }

 private:
  static const Gradient* at(const RowGradients& gradients, int64_t i) {
    return static_cast<const Gradient*>(gradients.data) + gradients.places[i].position * gradients.stride;
  }

  static void sum(Compute* sums, const RowGradients& gradients, int64_t column, int64_t length) {
    sum_run(sums, gradients, 0, column, length);
    for (int64_t first = kRowRun; first < gradients.count; first += kRowRun) {
      alignas(kLineBytes) Compute run[kRowBlock];
      sum_run(run, gradients, first, column, length);
      for (int64_t i = 0; i < length; ++i) sums[i] += run[i];
    }
  }

  static void sum_run(Compute* sums, const RowGradients& gradients, int64_t first, int64_t column,
                      int64_t length) {
    const Gradient* gradient = at(gradients, first) + column;
    FUSEDACC_INDEPENDENT
    for (int64_t i = 0; i < length; ++i) sums[i] = Functor::first(gradient[i]);
    for (int64_t k = 1; k < lesser(kRowRun, gradients.count - first); ++k) {
      join(sums, at(gradients, first + k) + column, length);
    }
  }

  // Not inlined: otherwise compilers unroll the surrounding loop by two and vectorise nothing.
  static __attribute__((noinline)) void join(Compute* sums, const Gradient* gradient, int64_t length) {
    FUSEDACC_INDEPENDENT
    for (int64_t i = 0; i < length; ++i) sums[i] = Functor::join(sums[i], gradient[i]);
  }
};

// The loops that add numbers of the computation's dtype to the same accumulators.
template <int32_t pair>
using IntoLoops = PairLoops<find_pair(
    std::is_same_v<ComputeOf<AccumulatorOf<pair>>, double> ? Dtype::kFloat64 : Dtype::kFloat32,
    kPairs[pair].accumulator)>;

// The loops that add a product to a matrix, for the cost of one pass over it if there are few tokens.

// Vectors that may lie anywhere, and how many of them are side by side in a tile of the accumulator, whose
// sums are all held in registers.
template <typename Element>
struct Vectors {
  typedef Element Type __attribute__((vector_size(kCounterBytes)));
  typedef Element InMemory __attribute__((vector_size(kCounterBytes), aligned(sizeof(Element)), may_alias));
};
#if defined(__AVX512F__)
constexpr int64_t kTileVectors = 4;
#else
constexpr int64_t kTileVectors = 2;
#endif
#if defined(__AVX512BF16__)
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

template <int32_t pair>
struct RankLoops {
  using Operand = GradientOf<pair>;
  using Accumulator = AccumulatorOf<pair>;
  using Compute = ComputeOf<Accumulator>;
  using Vector = typename Vectors<Compute>::Type;
  using InMemory = typename Vectors<Compute>::InMemory;

  // Elements of copied operands: numbers, or pairs of numbers of consecutive tokens. The tokens of an element
  // are a step.
  static constexpr bool kPaired = kMultipliesPairs && std::is_same_v<Operand, BFloat16>;
  static constexpr int64_t kStepTokens = kPaired ? 2 : 1;
  using Copied = std::conditional_t<kPaired, uint32_t, Compute>;
  using CopiedVector = typename Vectors<Copied>::Type;
  using CopiedInMemory = typename Vectors<Copied>::InMemory;

  static constexpr int64_t kLanes = kCounterBytes / static_cast<int64_t>(sizeof(Compute));
  // A tile of the accumulator.
  static constexpr int64_t kRows = 4;
  static constexpr int64_t kColumns = kTileVectors * kLanes;
  // Rows of the accumulator and steps whose factors are copied at once, and elements of the right operand:
  // the former stay in the second-level cache, the latter in the first.
  static constexpr int64_t kBlockRows = 128;
  static constexpr int64_t kSteps = 128;
  static constexpr int64_t kPanel = 16384 / static_cast<int64_t>(sizeof(Compute));
  static_assert(kRankTokens <= kSteps, "16-bit accumulators would be rounded more than once");

  // Adds the product. Tokens are split into equal parts of at most kSteps steps; the accumulator is rounded
  // once for each part, so once if there are at most kRankTokens. In a part, tiles are computed in panels of
  // `width` columns, whose operands fit into the caches.
  static void add(const GemmRequest& request) {
    alignas(kLineBytes) Copied left[kBlockRows * kSteps];
    alignas(kLineBytes) Copied right[kSteps * kColumns > kPanel ? kSteps * kColumns : kPanel];
    const int64_t parts = (steps_of(request.left.rows) + kSteps - 1) / kSteps;
    const int64_t steps = steps_of((request.left.rows + parts - 1) / parts);
    const int64_t tokens = steps * kStepTokens;
    const int64_t fit = kPanel / steps / kColumns * kColumns;
    const int64_t width = fit < kColumns ? kColumns : fit;
    for (int64_t row = 0; row < request.accumulator.rows; row += kBlockRows) {
      const GemmRequest rows = request.rows_part(row, lesser(kBlockRows, request.accumulator.rows - row));
      for (int64_t token = 0; token < request.left.rows; token += tokens) {
        const GemmRequest part = rows.tokens_part(token, lesser(tokens, request.left.rows - token));
        copy_factors(left, part.left);
        for (int64_t column = 0; column < request.accumulator.cols; column += width) {
          const GemmRequest panel = part.cols_part(column, lesser(width, request.accumulator.cols - column));
          copy_panel(right, panel.right, width);
          add_panel(panel, left, right, width);
        }
      }
    }
  }

 private:
  static int64_t steps_of(int64_t tokens) { return (tokens + kStepTokens - 1) / kStepTokens; }
  static int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

  // One step: its tokens' columns, and zeros up to `count` columns and instead of a token behind the last.
  static void copy_step(Copied* to, const Matrix& from, int64_t step, int64_t count) {
    const auto* row = static_cast<const Operand*>(from.data) + step * kStepTokens * from.row_stride;
    [[maybe_unused]] const bool has_next = step * kStepTokens + 1 < from.rows;
    [[maybe_unused]] const Operand* next = has_next ? row + from.row_stride : row;
    [[maybe_unused]] const uint32_t next_mask = has_next ? 0xffff0000u : 0;
    const auto element = [&](int64_t i) -> Copied {
      if constexpr (kPaired) {
        return row[i].bits | (static_cast<uint32_t>(next[i].bits) << 16 & next_mask);
      } else {
        return widen(row[i]);
      }
    };
    if (from.col_stride == 1) {
      FUSEDACC_INDEPENDENT
      for (int64_t i = 0; i < from.cols; ++i) to[i] = element(i);
    } else {
      for (int64_t i = 0; i < from.cols; ++i) to[i] = element(i * from.col_stride);
    }
    for (int64_t i = from.cols; i < count; ++i) to[i] = 0;
  }

  // For each step the factors of a tile's rows, tile by tile. Rows that do not exist have none.
  static void copy_factors(Copied* to, const Matrix& left) {
    const int64_t steps = steps_of(left.rows);
    const int64_t rows = padded(left.cols, kRows);
    for (int64_t step = 0; step < steps; ++step) {
      alignas(kLineBytes) Copied factors[kBlockRows];
      copy_step(factors, left, step, rows);
      for (int64_t row = 0; row < rows; row += kRows) {
        std::memcpy(to + row * steps + step * kRows, factors + row, kRows * sizeof(Copied));
      }
    }
  }

  // Rows of `width` elements, zeros up to the end of a tile.
  static void copy_panel(Copied* to, const Matrix& right, int64_t width) {
    for (int64_t step = 0; step < steps_of(right.rows); ++step) {
      copy_step(to + step * width, right, step, padded(right.cols, kColumns));
    }
  }

  static void add_panel(const GemmRequest& panel, const Copied* left, const Copied* right, int64_t width) {
    const Matrix& accumulator = panel.accumulator;
    for (int64_t row = 0; row < accumulator.rows; row += kRows) {
      const Copied* factors = left + row * steps_of(panel.left.rows);
      for (int64_t column = 0; column < accumulator.cols; column += kColumns) {
        fetch_tile(accumulator, row + 2 * kRows, column);
        add_tile(panel, row, column, factors, right + column, width);
      }
    }
  }

  // Prefetches the tile at this place, which arrives while others are computed.
  static void fetch_tile(const Matrix& accumulator, int64_t first, int64_t column) {
    for (int64_t row = first; row < lesser(first + kRows, accumulator.rows); ++row) {
      constexpr auto kSize = static_cast<int64_t>(sizeof(Accumulator));
      const auto* first_byte =
          static_cast<const char*>(accumulator.data) + (row * accumulator.row_stride + column) * kSize;
      for (int64_t byte = 0; byte < kColumns * kSize; byte += kLineBytes) {
        __builtin_prefetch(first_byte + byte, 1);
      }
    }
  }

  static void add_tile(const GemmRequest& panel, int64_t first, int64_t column, const Copied* factors,
                       const Copied* right, int64_t width) {
    const Matrix& accumulator = panel.accumulator;
    const int64_t steps = steps_of(panel.left.rows);
    const int64_t stride = accumulator.row_stride;
    const int64_t rows = lesser(kRows, accumulator.rows - first);
    const int64_t columns = lesser(kColumns, accumulator.cols - column);
    Accumulator* into = static_cast<Accumulator*>(accumulator.data) + first * stride + column;
    if constexpr (std::is_same_v<Accumulator, Compute>) {
      if (rows == kRows && columns == kColumns) {
        const Vector scale = Vector{} + static_cast<Compute>(panel.scale);
        const auto beta = static_cast<Compute>(panel.beta);
        sum_tile(factors, right, width, steps, [&](int64_t place, Vector sum) {
          InMemory* at = vector_at(into, stride, place);
          *at = beta == 0 ? scale * sum : multiply_add(scale, sum, beta * *at);
        });
        return;
      }
    }
    alignas(kLineBytes) Compute sums[kRows * kColumns];
    sum_tile(factors, right, width, steps,
             [&](int64_t place, Vector sum) { *vector_at(sums, kColumns, place) = sum; });
    const ScaleAccumulate<Compute, Accumulator> functor(Multipliers{panel.scale, panel.beta});
    for (int64_t row = 0; row < rows; ++row) {
      IntoLoops<pair>::row(into + row * stride, sums + row * kColumns, columns, functor, panel.beta == 0);
    }
  }

  static FUSEDACC_INLINE InMemory* vector_at(Compute* tile, int64_t stride, int64_t place) {
    return reinterpret_cast<InMemory*>(tile + place / kTileVectors * stride + place % kTileVectors * kLanes);
  }

  // Calls use(place, sum) for each vector of a tile, row by row: the sum over all tokens.
  template <typename Use>
  static FUSEDACC_INLINE void sum_tile(const Copied* factors, const Copied* right, int64_t width,
                                       int64_t steps, Use&& use) {
    Vector sums[kRows * kTileVectors] = {};
    for (int64_t step = 0; step < steps; ++step, factors += kRows, right += width) {
      CopiedVector values[kTileVectors];
      for (int64_t i = 0; i < kTileVectors; ++i) {
        values[i] = *reinterpret_cast<const CopiedInMemory*>(right + i * kLanes);
      }
      for (int64_t row = 0; row < kRows; ++row) {
        const CopiedVector factor = CopiedVector{} + factors[row];
        for (int64_t i = 0; i < kTileVectors; ++i) {
          Vector& sum = sums[row * kTileVectors + i];
          sum = multiply_add(factor, values[i], sum);
        }
      }
    }
    for (int64_t place = 0; place < kRows * kTileVectors; ++place) use(place, sums[place]);
  }
};

}  // namespace
}  // namespace fusedacc::cpu
