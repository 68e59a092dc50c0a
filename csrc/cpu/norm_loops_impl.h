// The loops that compute norms, and the table of all loops. Included like loops_impl.h.
//
// A chunk's norm depends only on its elements in their order: element i goes to lane i % kLanes, with any
// vector instructions.
#pragma once

#include <cstring>

#include "loops_impl.h"
#include "softmax_loops_impl.h"

namespace fusedacc::cpu {
namespace {

constexpr int32_t kLanes = 32;
// 16-bit elements are widened in blocks first: compilers vectorise that loop, but not a combined one.
constexpr int64_t kWideBlock = 256;
static_assert(kWideBlock % kLanes == 0);

// The per-lane states of a functor.
template <typename Functor, typename Compute>
class Lanes {
 public:
  using State = typename Functor::State;

  explicit Lanes(Functor functor) : functor_(functor) {}

  // `count` must be a multiple of kLanes except at the end of the chunk.
  template <typename Element>
  void add(const Element* row, int64_t count) {
    if constexpr (sizeof(Element) == 2) {
      float wide[kWideBlock];
      for (int64_t i = 0; i < count; i += kWideBlock) {
        const int64_t length = lesser(kWideBlock, count - i);
        for (int64_t k = 0; k < length; k += kLanes) prefetch(row + i + k);
        FUSEDACC_INDEPENDENT
        for (int64_t k = 0; k < length; ++k) wide[k] = widen(row[i + k]);
        add<false>(wide, length);
      }
    } else {
      add<true>(row, count);
    }
  }

  State joined() const {
    State states[kLanes];
    std::memcpy(states, states_, sizeof(states));
    for (int32_t half = kLanes / 2; half > 0; half /= 2) {
      for (int32_t lane = 0; lane < half; ++lane) {
        states[lane] = Functor::join(states[lane], states[lane + half]);
      }
    }
    return states[0];
  }

 private:
  // Prefetches the lines of kLanes elements: the processor's own prefetching ends at each page.
  template <typename Element>
  void prefetch(const Element* from) const {
    for (size_t byte = 0; byte < kLanes * sizeof(Element); byte += kLineBytes) {
      __builtin_prefetch(reinterpret_cast<const char*>(from) + ahead_ + byte);
    }
  }

  template <bool fetches, typename Element>
  void add(const Element* row, int64_t count) {
    State states[kLanes];
    std::memcpy(states, states_, sizeof(states));
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      if constexpr (fetches) prefetch(row + i);
      for (int32_t lane = 0; lane < kLanes; ++lane) {
        states[lane] = functor_.add(states[lane], static_cast<Compute>(row[i + lane]));
      }
    }
    for (int32_t lane = 0; i < count; ++i, ++lane) {
      states[lane] = functor_.add(states[lane], static_cast<Compute>(row[i]));
    }
    std::memcpy(states_, states, sizeof(states));
  }

  Functor functor_;
  const int64_t ahead_ = loops().norm_ahead_bytes;
  State states_[kLanes] = {};
};

// Returns the norm of a contiguous chunk.
template <NormKind kind, typename Element>
double norm_of_row(const Element* row, int64_t count) {
  using Compute = ComputeOf<Element>;
  return norm_of<kind, Compute>([&](auto functor) {
    Lanes<decltype(functor), Compute> lanes(functor);
    lanes.add(row, count);
    return lanes.joined();
  });
}

template <int32_t pair, NormKind kind>
struct NormLoops {
  using Accumulator = AccumulatorOf<pair>;

  static double norm(const void* tensor, const StridedLayout* layout, int64_t begin, int64_t end) {
    const auto* elements = static_cast<const Accumulator*>(tensor);
    const int64_t count = end - begin;
    if (layout == nullptr) return norm_of_row<kind>(elements + begin, count);
    Accumulator row[kChunkElements];
    const int64_t step = layout->accumulator_strides[layout->dims - 1];
    int64_t at = 0;
    for_each_row(*layout, begin, end, [&](int64_t from, int64_t, int64_t length) {
      for (int64_t i = 0; i < length; ++i) row[at + i] = elements[from + i * step];
      at += length;
    });
    return norm_of_row<kind>(row, count);
  }
};

template <int32_t... pairs, int32_t... nearest_pairs, int32_t... dtypes>
constexpr Loops make_loops(const char* name, std::integer_sequence<int32_t, pairs...>,
                           std::integer_sequence<int32_t, nearest_pairs...>,
                           std::integer_sequence<int32_t, dtypes...>) {
  constexpr NormKind two = NormKind::kTwo, infinity = NormKind::kInfinity;
  return {name,
          kAheadBytes,
          {PairLoops<pairs>::flat...},
          {PairLoops<pairs>::strided...},
          {{NormLoops<pairs, two>::norm...}, {NormLoops<pairs, infinity>::norm...}},
          {RowLoops<nearest_pairs>::add...},
          {RankLoops<nearest_pairs>::add...},
          {SoftmaxLoops<static_cast<Dtype>(dtypes)>::run...}};
}

constexpr Loops loops_of_this_file(const char* name) {
  return make_loops(name, std::make_integer_sequence<int32_t, kPairCount>(),
                    std::make_integer_sequence<int32_t, kNearestPairCount>(),
                    std::make_integer_sequence<int32_t, kDtypeCount>());
}

}  // namespace
}  // namespace fusedacc::cpu
