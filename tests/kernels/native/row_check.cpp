// Runs the bodies of the CUDA kernels that add into the rows of a table on the host, thread by thread, against
// sums made one by one. Prints what fails and exits with 1.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "cuda/device/row_thread.h"

#include "check.h"

using namespace fusedacc;

namespace {

// Row numbers of which many are equal, some are no rows, and some are of rows with hundreds of gradients.
std::vector<int64_t> random_numbers(int64_t count, int64_t rows) {
  std::vector<int64_t> numbers(static_cast<size_t>(count));
  const int64_t favourite = random_below(rows), other = random_below(rows);
  const int64_t often = random_below(4);
  for (int64_t& number : numbers) {
    const int64_t die = random_below(8);
    number = die < often ? favourite : die == 4 ? other : random_below(rows + 1) - random_below(2);
  }
  return numbers;
}

template <int32_t pair>
struct Case {
  using Kernels = cuda::RowKernels<pair>;
  using Gradient = typename Kernels::Gradient;
  using Accumulator = typename Kernels::Accumulator;
  using Functor = typename Kernels::Functor;
  using Compute = typename Kernels::Compute;

  int64_t rows, columns, table_stride, gradient_stride, padding;
  Noise noise;
  bool by_frequency;
  std::vector<int64_t> numbers;
  std::vector<Accumulator> table;
  std::vector<Gradient> gradients;

  void expect(double scale) {
    std::map<int64_t, std::vector<int64_t>> positions;
    for (size_t i = 0; i < numbers.size(); ++i) positions[numbers[i]].push_back(static_cast<int64_t>(i));
    const Functor functor(Multipliers{scale, 1, noise});
    for (const auto& [row, own] : positions) {
      if (row < 0 || row >= rows || row == padding) continue;
      for (int64_t column = 0; column < columns; ++column) {
        Compute total = 0;
        for (size_t begin = 0; begin < own.size(); begin += kRowRun) {
          const size_t end = std::min(own.size(), begin + kRowRun);
          Compute run = 0;
          for (size_t i = begin; i < end; ++i) {
            const Gradient fresh = gradients[static_cast<size_t>(own[i] * gradient_stride + column)];
            run = i == begin ? Functor::first(fresh) : Functor::join(run, fresh);
          }
          total = begin == 0 ? run : total + run;
        }
        if (by_frequency) total = Functor::mean(total, static_cast<int64_t>(own.size()));
        const int64_t place = row * table_stride + column;
        Accumulator& element = table[static_cast<size_t>(place)];
        element = functor.add(total, element, functor.into.bits_at(place));
      }
    }
  }

  template <bool aligned>
  void run(std::vector<Accumulator>& target, double scale, bool wide) const {
    std::vector<std::pair<int64_t, int64_t>> places;
    for (size_t i = 0; i < numbers.size(); ++i) places.push_back({numbers[i], static_cast<int64_t>(i)});
    std::stable_sort(places.begin(), places.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<int64_t> sorted, order;
    std::vector<int32_t> narrow_sorted;
    for (const auto& [row, position] : places) {
      sorted.push_back(row);
      narrow_sorted.push_back(static_cast<int32_t>(row));
      order.push_back(position);
    }
    const int64_t count = static_cast<int64_t>(numbers.size());
    const void* data = wide ? static_cast<const void*>(sorted.data()) : narrow_sorted.data();
    cuda::RowArguments arguments{};
    arguments.work = {{target.data(), table_stride, rows, columns, pair},
                      {data, 1, count, wide, order.data()},
                      gradients.data(),
                      gradient_stride,
                      padding,
                      by_frequency,
                      noise};
    arguments.scale = {nullptr, scale, 0};
    std::vector<Compute> sums(static_cast<size_t>(cuda::sums_needed(arguments.work)));
    arguments.sums = sums.data();
    const int64_t across = Kernels::threads_of(columns, aligned);
    // More threads than there is work for, as in a last block.
    for (int64_t thread = 0; thread < count * across + 5; ++thread) {
      Kernels::template thread<aligned, false>(arguments, thread);
    }
    for (int64_t thread = 0; thread < cuda::stretches(count) * across + 5; ++thread) {
      Kernels::template thread<aligned, true>(arguments, thread);
    }
  }

  static void check(int64_t count) {
    Case one;
    one.rows = 1 + random_below(40);
    one.columns = 1 + random_below(20);
    one.table_stride = (one.columns + 7) / 8 * 8 + 8 * random_below(2);
    one.gradient_stride = (one.columns + 7) / 8 * 8;
    one.padding = random_below(2) ? random_below(one.rows) : -1;
    one.by_frequency = random_below(2);
    one.noise = {generator(), random_stream()};
    one.numbers = random_numbers(count, one.rows);
    one.table = random_elements<Accumulator>(one.rows * one.table_stride);
    one.gradients = random_elements<Gradient>(count * one.gradient_stride);
    const double scale = static_cast<double>(random_below(100)) / 7;
    auto aligned = one.table, unaligned = one.table;
    one.template run<true>(aligned, scale, random_below(2));
    one.template run<false>(unaligned, scale, random_below(2));
    one.expect(scale);
    const size_t bytes = one.table.size() * sizeof(Accumulator);
    CHECK(std::memcmp(aligned.data(), one.table.data(), bytes) == 0);
    CHECK(std::memcmp(unaligned.data(), one.table.data(), bytes) == 0);
  }
};

template <int32_t... pairs>
void check_all(std::integer_sequence<int32_t, pairs...>) {
  for (const int64_t count : {1, 2, 63, 64, 65, 127, 128, 129, 193, 700}) {
    for (int32_t repeat = 0; repeat < 6; ++repeat) (Case<pairs>::check(count), ...);
  }
}

}  // namespace

int main() {
  check_all(std::make_integer_sequence<int32_t, kPairCount>());
  std::printf("runs of %d\n", static_cast<int>(kRowRun));
  return 0;
}
