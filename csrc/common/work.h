// The work of one call, after all checks: a list of tasks, one per pair of tensors, or the rows of a table.
// Torch-free.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "dtypes.h"
#include "norm_functors.h"

namespace fusedacc {

constexpr int32_t kMaxDims = 16;   // of a loop nest, after merging
constexpr int32_t kMaxSizes = 64;  // larger than 1, in a tensor with elements: their product is below 2^63

// Elements per chunk, in the order of the accumulator's memory. A partial norm covers a chunk.
constexpr int64_t kChunkElements = 8192;
constexpr int64_t chunks_of(int64_t elements) { return (elements + kChunkElements - 1) / kChunkElements; }

// A loop nest over both tensors, outermost dimension first; strides in elements.
struct StridedLayout {
  int32_t dims;
  int64_t sizes[kMaxDims];
  int64_t accumulator_strides[kMaxDims];
  int64_t gradient_strides[kMaxDims];
};

struct Task {
  void* accumulator;
  const void* gradient;
  int64_t numel;   // never 0
  int64_t first;   // the elements of all tasks before
  int32_t pair;    // an index into kPairs
  int32_t layout;  // an index into Work::layouts; negative: both are flat, element i belongs to element i
  bool overwrite;
  int64_t first_chunk = 0;  // the chunks of all tasks before
  uint64_t stream = 0;      // for a stochastic pair, as in Noise

  Multipliers by(Multipliers call) const {
    call.noise.stream = stream;
    return call;
  }
};

// A view of tasks.
struct TaskSpan {
  const Task* tasks;
  int64_t count;

  TaskSpan(const Task* first, int64_t size) : tasks(first), count(size) {}
  TaskSpan(const std::vector<Task>& held) : TaskSpan(held.data(), static_cast<int64_t>(held.size())) {}
  int64_t size() const { return count; }
  const Task& operator[](int64_t i) const { return tasks[i]; }
};

enum class Merged { kFlat, kStrided, kTooManyDims };

// Orders the dimensions by the accumulator's strides and merges those that both tensors traverse as one, so
// that most views become flat or nearly so. No size may be 0.
inline Merged merge_dims(int64_t dims, const int64_t* sizes, const int64_t* accumulator_strides,
                         const int64_t* gradient_strides, StridedLayout& layout) {
  struct Dim {
    int64_t size, accumulator, gradient;
  };
  // The dimensions larger than 1, outermost first.
  Dim nest[kMaxSizes];
  int64_t count = 0;
  for (int64_t d = 0; d < dims; ++d) {
    if (sizes[d] != 1) nest[count++] = {sizes[d], accumulator_strides[d], gradient_strides[d]};
  }
  std::stable_sort(nest, nest + count,
                   [](const Dim& a, const Dim& b) { return a.accumulator > b.accumulator; });
  // The index of the last dimension that others were merged into.
  int64_t merged = 0;
  for (int64_t d = 1; d < count; ++d) {
    Dim& outer = nest[merged];
    const Dim& inner = nest[d];
    if (outer.accumulator == inner.size * inner.accumulator &&
        outer.gradient == inner.size * inner.gradient) {
      outer = {outer.size * inner.size, inner.accumulator, inner.gradient};
    } else {
      nest[++merged] = inner;
    }
  }
  if (count > 0) count = merged + 1;
  if (count == 0 || (count == 1 && nest[0].accumulator == 1 && nest[0].gradient == 1)) return Merged::kFlat;
  if (count > kMaxDims) return Merged::kTooManyDims;
  layout.dims = static_cast<int32_t>(count);
  for (int64_t d = 0; d < count; ++d) {
    layout.sizes[d] = nest[d].size;
    layout.accumulator_strides[d] = nest[d].accumulator;
    layout.gradient_strides[d] = nest[d].gradient;
  }
  return Merged::kStrided;
}

struct Work {
  std::vector<Task> tasks;
  std::vector<StridedLayout> layouts;
  int64_t elements = 0;  // of all tasks
  int64_t chunks = 0;    // of all tasks

  void clear() {
    tasks.clear();
    layouts.clear();
    elements = 0;
    chunks = 0;
  }
  void push(Task task) {
    task.first = elements;
    task.first_chunk = chunks;
    tasks.push_back(task);
    elements += task.numel;
    chunks += chunks_of(task.numel);
  }
  // The same, with the loop nest that the strides need. Returns false if it has too many dimensions.
  bool push(Task task, int64_t dims, const int64_t* sizes, const int64_t* accumulator_strides,
            const int64_t* gradient_strides) {
    StridedLayout layout;
    const Merged merged = merge_dims(dims, sizes, accumulator_strides, gradient_strides, layout);
    if (merged == Merged::kTooManyDims) return false;
    if (merged == Merged::kStrided) {
      task.layout = static_cast<int32_t>(layouts.size());
      layouts.push_back(layout);
    }
    push(task);
    return true;
  }
};

// A pass over the accumulators of a work that stores partial norms, one per chunk.
struct NormRequest {
  NormKind kind;
  double* partials;
};

struct Partials {
  const double* data;
  int64_t count;
};

// Combines partials of one or several calls to the norm: float, or double if `wide`. nonfinite: 1 if an
// element was not finite, else 0.
struct FinishRequest {
  NormKind kind;
  std::vector<Partials> partials;
  void* norm;
  float* nonfinite;
  bool wide;
};

// Returns whether no two elements share an address, shown by strides that nest: each is at least the span of
// those below it. Sets `dense` if they also leave no gap. Layouts that interleave without nesting are
// refused.
inline bool strides_nest(int64_t dims, const int64_t* sizes, const int64_t* strides, bool& dense) {
  int64_t order[kMaxSizes];
  int64_t count = 0;
  for (int64_t d = 0; d < dims; ++d) {
    if (sizes[d] != 1) order[count++] = d;
  }
  std::sort(order, order + count, [&](int64_t a, int64_t b) { return strides[a] < strides[b]; });
  int64_t span = 1;
  int64_t numel = 1;
  for (int64_t i = 0; i < count; ++i) {
    if (strides[order[i]] < span) return false;
    span += (sizes[order[i]] - 1) * strides[order[i]];
    numel *= sizes[order[i]];
  }
  dense = span == numel;
  return true;
}

// Memory [begin, end) of the tensor at this index.
struct Range {
  int64_t begin, end, index;
};

// Sorts ranges. Returns the index of the first that overlaps the one before it, or their number.
inline size_t sort_ranges(std::vector<Range>& ranges) {
  const auto ascending = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  if (!std::is_sorted(ranges.begin(), ranges.end(), ascending)) {
    std::sort(ranges.begin(), ranges.end(), ascending);
  }
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin < ranges[i - 1].end) return i;
  }
  return ranges.size();
}

// Returns the first range that overlaps [begin, end), or null. Ranges are sorted and disjoint. Most gradients
// lie between two accumulators in the order of the list, so `hint`, the last index found, is tried first.
inline const Range* find_overlap(const Range* ranges, int64_t count, int64_t begin, int64_t end,
                                 int64_t& hint) {
  const auto is_first = [&](int64_t i) {
    return (i == count || ranges[i].end > begin) && (i == 0 || ranges[i - 1].end <= begin);
  };
  if (!is_first(hint)) {
    if (hint < count && is_first(hint + 1)) {
      ++hint;
    } else {
      hint = std::partition_point(ranges, ranges + count, [&](const Range& r) { return r.end <= begin; }) -
             ranges;
    }
  }
  return hint == count || ranges[hint].begin >= end ? nullptr : &ranges[hint];
}

// The work of one call on the rows of a table, after all checks, and the arithmetic of one row: acc <- acc +
// s * (g1 + g2 + ...), summed in the order of the gradients, or their mean.
//
// Gradients are summed in runs of kRowRun, and then the runs' sums, both in order: long sums lose less
// accuracy, and Triton's kernel can process a row's runs in parallel.

constexpr int64_t kRowRun = 64;

// Strides in elements; the elements of a row are contiguous.
struct Table {
  void* data;
  int64_t stride;
  int64_t rows;
  int64_t columns;
  int32_t pair;  // an index into kPairs
};

// Row numbers, int64 or int32.
struct RowNumbers {
  const void* data;
  int64_t stride;
  int64_t count;
  bool wide;

  FUSEDACC_INLINE int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i * stride]
                : static_cast<const int32_t*>(data)[i * stride];
  }
};

// Gradient i belongs to row numbers[i]; `padding` takes none (-1: no padding).
struct RowWork {
  Table table;
  RowNumbers numbers;
  const void* gradients;
  int64_t gradient_stride;
  int64_t padding;
  bool by_frequency;  // add the mean of the gradients
};

template <typename Gradient, typename Accumulator>
struct RowAccumulate {
  using Compute = ComputeOf<Accumulator>;

  ScaleAccumulate<Compute, Accumulator> into;

  FUSEDACC_INLINE explicit RowAccumulate(const Multipliers& by) : into(by) {}

  static FUSEDACC_INLINE Compute first(Gradient gradient) { return widen(gradient); }
  static FUSEDACC_INLINE Compute join(Compute sum, Gradient gradient) { return sum + widen(gradient); }
  static FUSEDACC_INLINE Compute mean(Compute sum, int64_t count) {
    return sum / static_cast<Compute>(count);
  }
  FUSEDACC_INLINE Accumulator add(Compute sum, Accumulator accumulator) const {
    return into.template add<false>(sum, accumulator);
  }
};

}  // namespace fusedacc
