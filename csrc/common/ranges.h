// The memory of tensors, and who overlaps whom. Torch-free, pure host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fusedacc {

// [begin, end), of the tensor at this index.
struct Range {
  int64_t begin, end, index;
};

// Sorts ranges. Returns the place of the first that overlaps the one before it; their number if none does.
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

// The range that [begin, end) overlaps first, or null, of ranges that are sorted and apart. Most gradients
// lie between two accumulators in the order of the list, so `hint`, the last place found, is tried first.
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

}  // namespace fusedacc
