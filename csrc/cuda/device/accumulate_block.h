// The work of one block: find its tensor and chunk in a batch, and apply the functor. Host and device,
// torch-free: tests run these functions on the CPU, block by block and thread by thread.
//
// What holds in all of it:
// - A block belongs to one chunk of one tensor, and a thread writes elements that no other thread reads or
//   writes. So no block waits, and the order of blocks and threads does not matter.
// - An element is computed from the old element, one gradient and, if it is rounded stochastically, its
//   number in the tensor. So its bits depend neither on the chunk's size nor on alignment.
// - Vector accesses are aligned to their width. What precedes the first aligned element of the accumulator,
//   and what follows the last whole step, is handled one element at a time; so is a chunk whose gradient is
//   not aligned where its accumulator is.
// - Loads of all steps of a round are issued before the first loaded value is used.
// - An overwritten accumulator is never read: it may hold nan.
// - Positions in a chunk have 32 bits; positions in a tensor and addresses have 64.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../../common/chunk_plan.h"
#include "../../common/dtypes.h"

#if defined(__CUDA_ARCH__)
#define FUSEDACC_UNROLL _Pragma("unroll")
#define FUSEDACC_ROLLED _Pragma("unroll 1")
#else
#define FUSEDACC_UNROLL
#define FUSEDACC_ROLLED
#endif

namespace fusedacc::cuda {

constexpr int32_t kThreads = 256;
constexpr int32_t kVectorBytes = 16;

template <typename T, int32_t count>
constexpr int32_t kPackedBytes = static_cast<int32_t>(sizeof(T)) * count;
// Bytes per access: 16, or 8 if that is all. A single element is moved as it is.
template <typename T, int32_t count>
constexpr int32_t kVectorAccess = kPackedBytes<T, count> < kVectorBytes ? 8 : kVectorBytes;
template <typename T, int32_t count>
constexpr int32_t kAccessBytes = count == 1 ? kPackedBytes<T, 1> : kVectorAccess<T, count>;

// `count` neighbours that are moved together.
template <typename T, int32_t count>
struct alignas(kAccessBytes<T, count>) Packed {
  static_assert(kPackedBytes<T, count> % kAccessBytes<T, count> == 0);
  T values[count];
};

template <typename T, int32_t count>
FUSEDACC_INLINE void copy_packed(void* to, const void* from) {
#if defined(__CUDA_ARCH__)
  using Vector = std::conditional_t<kAccessBytes<T, count> == 8, uint2, uint4>;
  using Access = std::conditional_t<count == 1, T, Vector>;
#pragma unroll
  for (int32_t i = 0; i < kPackedBytes<T, count> / static_cast<int32_t>(sizeof(Access)); ++i) {
    static_cast<Access*>(to)[i] = static_cast<const Access*>(from)[i];
  }
#else
  std::memcpy(to, from, kPackedBytes<T, count>);
#endif
}

template <int32_t count, typename T>
FUSEDACC_INLINE Packed<T, count> load(const T* from) {
  Packed<T, count> packed;
  copy_packed<T, count>(&packed, from);
  return packed;
}

template <int32_t count, typename T>
FUSEDACC_INLINE void store(T* to, const Packed<T, count>& packed) {
  copy_packed<T, count>(to, &packed);
}

FUSEDACC_INLINE int32_t misalignment(const void* pointer, int32_t bytes = kVectorBytes) {
  return static_cast<int32_t>(reinterpret_cast<uintptr_t>(pointer) % static_cast<uint32_t>(bytes));
}

// Returns whether `count` neighbours can be moved together from this address.
template <int32_t count, typename T>
FUSEDACC_INLINE bool aligned_for(const T* pointer) {
  return misalignment(pointer, kAccessBytes<T, count>) == 0;
}

// A block's work: `count` elements of a tensor from `first` on, its chunk number `index`.
struct Chunk {
  int32_t tensor, count;
  int64_t index, first;
  bool overwrite;
  bool small;  // 32-bit positions are enough
};

template <typename Batch>
FUSEDACC_INLINE Chunk find_chunk(const Batch& batch, uint32_t block, int32_t chunk_elements) {
  Chunk chunk;
  chunk.tensor = find_segment(batch.count, block, [&](int32_t i) { return batch.first_chunk[i]; });
  chunk.index = block - batch.first_chunk[chunk.tensor];
  chunk.first = chunk.index * chunk_elements;
  const int64_t marked = batch.sizes[chunk.tensor];
  const int64_t size = marked < 0 ? ~marked : marked;
  const int64_t left = size - chunk.first;
  chunk.count = static_cast<int32_t>(left < chunk_elements ? left : chunk_elements);
  chunk.overwrite = marked < 0;
  chunk.small = size <= 0x7fffffff;
  return chunk;
}

// Computes where an element of a tensor with a loop nest is, from its position. Index: 32-bit division is
// several times faster, and sufficient except for huge tensors.
template <typename Index, typename Batch>
FUSEDACC_INLINE void locate(const Batch& batch, int32_t tensor, int64_t position, int64_t& to,
                            int64_t& from) {
  Index rest = static_cast<Index>(position);
  to = from = 0;
  const uint32_t outermost = batch.first_dim[tensor];
  for (uint32_t d = batch.first_dim[tensor + 1]; d-- > outermost;) {
    const Index size = static_cast<Index>(batch.dim_sizes[d]);
    const Index index = rest % size;
    rest /= size;
    to += index * batch.accumulator_strides[d];
    from += index * batch.gradient_strides[d];
  }
}

// Random bits of `count` neighbours, two per word; or zeros.
template <int32_t count>
struct NeighbourBits {
  uint32_t words[(count + 1) / 2];

  FUSEDACC_INLINE uint32_t operator[](int32_t i) const { return words[i / 2] >> (i % 2 ? 16 : 0) & 0xffffu; }
};
struct NoBits {
  FUSEDACC_INLINE uint32_t operator[](int32_t) const { return 0; }
};

// Returns the bits of the elements `offset` further. in_block: the first one's number is a multiple of
// `count`, so one counter has them all; otherwise two may be needed.
template <int32_t count, bool in_block, typename Functor>
FUSEDACC_INLINE auto neighbour_bits(const Functor& functor, int64_t offset) {
  if constexpr (!Functor::kStochastic) {
    return NoBits();
  } else {
    constexpr int32_t kElements = static_cast<int32_t>(random::kElements), kWords = kElements / 2;
    static_assert(kElements % count == 0);
    const uint64_t number = static_cast<uint64_t>(functor.noise.first + offset), block = number / kElements;
    const int32_t passed = static_cast<int32_t>(number % kElements);
    const random::Words first_words = random::philox(functor.noise, block);
    NeighbourBits<count> bits;
    if constexpr (count == 1) {
      bits.words[0] = random::bits_of(first_words, passed);
      return bits;
    }
    if (in_block || passed % count == 0) {
      FUSEDACC_UNROLL
      for (int32_t i = 0; i < count / 2; ++i) {
        const bool upper = count < kElements && passed != 0;
        bits.words[i] = upper ? first_words.values[(i + count / 2) % kWords] : first_words.values[i];
      }
      return bits;
    }
    const bool goes_on = passed + count > kElements;
    const random::Words next = goes_on ? random::philox(functor.noise, block + 1) : first_words;
    uint32_t words[2 * kWords];
    FUSEDACC_UNROLL
    for (int32_t i = 0; i < kWords; ++i) {
      words[i] = first_words.values[i];
      words[kWords + i] = next.values[i];
    }
    // Shift out the preceding elements: four, two and one.
    FUSEDACC_UNROLL
    for (int32_t i = 0; i < 6; ++i) words[i] = passed & 4 ? words[i + 2] : words[i];
    FUSEDACC_UNROLL
    for (int32_t i = 0; i < 5; ++i) words[i] = passed & 2 ? words[i + 1] : words[i];
    FUSEDACC_UNROLL
    for (int32_t i = 0; i < count / 2; ++i) {
      bits.words[i] = passed & 1 ? words[i] >> 16 | words[i + 1] << 16 : words[i];
    }
    return bits;
  }
}

template <int32_t pair>
struct PairKernels {
  using Gradient = GradientOf<pair>;
  using Accumulator = AccumulatorOf<pair>;
  using Functor = ScaleAccumulate<Gradient, Accumulator>;
  using Compute = typename Functor::Compute;

  // Elements per step: 16 bytes of the wider side. With more, neighbouring threads would write to memory with
  // gaps between them, and fill its sectors only partly.
  static constexpr int32_t kWide = sizeof(Gradient) > sizeof(Accumulator) ? sizeof(Gradient)
                                                                          : sizeof(Accumulator);
  static constexpr int32_t kStep = kVectorBytes / kWide;
  // Steps whose loads are issued before the first is used: 96 or 128 bytes per thread in flight.
  static constexpr int32_t kUnroll = 4;

  // Returns the functor of a tensor's elements from number `first` on.
  template <typename Batch>
  static FUSEDACC_INLINE Functor functor_of(const Batch& batch, int32_t tensor, int64_t first) {
    Multipliers by = read_factors<Compute>(batch.factors);
    if constexpr (Functor::kStochastic) by.noise = {batch.seed, batch.streams[tensor], first};
    return Functor(by);
  }

  static FUSEDACC_INLINE void element(Accumulator* accumulator, const Gradient* gradient, Functor functor,
                                      bool overwrite) {
    const uint32_t bits = functor.bits_at(0);
    *accumulator =
        overwrite ? functor.overwrite(*gradient, bits) : functor.add(*gradient, *accumulator, bits);
  }

  // in_block: as for neighbour_bits().
  template <bool overwrite, int32_t unroll, bool in_block = true>
  static FUSEDACC_INLINE void steps(Accumulator* accumulator, const Gradient* gradient, int32_t distance,
                                    Functor functor) {
    Packed<Gradient, kStep> fresh[unroll];
    Packed<Accumulator, kStep> into[unroll];
    FUSEDACC_UNROLL
    for (int32_t u = 0; u < unroll; ++u) {
      fresh[u] = load<kStep>(gradient + u * distance);
      if (!overwrite) into[u] = load<kStep>(static_cast<const Accumulator*>(accumulator) + u * distance);
    }
    FUSEDACC_UNROLL
    for (int32_t u = 0; u < unroll; ++u) {
      const auto bits = neighbour_bits<kStep, in_block>(functor, u * distance);
      FUSEDACC_UNROLL
      for (int32_t i = 0; i < kStep; ++i) {
        const Gradient value = fresh[u].values[i];
        Accumulator& sum = into[u].values[i];
        sum = overwrite ? functor.overwrite(value, bits[i]) : functor.add(value, sum, bits[i]);
      }
      store(accumulator + u * distance, into[u]);
    }
  }

  // Returns how many single elements precede the aligned ones; `count` if both sides are never aligned.
  static FUSEDACC_INLINE int32_t head_of(const Accumulator* accumulator, const Gradient* gradient,
                                         int32_t count) {
    constexpr int32_t size = sizeof(Accumulator), period = kStep * size;
    const int32_t head = (period - misalignment(accumulator, period)) % period / size;
    return head < count && aligned_for<kStep>(gradient + head) ? head : count;
  }

  template <bool overwrite>
  static FUSEDACC_INLINE void run_chunk(Accumulator* accumulator, const Gradient* gradient, int32_t count,
                                        Functor functor, int32_t thread) {
    const int32_t head = head_of(accumulator, gradient, count);
    const int32_t body = (count - head) / kStep * kStep;
    constexpr int32_t kDistance = kThreads * kStep;
    int32_t i = head + thread * kStep;
    if constexpr (Functor::kStochastic) {
      // After a head, a step uses bits of two counters: the registers suffice for one step at a time.
      FUSEDACC_ROLLED
      for (; head > 0 && i < head + body; i += kDistance) {
        steps<overwrite, 1, false>(accumulator + i, gradient + i, 0, functor.from(i));
      }
    }
    FUSEDACC_ROLLED
    for (; i + (kUnroll - 1) * kDistance < head + body; i += kUnroll * kDistance) {
      steps<overwrite, kUnroll>(accumulator + i, gradient + i, kDistance, functor.from(i));
    }
    // The whole of a small chunk.
    if (i + kDistance < head + body) {
      steps<overwrite, 2>(accumulator + i, gradient + i, kDistance, functor.from(i));
      i += 2 * kDistance;
    }
    if (i < head + body) steps<overwrite, 1>(accumulator + i, gradient + i, 0, functor.from(i));
    // Elements before and after the vectors.
    FUSEDACC_ROLLED
    for (int32_t single = thread; single < count - body; single += kThreads) {
      const int32_t at = single < head ? single : single + body;
      element(accumulator + at, gradient + at, functor.from(at), overwrite);
    }
  }

  template <typename Batch>
  static FUSEDACC_INLINE void flat_block(const Batch& batch, uint32_t block, int32_t thread) {
    const Chunk work = find_chunk(batch, block, batch.chunk_elements);
    auto* accumulator = static_cast<Accumulator*>(batch.accumulators[work.tensor]) + work.first;
    auto* gradient = static_cast<const Gradient*>(batch.gradients[work.tensor]) + work.first;
    const Functor functor = functor_of(batch, work.tensor, work.first);
    if (work.overwrite) {
      run_chunk<true>(accumulator, gradient, work.count, functor, thread);
    } else {
      run_chunk<false>(accumulator, gradient, work.count, functor, thread);
    }
  }

  template <typename Index, typename Batch>
  static FUSEDACC_INLINE void run_strided_chunk(const Batch& batch, const Chunk& work, int32_t thread) {
    const Functor functor = functor_of(batch, work.tensor, 0);
    FUSEDACC_ROLLED
    for (int32_t i = thread; i < work.count; i += kThreads) {
      int64_t to, from;
      locate<Index>(batch, work.tensor, work.first + i, to, from);
      element(static_cast<Accumulator*>(batch.accumulators[work.tensor]) + to,
              static_cast<const Gradient*>(batch.gradients[work.tensor]) + from, functor.from(to),
              work.overwrite);
    }
  }

  template <typename Batch>
  static FUSEDACC_INLINE void strided_block(const Batch& batch, uint32_t block, int32_t thread) {
    const Chunk work = find_chunk(batch, block, batch.chunk_elements);
    if (work.small) {
      run_strided_chunk<uint32_t>(batch, work, thread);
    } else {
      run_strided_chunk<uint64_t>(batch, work, thread);
    }
  }
};

// Capacities of batches for a toolkit's limit on kernel arguments: a thousand flat tensors need 32 KB. All
// bytes are sent with every launch, so fewer tensors use a smaller batch.
constexpr int32_t kFewBytes = 656, kSomeBytes = 4096;  // for 21 and for 144 flat tensors, rounded to nearest

// The batches of one kind of pass. Extended: adds `more` bytes per tensor to a batch, and at most twice as
// many to all.
template <template <typename> class Extended, int32_t more>
struct Batches {
  template <int32_t bytes>
  using Flat = Extended<FlatBatch<(bytes - 64 - 2 * more) / (28 + more)>>;
  template <int32_t bytes>
  using Strided =
      Extended<StridedBatch<bytes / 128, (bytes - 72 - 2 * more - bytes / 128 * (32 + more)) / 24>>;
};

template <typename Batch>
using Unchanged = Batch;

using NearestBatches = Batches<Unchanged, 0>;
using StochasticBatches = Batches<WithStreams, sizeof(uint64_t)>;
using NormBatches = Batches<WithPartials, sizeof(int64_t)>;

template <bool stochastic>
using SumBatches = std::conditional_t<stochastic, StochasticBatches, NearestBatches>;

// Calls launch(batch) with the smallest batch that holds everything, or the largest.
template <template <int32_t> class BatchOf, int32_t bytes, int32_t... larger, typename Launch>
void with_batch(const Need& need, Launch&& launch) {
  if constexpr (sizeof...(larger) > 0) {
    if (!BatchOf<bytes>::holds(need)) return with_batch<BatchOf, larger...>(need, launch);
  }
  BatchOf<bytes> batch;
  static_assert(sizeof(batch) <= bytes);
  launch(batch);
}

}  // namespace fusedacc::cuda
