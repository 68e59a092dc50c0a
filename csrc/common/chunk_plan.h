// Split work into launches and parts. Tensors are cut into chunks. A launch covers as many tensors as fit its
// kernel arguments; a block finds its tensor by a search in the table of first chunks. The CPU cuts the line
// of all elements into equal parts. 64-bit, host code, torch-free; kernels share the search.
//
// What holds in all of it:
// - No task is empty, so the first chunks of a batch's tensors ascend strictly, from 0, and each chunk
//   belongs to exactly one tensor.
// - Every chunk of a tensor but its last has as many elements as the batch says, and the last has at least
//   one. The chunks of a norm have kChunkElements, because a partial norm covers a chunk.
// - All tasks of a batch have one pair of dtypes, and are all flat or all strided.
// - A batch is a kernel's argument: it has no pointers to host memory, and fits the bytes it was made for.
// - The tasks of a batch come in the order of the work, and a task is never split over two batches. A launch
//   has at most kMaxChunks blocks: no tensor alone has so many chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "dtypes.h"
#include "functors.h"
#include "work.h"

namespace fusedacc {

// Returns the last i with first(i) <= position; first(0) must be 0 and first ascend.
template <typename Position, typename First>
FUSEDACC_INLINE int32_t find_segment(int32_t count, Position position, First first) {
  int32_t low = 0;
  int32_t high = count;
  while (high - low > 1) {
    const int32_t half_way = low + (high - low) / 2;
    if (first(half_way) <= position) {
      low = half_way;
    } else {
      high = half_way;
    }
  }
  return low;
}

constexpr int64_t kMaxChunks = 0x7fffffff;  // a grid's limit in x

// Returns how many elements a block gets in a pass without norms over this many elements. Small passes get
// smaller chunks: with chunks of the usual size they would not fill a GPU with blocks.
constexpr int32_t chunk_elements_for(int64_t elements) {
  constexpr int64_t kFew = int64_t{1} << 22, kSmall = 2048;
  return static_cast<int32_t>(elements < kFew ? kSmall : kChunkElements);
}

// The scale as a kernel argument: a number, or where to read it on the device.
struct ScaleArgument {
  const void* tensor;  // null: use value
  double value;
  int32_t dtype;  // a Dtype, of tensor
};

template <typename Compute>
FUSEDACC_INLINE Compute read_scale(const ScaleArgument& scale) {
  if (scale.tensor == nullptr) return static_cast<Compute>(scale.value);
#define FUSEDACC_READ(name, enumerator, Element, ...) \
  case Dtype::enumerator:                             \
    return static_cast<Compute>(widen(*static_cast<const Element*>(scale.tensor)));
  switch (static_cast<Dtype>(scale.dtype)) {
    FUSEDACC_DTYPES(FUSEDACC_READ)
    default:
      __builtin_unreachable();  // operators refuse other dtypes
  }
#undef FUSEDACC_READ
}

// The factors of a pass as kernel arguments.
struct Factors {
  ScaleArgument scale, beta;
};

template <typename Compute>
FUSEDACC_INLINE Multipliers read_factors(const Factors& factors, uint64_t seed = 0) {
  return {read_scale<Compute>(factors.scale), read_scale<Compute>(factors.beta), {seed}};
}

// Space needed in a launch's arguments.
struct Need {
  int64_t tensors = 0;
  int64_t dims = 0;  // of all tensors with a loop nest
};

// The needs of a work's tasks, by loop nest and pair.
struct Needs {
  Need of[2][kPairCount];

  explicit Needs(const Work& work) {
    for (const Task& task : work.tasks) {
      Need& need = of[task.layout >= 0][task.pair];
      ++need.tensors;
      if (task.layout >= 0) need.dims += work.layouts[task.layout].dims;
    }
  }
};

// Calls launch(pair, need, strided) for each kind of task, with its pair as a constant.
template <typename Launch, int32_t... pairs>
void for_each_kind(const Work& work, Launch&& launch, std::integer_sequence<int32_t, pairs...>) {
  const Needs needs(work);
  for (const bool strided : {false, true}) {
    const auto launch_one = [&](auto pair) {
      const Need& need = needs.of[strided][pair];
      if (need.tensors > 0) launch(pair, need, strided);
    };
    (launch_one(std::integral_constant<int32_t, pairs>()), ...);
  }
}
template <typename Launch>
void for_each_kind(const Work& work, Launch&& launch) {
  for_each_kind(work, launch, std::make_integer_sequence<int32_t, kPairCount>());
}

// Arguments of one launch over tensors with matching layouts. 28 bytes per tensor: a thousand fit in 32 KB.
template <int32_t capacity>
struct FlatBatch {
  static constexpr int32_t kCapacity = capacity;
  static constexpr bool holds(const Need& need) { return need.tensors <= capacity; }

  Factors factors;
  int32_t count;
  int32_t chunk_elements = static_cast<int32_t>(kChunkElements);
  void* accumulators[capacity];
  const void* gradients[capacity];
  int64_t sizes[capacity];  // ~size where the accumulator is overwritten
  uint32_t first_chunk[capacity];

  void clear() { count = 0; }
  // chunks_before: chunks of the tasks that the batch has already.
  bool push(const Task& task, const StridedLayout*, int64_t chunks_before) {
    if (count == capacity) return false;
    accumulators[count] = task.accumulator;
    gradients[count] = task.gradient;
    sizes[count] = task.overwrite ? ~task.numel : task.numel;
    first_chunk[count] = static_cast<uint32_t>(chunks_before);
    ++count;
    return true;
  }
};

// The same for tensors with a loop nest. Their dimensions share a pool, because most have few.
template <int32_t capacity, int32_t pool_capacity>
struct StridedBatch : FlatBatch<capacity> {
  using Flat = FlatBatch<capacity>;
  static constexpr bool holds(const Need& need) { return Flat::holds(need) && need.dims <= pool_capacity; }

  uint32_t first_dim[capacity + 1];
  int64_t dim_sizes[pool_capacity];
  int64_t accumulator_strides[pool_capacity];
  int64_t gradient_strides[pool_capacity];

  void clear() {
    Flat::clear();
    first_dim[0] = 0;
  }
  bool push(const Task& task, const StridedLayout* layout, int64_t chunks_before) {
    const uint32_t first = first_dim[this->count];
    if (first + layout->dims > pool_capacity || !Flat::push(task, layout, chunks_before)) return false;
    for (int32_t d = 0; d < layout->dims; ++d) {
      dim_sizes[first + d] = layout->sizes[d];
      accumulator_strides[first + d] = layout->accumulator_strides[d];
      gradient_strides[first + d] = layout->gradient_strides[d];
    }
    first_dim[this->count] = first + layout->dims;
    return true;
  }
};

// A batch that rounds stochastically. A tensor's elements are numbered from its first one.
template <typename Batch>
struct WithStreams : Batch {
  uint64_t seed;
  uint64_t streams[Batch::kCapacity];

  bool push(const Task& task, const StridedLayout* layout, int64_t chunks_before) {
    const int32_t at = this->count;
    if (!Batch::push(task, layout, chunks_before)) return false;
    streams[at] = task.stream;
    return true;
  }
};

// A batch that stores partial norms of its chunks.
template <typename Batch>
struct WithPartials : Batch {
  double* partials;  // of all tensors of the call
  int64_t first_partial[Batch::kCapacity];

  bool push(const Task& task, const StridedLayout* layout, int64_t chunks_before) {
    const int32_t at = this->count;
    if (!Batch::push(task, layout, chunks_before)) return false;
    first_partial[at] = task.first_chunk;
    return true;
  }
};

// Fills batches with the tasks of one pair, flat or strided, in order, and calls launch(batch, chunks) for
// each full one.
template <typename Batch, typename Launch>
void for_each_batch(const Work& work, int32_t pair, bool strided, Batch& batch, Launch&& launch) {
  int64_t chunks = 0;
  const auto flush = [&] {
    if (batch.count > 0) launch(batch, chunks);
    batch.clear();
    chunks = 0;
  };
  batch.clear();
  for (const Task& task : work.tasks) {
    if (task.pair != pair || (task.layout >= 0) != strided) continue;
    const StridedLayout* layout = strided ? &work.layouts[task.layout] : nullptr;
    const int64_t needed = (task.numel + batch.chunk_elements - 1) / batch.chunk_elements;
    if (chunks + needed > kMaxChunks) flush();
    if (!batch.push(task, layout, chunks)) {
      flush();
      batch.push(task, layout, chunks);
    }
    chunks += needed;
  }
  flush();
}

// Treats all tasks' elements as one line, cut into parts of equal size: calls visit(task, begin, end) for
// each piece of [begin, end). Cuts within a tensor are rounded up to whole cache lines of the narrowest
// element, so that no two parts write to one line of an aligned tensor.
template <typename Visit>
void visit_part(const TaskSpan& tasks, int64_t begin, int64_t end, Visit&& visit) {
  constexpr int64_t kLine = 32;
  const auto cut = [](const Task& task, int64_t position) {
    const int64_t offset = (position - task.first + kLine - 1) / kLine * kLine;
    return std::min(std::max<int64_t>(offset, 0), task.numel);
  };
  const int32_t count = static_cast<int32_t>(tasks.size());
  int32_t i = find_segment(count, begin, [&](int32_t k) { return tasks[k].first; });
  for (; i < count && tasks[i].first < end; ++i) {
    const int64_t from = cut(tasks[i], begin), to = cut(tasks[i], end);
    if (from < to) visit(tasks[i], from, to);
  }
}

// The same in whole chunks: calls visit(task, begin, end, chunk) for each of the chunks [begin, end).
template <typename Visit>
void visit_chunks(const TaskSpan& tasks, int64_t begin, int64_t end, Visit&& visit) {
  const int32_t count = static_cast<int32_t>(tasks.size());
  int32_t i = find_segment(count, begin, [&](int32_t k) { return tasks[k].first_chunk; });
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t past = tasks[i].first_chunk + chunks_of(tasks[i].numel);
    if (chunk == past) ++i;
    const int64_t from = (chunk - tasks[i].first_chunk) * kChunkElements;
    visit(tasks[i], from, std::min(from + kChunkElements, tasks[i].numel), chunk);
  }
}

}  // namespace fusedacc
