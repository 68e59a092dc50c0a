// The loops themselves, left to the compiler to vectorise. Each loops_*.cpp includes this file once and is
// compiled for its own instructions; the unnamed namespace keeps the copies apart.
#pragma once

#include <cmath>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "../common/functors.h"
#include "bits_impl.h"
#include "loops.h"

// A gradient may be its own accumulator: equal addresses, which carry nothing from one iteration to another.
#if defined(__clang__)
#define FUSEDACC_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define FUSEDACC_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace fusedacc::cpu {
namespace {

constexpr int64_t kLineBytes = 64;

// `to` is aligned to a line.
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

// Positions [begin, end) of a loop nest as pieces of its innermost dimension: visit(offset of the first
// element in the accumulator, the same in the gradient, elements).
template <typename Visit>
inline void for_each_row(const StridedLayout& layout, int64_t begin, int64_t end, Visit&& visit) {
  const int32_t inner = layout.dims - 1;
  int64_t index[kMaxDims];
  int64_t rest = begin, target = 0, source = 0;
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
    // To the start of the next row.
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

// 1 / scale where scale is a power of two, neither too large nor too small for that; else 0.
template <typename Compute>
inline Compute exact_inverse(Compute scale) {
  int exponent;
  const Compute fraction = std::frexp(scale < 0 ? -scale : scale, &exponent);
  const int most = sizeof(Compute) == 4 ? 120 : 1000;
  return fraction == Compute(0.5) && exponent > -most && exponent < most ? 1 / scale : 0;
}

template <int32_t pair>
struct PairLoops {
  using Gradient = GradientOf<pair>;
  using Accumulator = AccumulatorOf<pair>;
  using Functor = ScaleAccumulate<Gradient, Accumulator>;
  using Compute = typename Functor::Compute;

  static constexpr bool kInPairs = std::is_same_v<Gradient, BFloat16> &&
                                   (kIsStochastic<Accumulator> || std::is_same_v<Accumulator, BFloat16>);
  // Elements whose bits are made at a time.
  static constexpr int64_t kBitsBlock = 256;

  // Calls visit(first, length, their bits) for all of `count` elements in turn. While bits are made, the
  // memory of the elements after these is on its way: without that a pass would take the time of both.
  template <typename Visit>
  static FUSEDACC_INLINE void with_bits(const void* accumulator, const void* gradient, int64_t count,
                                        const Functor& functor, Visit&& visit) {
    if constexpr (Functor::kStochastic) {
      alignas(kLineBytes) uint16_t bits[kBitsBlock];
      for (int64_t first = 0; first < count;) {
        const int64_t number = functor.noise.first + first, before = number % random::kElements;
        const int64_t length = count - first < kBitsBlock - before ? count - first : kBitsBlock - before;
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

  static void overwrite_row(Accumulator* accumulator, const Gradient* gradient, int64_t count,
                            Functor functor) {
    with_bits(accumulator, gradient, count, functor, [&](int64_t first, int64_t length, auto bits) {
      Accumulator* into = accumulator + first;
      const Gradient* from = gradient + first;
      FUSEDACC_INDEPENDENT
      for (int64_t i = 0; i < length; ++i) into[i] = functor.overwrite(from[i], bits[i]);
    });
  }

  static void stream_row(Accumulator* accumulator, const Gradient* gradient, int64_t count, Functor functor) {
    constexpr int64_t kBlock = 4096 / sizeof(Accumulator);
    alignas(kLineBytes) Accumulator block[kBlock];
    const int64_t past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(accumulator) % kLineBytes);
    int64_t i = (kLineBytes - past_line) % kLineBytes / static_cast<int64_t>(sizeof(Accumulator));
    overwrite_row(accumulator, gradient, i, functor);
    for (; i + kBlock <= count; i += kBlock) {
      overwrite_row(block, gradient + i, kBlock, functor.from(i));
      stream_lines(accumulator + i, block, sizeof(block));
    }
    end_of_stream();
    overwrite_row(accumulator + i, gradient + i, count - i, functor.from(i));
  }

  template <bool has_beta>
  static void add_row(Accumulator* accumulator, const Gradient* gradient, int64_t count, Functor functor) {
#if defined(FUSEDACC_SLOW_FMA)
    const Compute inverse = exact_inverse(functor.scale);
    if (inverse != 0) {
      add_products<has_beta>(accumulator, gradient, count, functor, inverse);
      return;
    }
#endif
    add_each<has_beta>(accumulator, gradient, count, functor);
  }

  template <bool has_beta>
  static void add_each(Accumulator* accumulator, const Gradient* gradient, int64_t count, Functor functor) {
    with_bits(accumulator, gradient, count, functor, [&](int64_t first, int64_t length, auto bits) {
      Accumulator* into = accumulator + first;
      const Gradient* from = gradient + first;
      int64_t i = 0;
      if constexpr (kInPairs) {
        i = length / 2 * 2;
        add_pairs<has_beta>(into, from, i, functor, bits);
      }
      FUSEDACC_INDEPENDENT
      for (int64_t k = i; k < length; ++k) {
        into[k] = functor.template add<has_beta>(from[k], into[k], bits[k]);
      }
    });
  }

  // The same for an even number of bfloat16, two by two in 32 bits: nothing is packed or unpacked.
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
      const uint32_t old = load_pair(accumulator + i), fresh = load_pair(gradient + i);
      const auto add = [&](uint32_t from, uint32_t into, uint32_t noise) {
        const Compute before = bits_as<float>(into);
        const Compute kept = has_beta ? functor.beta * before : before;
        return narrow<Accumulator, Compute>(fused_multiply_add(functor.scale, bits_as<float>(from), kept),
                                            noise)
            .bits;
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

  // Products by a power of two are rounded only where they leave the range: else a plain sum has the bits of
  // the fused one, at a fraction of what that takes without an instruction for it.
  template <bool has_beta>
  static void add_products(Accumulator* accumulator, const Gradient* gradient, int64_t count, Functor functor,
                           Compute inverse) {
    constexpr int64_t kBlock = 256;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t length = count - begin < kBlock ? count - begin : kBlock;
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
        add_each<has_beta>(into, from, length, functor.from(begin));
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
      stream_row(accumulator, gradient, count, functor);
    } else if (overwrite) {
      overwrite_row(accumulator, gradient, count, functor);
    } else if (functor.beta == 1) {
      add_row<false>(accumulator, gradient, count, functor);
    } else {
      add_row<true>(accumulator, gradient, count, functor);
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

}  // namespace
}  // namespace fusedacc::cpu
