// The work of one block that computes a partial norm: read a chunk, or add to it, and combine the threads'
// states. Host and device, torch-free, like accumulate_block.h.
//
// A chunk's norm depends only on its elements in their order: 16 bytes of neighbours belong to one thread,
// wherever the chunk starts in memory and whatever the gradient's dtype. So the norm from an addition has the
// bits of the norm of the accumulators.
#pragma once

#include "../../common/norm_functors.h"
#include "accumulate_block.h"

namespace fusedacc::cuda {

template <typename Element>
constexpr int32_t kGroupOf = kVectorBytes / static_cast<int32_t>(sizeof(Element));

enum class Pass { kRead, kAdd, kOverwrite };

// The elements of a chunk of a flat tensor, after the pass has added to them or overwritten them.
template <int32_t pair, Pass pass>
struct FlatElements {
  using Kernels = PairKernels<pair>;
  using Gradient = typename Kernels::Gradient;
  using Element = typename Kernels::Accumulator;
  static constexpr bool kReads = pass == Pass::kRead, kOverwrites = pass == Pass::kOverwrite;
  static constexpr bool kInGroups = true;
  static constexpr int32_t kGroup = kGroupOf<Element>;
  static constexpr int32_t kBytes = (kReads ? 0 : sizeof(Gradient)) + sizeof(Element);
  struct Loaded {
    Packed<Gradient, kReads ? 1 : kGroup> fresh;
    Packed<Element, kGroup> accumulated;
  };

  Element* accumulator;
  const Gradient* gradient;
  typename Kernels::Functor functor;

  FUSEDACC_INLINE bool aligned() const {
    return aligned_for<kGroup>(accumulator) && (kReads || aligned_for<kGroup>(gradient));
  }
  FUSEDACC_INLINE Loaded load_group(int32_t at) const {
    Loaded loaded;
    if constexpr (!kReads) loaded.fresh = load<kGroup>(gradient + at);
    if (!kOverwrites) loaded.accumulated = load<kGroup>(static_cast<const Element*>(accumulator) + at);
    return loaded;
  }
  FUSEDACC_INLINE Packed<Element, kGroup> take(int32_t at, Loaded& loaded) const {
    if constexpr (!kReads) {
      const auto bits = neighbour_bits<kGroup, true>(functor, at);
      FUSEDACC_UNROLL
      for (int32_t i = 0; i < kGroup; ++i) {
        const Gradient value = loaded.fresh.values[i];
        Element& element = loaded.accumulated.values[i];
        element = kOverwrites ? functor.overwrite(value, bits[i]) : functor.add(value, element, bits[i]);
      }
      store(accumulator + at, loaded.accumulated);
    }
    return loaded.accumulated;
  }
  FUSEDACC_INLINE Element take_one(int32_t at) const {
    if (!kReads) Kernels::element(accumulator + at, gradient + at, functor.from(at), kOverwrites);
    return accumulator[at];
  }
  FUSEDACC_INLINE FlatElements<pair, Pass::kRead> again() const { return {accumulator, gradient, functor}; }
};

// The same for loop nests.
template <int32_t pair, typename Batch, typename Index, bool reads>
struct StridedElements {
  using Kernels = PairKernels<pair>;
  using Gradient = typename Kernels::Gradient;
  using Element = typename Kernels::Accumulator;
  static constexpr bool kInGroups = false;

  const Batch& batch;
  const Chunk& chunk;
  typename Kernels::Functor functor;

  FUSEDACC_INLINE Element take_one(int32_t at) const {
    int64_t to, from;
    locate<Index>(batch, chunk.tensor, chunk.first + at, to, from);
    Element* accumulator = static_cast<Element*>(batch.accumulators[chunk.tensor]) + to;
    if (!reads) {
      Kernels::element(accumulator, static_cast<const Gradient*>(batch.gradients[chunk.tensor]) + from,
                       functor.from(to), chunk.overwrite);
    }
    return *accumulator;
  }
  FUSEDACC_INLINE StridedElements<pair, Batch, Index, true> again() const { return {batch, chunk, functor}; }
};

// Returns a thread's state after its elements of a chunk.
template <typename Compute, typename Functor, typename Source>
FUSEDACC_INLINE typename Functor::State thread_state(Functor functor, const Source& source, int32_t count,
                                                     int32_t thread) {
  constexpr int32_t kGroup = kGroupOf<typename Source::Element>, kGroupDistance = kThreads * kGroup;
  typename Functor::State state = 0;
  int32_t at = thread * kGroup;
  if constexpr (Source::kInGroups) {
    if (source.aligned()) {
      // Groups whose loads are issued before the first is used: about 100 bytes per thread in flight.
      constexpr int32_t wanted = 128 / (kGroup * Source::kBytes);
      constexpr int32_t unroll = wanted >= 8 && kChunkElements >= 8 * kGroupDistance ? 8
                                 : wanted >= 4                                       ? 4
                                                                                     : 2;
      static_assert(unroll <= wanted && unroll * kGroupDistance <= kChunkElements);
      const auto take = [&](auto& loaded, int32_t place) {
        const auto group = source.take(place, loaded);
        FUSEDACC_UNROLL
        for (int32_t i = 0; i < kGroup; ++i) {
          state = functor.add(state, static_cast<Compute>(widen(group.values[i])));
        }
      };
      FUSEDACC_ROLLED
      for (; at + (unroll - 1) * kGroupDistance + kGroup <= count; at += unroll * kGroupDistance) {
        typename Source::Loaded loaded[unroll];
        FUSEDACC_UNROLL
        for (int32_t u = 0; u < unroll; ++u) loaded[u] = source.load_group(at + u * kGroupDistance);
        FUSEDACC_UNROLL
        for (int32_t u = 0; u < unroll; ++u) take(loaded[u], at + u * kGroupDistance);
      }
      FUSEDACC_ROLLED
      for (; at + kGroup <= count; at += kGroupDistance) {
        auto loaded = source.load_group(at);
        take(loaded, at);
      }
    }
  }
  FUSEDACC_ROLLED
  for (; at < count; at += kGroupDistance) {
    FUSEDACC_ROLLED
    for (int32_t i = at; i < at + kGroup && i < count; ++i) {
      state = functor.add(state, static_cast<Compute>(widen(source.take_one(i))));
    }
  }
  return state;
}

// Returns a chunk's partial norm. `join(f)` combines all threads' f(thread) and returns the result to every
// thread; Functor::join commutes.
template <NormKind kind, typename Source, typename Join>
FUSEDACC_INLINE double chunk_norm(const Source& source, int32_t count, Join&& join) {
  using Compute = ComputeOf<typename Source::Element>;
  const auto pass = [&](auto functor, const auto& elements) {
    return join(functor,
                [&](int32_t thread) { return thread_state<Compute>(functor, elements, count, thread); });
  };
  return norm_of<kind, Compute>([&](auto functor) { return pass(functor, source); },
                                [&](auto functor) { return pass(functor, source.again()); });
}

// The work of each block. reads: the accumulators are only measured.
template <int32_t pair, NormKind kind, bool reads>
struct NormKernels {
  using Kernels = PairKernels<pair>;
  using Gradient = typename Kernels::Gradient;
  using Accumulator = typename Kernels::Accumulator;

  struct Measured : Chunk {
    double* partial;
  };

  template <typename Batch>
  static FUSEDACC_INLINE Measured find(const Batch& batch, uint32_t block) {
    const Chunk chunk = find_chunk(batch, block, static_cast<int32_t>(kChunkElements));
    return {chunk, batch.partials + batch.first_partial[chunk.tensor] + chunk.index};
  }

  template <typename Batch, typename Join>
  static FUSEDACC_INLINE double flat_block(const Batch& batch, const Chunk& chunk, Join&& join) {
    auto* accumulator = static_cast<Accumulator*>(batch.accumulators[chunk.tensor]) + chunk.first;
    auto* gradient = static_cast<const Gradient*>(batch.gradients[chunk.tensor]) + chunk.first;
    const auto functor = Kernels::functor_of(batch, chunk.tensor, chunk.first);
    if constexpr (!reads) {
      if (chunk.overwrite) {
        const FlatElements<pair, Pass::kOverwrite> written{accumulator, gradient, functor};
        return chunk_norm<kind>(written, chunk.count, join);
      }
    }
    const FlatElements<pair, reads ? Pass::kRead : Pass::kAdd> added{accumulator, gradient, functor};
    return chunk_norm<kind>(added, chunk.count, join);
  }

  template <typename Index, typename Batch, typename Join>
  static FUSEDACC_INLINE double strided_chunk(const Batch& batch, const Chunk& chunk, Join&& join) {
    const auto functor = Kernels::functor_of(batch, chunk.tensor, 0);
    const StridedElements<pair, Batch, Index, reads> elements{batch, chunk, functor};
    return chunk_norm<kind>(elements, chunk.count, join);
  }

  template <typename Batch, typename Join>
  static FUSEDACC_INLINE double strided_block(const Batch& batch, const Chunk& chunk, Join&& join) {
    if (chunk.small) return strided_chunk<uint32_t>(batch, chunk, join);
    return strided_chunk<uint64_t>(batch, chunk, join);
  }
};

constexpr int32_t kFinishThreads = 1024;

// The partials of one or several calls that form one norm, in the order of the lists.
template <int32_t bytes>
struct PartialLists {
  static constexpr int32_t kCapacity = (bytes - 64) / 16;

  int32_t count;
  void* norm;  // float, or double if `wide`
  float* found;
  bool wide;
  const double* partials[kCapacity];
  int64_t sizes[kCapacity];
};

// Returns a thread's state after its share of all partials.
template <typename Functor, typename Lists>
FUSEDACC_INLINE typename Functor::State finish_state(Functor functor, const Lists& lists, int32_t thread) {
  typename Functor::State state = 0;
  int64_t passed = 0;
  for (int32_t list = 0; list < lists.count; passed += lists.sizes[list++]) {
    const int64_t start = (thread - passed % kFinishThreads + kFinishThreads) % kFinishThreads;
    for (int64_t i = start; i < lists.sizes[list]; i += kFinishThreads) {
      state = functor.add(state, lists.partials[list][i]);
    }
  }
  return state;
}

// Writes the norm, and 1 if an element was not finite; only the `first` thread writes.
template <NormKind kind, typename Lists, typename Join>
FUSEDACC_INLINE void finish_block(const Lists& lists, bool first, Join&& join) {
  const auto pass = [&](auto functor) {
    return join(functor, [&](int32_t thread) { return finish_state(functor, lists, thread); });
  };
  const double norm = norm_of<kind, double>(pass, pass);
  if (!first) return;
  if (lists.wide) {
    *static_cast<double*>(lists.norm) = norm;
  } else {
    *static_cast<float*>(lists.norm) = static_cast<float>(norm);
  }
  *lists.found = Magnitude<double>::of(norm) >= Magnitude<double>::kInfinity ? 1.0f : 0.0f;
}

}  // namespace fusedacc::cuda
