// The work of one block that computes a partial norm: read a chunk, and combine the threads' states. Host and
// device, torch-free, like accumulate_block.h.
//
// A chunk's norm depends only on its elements in their order: 16 bytes of neighbours belong to one thread,
// wherever the chunk starts in memory.
#pragma once

#include "../../common/norm_functors.h"
#include "accumulate_block.h"

namespace fusedacc::cuda {

template <typename Element>
constexpr int32_t kGroupOf = kVectorBytes / static_cast<int32_t>(sizeof(Element));

// The elements of a chunk of a flat tensor.
template <typename T>
struct FlatElements {
  using Element = T;
  static constexpr bool kInGroups = true;
  static constexpr int32_t kGroup = kGroupOf<Element>;

  const Element* first;

  FUSEDACC_INLINE bool aligned() const { return aligned_for<kGroup>(first); }
  FUSEDACC_INLINE Packed<Element, kGroup> load_group(int32_t at) const { return load<kGroup>(first + at); }
  FUSEDACC_INLINE Element load_one(int32_t at) const { return first[at]; }
};

// The same for loop nests.
template <typename T, typename Batch, typename Index>
struct StridedElements {
  using Element = T;
  static constexpr bool kInGroups = false;

  const Batch& batch;
  const Chunk& chunk;

  FUSEDACC_INLINE Element load_one(int32_t at) const {
    int64_t to, from;
    locate<Index>(batch, chunk.tensor, chunk.first + at, to, from);
    return static_cast<const Element*>(batch.accumulators[chunk.tensor])[to];
  }
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
      // Groups whose loads are issued before the first is used: up to 128 bytes per thread in flight.
      constexpr int32_t unroll = kChunkElements >= 8 * kGroupDistance ? 8 : 4;
      static_assert(unroll * kGroupDistance <= kChunkElements);
      const auto add_group = [&](const auto& group) {
        FUSEDACC_UNROLL
        for (int32_t i = 0; i < kGroup; ++i) {
          state = functor.add(state, static_cast<Compute>(widen(group.values[i])));
        }
      };
      FUSEDACC_ROLLED
      for (; at + (unroll - 1) * kGroupDistance + kGroup <= count; at += unroll * kGroupDistance) {
        Packed<typename Source::Element, kGroup> groups[unroll];
        FUSEDACC_UNROLL
        for (int32_t u = 0; u < unroll; ++u) groups[u] = source.load_group(at + u * kGroupDistance);
        FUSEDACC_UNROLL
        for (int32_t u = 0; u < unroll; ++u) add_group(groups[u]);
      }
      FUSEDACC_ROLLED
      for (; at + kGroup <= count; at += kGroupDistance) add_group(source.load_group(at));
    }
  }
  FUSEDACC_ROLLED
  for (; at < count; at += kGroupDistance) {
    FUSEDACC_ROLLED
    for (int32_t i = at; i < at + kGroup && i < count; ++i) {
      state = functor.add(state, static_cast<Compute>(widen(source.load_one(i))));
    }
  }
  return state;
}

// Returns a chunk's partial norm. `join(f)` combines all threads' f(thread) and returns the result to every
// thread; Functor::join commutes.
template <NormKind kind, typename Source, typename Join>
FUSEDACC_INLINE double chunk_norm(const Source& source, int32_t count, Join&& join) {
  using Compute = ComputeOf<typename Source::Element>;
  return norm_of<kind, Compute>([&](auto functor) {
    return join(functor,
                [&](int32_t thread) { return thread_state<Compute>(functor, source, count, thread); });
  });
}

// The work of each block: find its chunk, and return the chunk's partial norm.
template <typename Element, NormKind kind>
struct NormKernels {
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
    const auto* tensor = static_cast<const Element*>(batch.accumulators[chunk.tensor]);
    return chunk_norm<kind>(FlatElements<Element>{tensor + chunk.first}, chunk.count, join);
  }

  template <typename Batch, typename Join>
  static FUSEDACC_INLINE double strided_block(const Batch& batch, const Chunk& chunk, Join&& join) {
    if (chunk.small) {
      return chunk_norm<kind>(StridedElements<Element, Batch, uint32_t>{batch, chunk}, chunk.count, join);
    }
    return chunk_norm<kind>(StridedElements<Element, Batch, uint64_t>{batch, chunk}, chunk.count, join);
  }
};

constexpr int32_t kFinishThreads = 1024;

// The partials of one or several calls that form one norm, in the order of the lists.
template <int32_t bytes>
struct PartialLists {
  static constexpr int32_t kCapacity = (bytes - 64) / 16;

  int32_t count;
  void* norm;  // float, or double if `wide`
  float* nonfinite;
  bool wide;
  const double* partials[kCapacity];
  int64_t sizes[kCapacity];
};

// Returns a thread's state after its share of all partials.
template <typename Functor, typename Lists>
FUSEDACC_INLINE typename Functor::State finish_state(Functor functor, const Lists& lists, int32_t thread) {
  typename Functor::State state = 0;
  int64_t passed = 0;
  for (int32_t list = 0; list < lists.count; ++list) {
    const int64_t start = (thread - passed % kFinishThreads + kFinishThreads) % kFinishThreads;
    for (int64_t i = start; i < lists.sizes[list]; i += kFinishThreads) {
      state = functor.add(state, lists.partials[list][i]);
    }
    passed += lists.sizes[list];
  }
  return state;
}

// Writes the norm, and 1 if an element was not finite; only the `first` thread writes.
template <NormKind kind, typename Lists, typename Join>
FUSEDACC_INLINE void finish_block(const Lists& lists, bool first, Join&& join) {
  const double norm = norm_of<kind, double>([&](auto functor) {
    return join(functor, [&](int32_t thread) { return finish_state(functor, lists, thread); });
  });
  if (!first) return;
  if (lists.wide) {
    *static_cast<double*>(lists.norm) = norm;
  } else {
    *static_cast<float*>(lists.norm) = static_cast<float>(norm);
  }
  *lists.nonfinite = Magnitude<double>::of(norm) >= Magnitude<double>::kInfinity ? 1.0f : 0.0f;
}

}  // namespace fusedacc::cuda
