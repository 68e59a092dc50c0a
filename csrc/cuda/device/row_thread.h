// The work of one thread: some columns of one row of a table. Host and device, torch-free, like
// accumulate_block.h.
//
// Row numbers are sorted, so a row's gradients are adjacent, in runs of kRowRun from its first place on.
// Every thread determines from the sorted numbers where runs begin. Rows with one run are finished in one
// launch. The runs of longer rows store their sums in a separate table, which a second launch adds up.
#pragma once

#include <type_traits>

#include "../../common/work.h"
#include "accumulate_block.h"

namespace fusedacc::cuda {

// Arguments of one launch. sums: for long rows, sums_needed() elements of the computation's dtype.
struct RowArguments {
  RowWork work;
  ScaleArgument scale;
  void* sums;
};

// Among the runs of long rows that begin in one stretch of kRowRun places, at most one is a row's first, and
// at most one is not.
constexpr int64_t kRunSlots = 2;
FUSEDACC_INLINE int64_t stretches(int64_t numbers) { return (numbers + kRowRun - 1) / kRowRun; }
FUSEDACC_INLINE int64_t sum_stride(int64_t columns) { return (columns + 7) / 8 * 8; }  // stays aligned
inline int64_t sums_needed(const RowWork& work) {
  const int64_t numbers = work.numbers.count;
  return numbers > kRowRun ? kRunSlots * stretches(numbers) * sum_stride(work.table.columns) : 0;
}
FUSEDACC_INLINE int64_t run_slot(int64_t place, bool first) {
  return kRunSlots * (place / kRowRun) + (first ? 0 : 1);
}

// Returns the first of the places [low, high) that holds `row` or a row above it; `high` if none does.
FUSEDACC_INLINE int64_t first_place(const RowNumbers& numbers, int64_t row, int64_t low, int64_t high) {
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (numbers[middle] < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Numbers that are no row are skipped: a GPU cannot raise.
FUSEDACC_INLINE bool is_row(const RowWork& work, int64_t row) {
  return row >= 0 && row < work.table.rows && row != work.padding;
}

template <int32_t pair>
struct RowKernels {
  using Gradient = GradientOf<pair>;
  using Accumulator = AccumulatorOf<pair>;
  using Functor = RowAccumulate<Gradient, Accumulator>;
  using Compute = typename Functor::Compute;

  // Columns per thread if all rows are aligned.
  static constexpr int32_t kStep = PairKernels<pair>::kStep;
  // Gradients whose loads are issued before the first is used.
  static constexpr int32_t kAhead = 4;

  template <int32_t step>
  static FUSEDACC_INLINE Packed<Gradient, step> gradient(const RowWork& work, int64_t place, int64_t column) {
    const int64_t position = work.numbers.order[place];
    return load<step>(static_cast<const Gradient*>(work.gradients) + position * work.gradient_stride +
                      column);
  }

  template <int32_t step>
  static FUSEDACC_INLINE void join(Packed<Compute, step>& sums, const Packed<Gradient, step>& fresh) {
    FUSEDACC_UNROLL
    for (int32_t i = 0; i < step; ++i) sums.values[i] = Functor::join(sums.values[i], fresh.values[i]);
  }

  template <int32_t step>
  static FUSEDACC_INLINE void add(const RowArguments& arguments, int64_t row, int64_t column,
                                  Packed<Compute, step>& sums, int64_t count) {
    const Table& table = arguments.work.table;
    const Functor functor(Multipliers{read_scale<Compute>(arguments.scale), 1});
    Accumulator* to = static_cast<Accumulator*>(table.data) + row * table.stride + column;
    auto group = load<step>(static_cast<const Accumulator*>(to));
    FUSEDACC_UNROLL
    for (int32_t i = 0; i < step; ++i) {
      if (arguments.work.by_frequency) sums.values[i] = Functor::mean(sums.values[i], count);
      group.values[i] = functor.add(sums.values[i], group.values[i]);
    }
    store(to, group);
  }

  static FUSEDACC_INLINE Compute* sums_of(const RowArguments& arguments, int64_t slot, int64_t column) {
    return static_cast<Compute*>(arguments.sums) + slot * sum_stride(arguments.work.table.columns) + column;
  }

  // Handles the run that begins at a place, if any.
  template <int32_t step>
  static FUSEDACC_INLINE void run(const RowArguments& arguments, int64_t place, int64_t column) {
    const RowWork& work = arguments.work;
    const RowNumbers& numbers = work.numbers;
    const int64_t row = numbers[place];
    if (!is_row(work, row)) return;
    const bool first = place == 0 || numbers[place - 1] != row;
    if (!first) {
      if (place < kRowRun || numbers[place - kRowRun] != row) return;
      if ((place - first_place(numbers, row, 0, place - kRowRun)) % kRowRun != 0) return;
    }
    const auto own = gradient<step>(work, place, column);
    Packed<Compute, step> sums;
    FUSEDACC_UNROLL
    for (int32_t i = 0; i < step; ++i) sums.values[i] = Functor::first(own.values[i]);
    const int64_t limit = place + kRowRun < numbers.count ? place + kRowRun : numbers.count;
    int64_t at = place + 1;
    FUSEDACC_ROLLED
    for (; at + kAhead <= limit && numbers[at + kAhead - 1] == row; at += kAhead) {
      Packed<Gradient, step> fresh[kAhead];
      FUSEDACC_UNROLL
      for (int32_t k = 0; k < kAhead; ++k) fresh[k] = gradient<step>(work, at + k, column);
      FUSEDACC_UNROLL
      for (int32_t k = 0; k < kAhead; ++k) join<step>(sums, fresh[k]);
    }
    FUSEDACC_ROLLED
    for (; at < limit && numbers[at] == row; ++at) join<step>(sums, gradient<step>(work, at, column));
    const bool goes_on = at == place + kRowRun && at < numbers.count && numbers[at] == row;
    if (first && !goes_on) {
      add<step>(arguments, row, column, sums, at - place);
    } else {
      store(sums_of(arguments, run_slot(place, first), column), sums);
    }
  }

  // Handles the long row that begins in a stretch of places, if any; it also covers the end of the stretch.
  template <int32_t step>
  static FUSEDACC_INLINE void long_row(const RowArguments& arguments, int64_t stretch, int64_t column) {
    const RowWork& work = arguments.work;
    const RowNumbers& numbers = work.numbers;
    const int64_t last = (stretch + 1) * kRowRun - 1;
    if (last >= numbers.count) return;
    const int64_t row = numbers[last];
    if (!is_row(work, row)) return;
    const int64_t begin = first_place(numbers, row, 0, last);
    if (begin < stretch * kRowRun || begin + kRowRun >= numbers.count || numbers[begin + kRowRun] != row) {
      return;
    }
    const int64_t end = first_place(numbers, row + 1, begin + kRowRun, numbers.count);
    const auto sums_at = [&](int64_t place) {
      return load<step, Compute>(sums_of(arguments, run_slot(place, place == begin), column));
    };
    auto sums = sums_at(begin);
    FUSEDACC_ROLLED
    for (int64_t place = begin + kRowRun; place < end; place += kRowRun) {
      const auto more = sums_at(place);
      FUSEDACC_UNROLL
      for (int32_t i = 0; i < step; ++i) sums.values[i] += more.values[i];
    }
    add<step>(arguments, row, column, sums, end - begin);
  }

  static FUSEDACC_INLINE int64_t threads_of(int64_t columns, bool aligned) {
    return aligned ? (columns + kStep - 1) / kStep : columns;
  }

  // Runs thread number `thread` of a launch over all places, or all stretches; neighbours have neighbouring
  // columns.
  template <bool aligned, bool long_rows>
  static FUSEDACC_INLINE void thread(const RowArguments& arguments, int64_t thread) {
    const int64_t columns = arguments.work.table.columns;
    const int64_t across = threads_of(columns, aligned);
    const int64_t numbers = arguments.work.numbers.count;
    int64_t down, column;
    if (thread <= 0x7fffffff && across <= 0x7fffffff) {  // several times faster
      down = static_cast<uint32_t>(thread) / static_cast<uint32_t>(across);
      column = static_cast<uint32_t>(thread) % static_cast<uint32_t>(across);
    } else {
      down = thread / across;
      column = thread % across;
    }
    if (down >= (long_rows ? stretches(numbers) : numbers)) return;
    const auto go = [&](auto width, int64_t from) {
      if constexpr (long_rows) {
        long_row<decltype(width)::value>(arguments, down, from);
      } else {
        run<decltype(width)::value>(arguments, down, from);
      }
    };
    using One = std::integral_constant<int32_t, 1>;
    if constexpr (!aligned) {
      go(One{}, column);
    } else {
      column *= kStep;
      if (column + kStep <= columns) {
        go(std::integral_constant<int32_t, kStep>{}, column);
      } else {
        FUSEDACC_ROLLED
        for (; column < columns; ++column) go(One{}, column);
      }
    }
  }
};

// Returns whether every row of both sides can be moved in steps of 16 bytes of the wider side.
inline bool rows_aligned(const RowWork& work) {
  const DtypePair pair = kPairs[work.table.pair];
  const int64_t wide = std::max(element_size(pair.accumulator), element_size(pair.gradient));
  const auto fits = [&](const void* data, int64_t stride, Dtype dtype) {
    const int64_t bytes = kVectorBytes / wide * element_size(dtype);
    return misalignment(data, static_cast<int32_t>(bytes)) == 0 && stride * element_size(dtype) % bytes == 0;
  };
  return fits(work.table.data, work.table.stride, pair.accumulator) &&
         fits(work.gradients, work.gradient_stride, pair.gradient);
}

}  // namespace fusedacc::cuda
