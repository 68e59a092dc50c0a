#include "cpu.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fusedacc::cpu {
namespace {

// Columns per thread if most gradients belong to one row.
constexpr int64_t kTileColumns = 128;

// Row numbers and their positions, in ascending order; equal numbers keep their order.
using Places = std::vector<RowPlace>;

// Radix sort, the lowest digit first, with as many digits as the largest number has.
void sort(Places& places, int64_t rows) {
  constexpr int32_t kDigit = 8, kValues = 1 << kDigit;
  static thread_local Places other;
  other.resize(places.size());
  for (int32_t shift = 0; shift < 63 && (rows - 1) >> shift > 0; shift += kDigit) {
    const auto digit = [&](const RowPlace& place) { return place.row >> shift & (kValues - 1); };
    int64_t next[kValues] = {};
    for (const RowPlace& place : places) ++next[digit(place)];
    int64_t before = 0;
    for (int64_t& first : next) before += std::exchange(first, before);
    for (const RowPlace& place : places) other[next[digit(place)]++] = place;
    places.swap(other);
  }
}

// Throws for a number that is no row, before anything else.
const Places& sorted(const RowNumbers& numbers, int64_t rows, int64_t padding) {
  static thread_local Places places;
  places.clear();
  for (int64_t i = 0; i < numbers.count; ++i) {
    const int64_t row = numbers[i];
    if (row < 0 || row >= rows) {
      throw std::runtime_error("fusedacc: indices[" + std::to_string(i) + "] is " + std::to_string(row) +
                               "; allowed: 0 to " + std::to_string(rows - 1));
    }
    if (row != padding) places.push_back({row, i});
  }
  sort(places, rows);
  return places;
}

// Returns the first place of each row's numbers, and their end.
const std::vector<int64_t>& segments_of(const Places& places) {
  static thread_local std::vector<int64_t> firsts;
  firsts.clear();
  const int64_t count = static_cast<int64_t>(places.size());
  for (int64_t i = 0; i < count; ++i) {
    if (i == 0 || places[i].row != places[i - 1].row) firsts.push_back(i);
  }
  firsts.push_back(count);
  return firsts;
}

int64_t longest(const std::vector<int64_t>& firsts) {
  int64_t most = 0;
  for (size_t i = 1; i < firsts.size(); ++i) most = std::max(most, firsts[i] - firsts[i - 1]);
  return most;
}

void* row_of(const Table& table, int64_t row) {
  const int64_t size = element_size(kPairs[table.pair].accumulator);
  return static_cast<char*>(table.data) + row * table.stride * size;
}

}  // namespace

void add_rows(const RowWork& work, double scale) {
  const Places& places = sorted(work.numbers, work.table.rows, work.padding);
  if (places.empty() || work.table.columns == 0) return;
  const std::vector<int64_t>& firsts = segments_of(places);
  const int64_t count = firsts.back();
  // Threads take whole rows, unless one row has so many gradients that the others would wait for it.
  const int64_t width = longest(firsts) * 8 > count ? kTileColumns : work.table.columns;
  const int64_t tiles = (work.table.columns + width - 1) / width;
  const Loops::AddRow add_row = loops().add_row[work.table.pair];
  // All tiles' places form one line, tile after tile; a row belongs to the part that has its first place.
  parallel_for(count * tiles, std::max<int64_t>(1, kGrain / width), [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin / count; tile * count < end; ++tile) {
      const int64_t column = tile * width;
      const int64_t columns_end = std::min(column + width, work.table.columns);
      auto first = std::lower_bound(firsts.begin(), firsts.end(), begin - tile * count);
      for (; *first < count && *first < end - tile * count; ++first) {
        const RowGradients gradients{work.gradients, work.gradient_stride, &places[*first],
                                     first[1] - first[0]};
        void* row = row_of(work.table, gradients.places->row);
        add_row(row, gradients, column, columns_end, {scale, 1}, work.by_frequency);
      }
    }
  });
}

}  // namespace fusedacc::cpu
