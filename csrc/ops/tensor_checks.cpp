#include "tensor_checks.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace fusedacc {
namespace {

constexpr int64_t kMagic = 0x6663636164657375;
constexpr const char* kOtherDtype = "has a dtype that is not float32, bfloat16, float16 or float64";

[[noreturn]] void fail(const Place& place, const std::string& problem) {
  throw std::runtime_error("fusedacc: " + place.str() + " " + problem);
}

std::string shape_name(const int64_t* sizes, int64_t dims) {
  std::string name = "[";
  for (int64_t d = 0; d < dims; ++d) name += (d ? ", " : "") + std::to_string(sizes[d]);
  return name + "]";
}

Place accumulator_at(int64_t i) { return {"accumulators", i}; }
Place gradient_at(int64_t i) { return {"gradients", i}; }

// The bytes from the first element to the end of the last.
int64_t span_bytes(const TensorView& view, int64_t element) {
  int64_t last = 0;
  for (int64_t d = 0; d < view.dims; ++d) last += (view.sizes[d] - 1) * view.strides[d];
  return (last + 1) * element;
}

bool equal(const int64_t* a, const int64_t* b, int64_t count) {
  for (int64_t d = 0; d < count; ++d) {
    if (a[d] != b[d]) return false;
  }
  return true;
}

}  // namespace

std::string Place::str() const {
  return index < 0 ? std::string(argument) : std::string(argument) + "[" + std::to_string(index) + "]";
}

std::string device_name(int32_t type, int32_t index) {
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(index);
  if (type == aoti_torch_device_type_meta()) return "meta";
  return "another device";
}

TensorView view_of(AtenTensorHandle tensor, Place place) {
  static const int32_t strided = aoti_torch_layout_strided(), cpu = aoti_torch_device_type_cpu();
  TensorView view;
  int32_t layout = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  aoti_torch_get_layout(tensor, &layout);
  if (layout != strided)
    fail(place, "is sparse or of another special layout; only strided tensors can be used");
  bool read = aoti_torch_get_device_type(tensor, &view.device_type) == 0 &&
              aoti_torch_get_dtype(tensor, &view.dtype) == 0 && aoti_torch_get_dim(tensor, &view.dims) == 0 &&
              aoti_torch_get_sizes(tensor, &sizes) == 0 && aoti_torch_get_strides(tensor, &strides) == 0 &&
              aoti_torch_get_data_ptr(tensor, &view.data) == 0;
  view.device_index = -1;
  if (view.device_type != cpu) read = read && aoti_torch_get_device_index(tensor, &view.device_index) == 0;
  if (!read) fail(place, "has no memory that can be read");
  view.sizes = sizes;
  view.strides = strides;
  return view;
}

Dtype dtype_of(const TensorView& view) {
  static const int32_t codes[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(),
                                  aoti_torch_dtype_float16(), aoti_torch_dtype_float64()};
  for (int32_t i = 0; i < 4; ++i) {
    if (view.dtype == codes[i]) return static_cast<Dtype>(i);
  }
  return Dtype::kOther;
}

ScaleArgument scalar_argument(const char* name, AtenTensorHandle tensor, double number,
                              const Beside& beside) {
  if (tensor == nullptr) return {nullptr, number, 0};
  const Place place{name, -1};
  const TensorView view = view_of(tensor, place);
  const Dtype dtype = dtype_of(view);
  if (view.dims != 0) fail(place, "must be a number or a 0-dim tensor");
  if (dtype == Dtype::kOther)
    fail(place, "is a tensor of a dtype that is not float32, bfloat16, float16 or float64");
  if (view.device_type != beside.device_type || view.device_index != beside.device_index) {
    fail(place, "is on " + device_name(view.device_type, view.device_index) + " but " + beside.what + " on " +
                    device_name(beside.device_type, beside.device_index));
  }
  return {view.data, 0, static_cast<int32_t>(dtype)};
}

void AccumulatorTable::pack(const TensorList& accumulators, std::vector<int64_t>& words) {
  static_assert(sizeof(Header) == 7 * 8 && sizeof(Entry) == 5 * 8 && sizeof(Range) == 3 * 8);
  const int64_t count = accumulators.size();
  Header header{kMagic, 0, count, aoti_torch_device_type_cpu(), -1, 0, 0};
  words.resize(7 + 5 * count);
  static thread_local std::vector<Range> ranges;
  ranges.clear();
  for (int64_t i = 0; i < count; ++i) {
    const TensorView view = view_of(accumulators[i], accumulator_at(i));
    const Dtype dtype = dtype_of(view);
    if (dtype == Dtype::kOther) fail(accumulator_at(i), kOtherDtype);
    if (i == 0) {
      header.device_type = view.device_type;
      header.device_index = view.device_index;
    } else if (view.device_type != header.device_type || view.device_index != header.device_index) {
      fail(accumulator_at(i), "is on " + device_name(view.device_type, view.device_index) +
                                  " but accumulators[0] is on " +
                                  device_name(header.device_type, header.device_index));
    }
    bool dense = true;
    int64_t numel = 1;
    for (int64_t d = 0; d < view.dims; ++d) numel *= view.sizes[d];
    if (numel > 0) {
      if (!strides_nest(view.dims, view.sizes, view.strides, dense)) {
        fail(accumulator_at(i), "overlaps itself: strides " + shape_name(view.strides, view.dims) +
                                    " for shape " + shape_name(view.sizes, view.dims));
      }
      const int64_t begin = reinterpret_cast<int64_t>(view.data);
      ranges.push_back({begin, begin + span_bytes(view, element_size(dtype)), i});
    }
    const Entry entry{reinterpret_cast<int64_t>(view.data), numel, view.dims,
                      static_cast<int64_t>(dtype) | static_cast<int64_t>(dense) << 8,
                      static_cast<int64_t>(words.size())};
    std::memcpy(&words[7 + 5 * i], &entry, sizeof(entry));
    words.insert(words.end(), view.sizes, view.sizes + view.dims);
    words.insert(words.end(), view.strides, view.strides + view.dims);
  }
  const auto ascending = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  if (!std::is_sorted(ranges.begin(), ranges.end(), ascending))
    std::sort(ranges.begin(), ranges.end(), ascending);
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin < ranges[i - 1].end) {
      const auto pair = std::minmax(ranges[i].index, ranges[i - 1].index);
      fail(accumulator_at(pair.second), "overlaps " + accumulator_at(pair.first).str() + " in memory");
    }
  }
  header.range_count = static_cast<int64_t>(ranges.size());
  header.first_range = static_cast<int64_t>(words.size());
  const auto* range_words = reinterpret_cast<const int64_t*>(ranges.data());
  words.insert(words.end(), range_words, range_words + 3 * ranges.size());
  header.word_count = static_cast<int64_t>(words.size());
  std::memcpy(words.data(), &header, sizeof(header));
}

AccumulatorTable::AccumulatorTable(const int64_t* words, int64_t count) : words_(words) {
  if (count < 7 || words[0] != kMagic || words[1] != count) {
    throw std::runtime_error("fusedacc: plan was not made by fusedacc::prepare");
  }
  std::memcpy(&header_, words, sizeof(header_));
  entries_ = reinterpret_cast<const Entry*>(words + 7);
  ranges_ = reinterpret_cast<const Range*>(words + header_.first_range);
}

// Most gradients lie between two accumulators in the order of the list, so the last place found is tried
// first.
void AccumulatorTable::check_overlap(const TensorView& gradient, int64_t size, int64_t index,
                                     int64_t& hint) const {
  const int64_t begin = reinterpret_cast<int64_t>(gradient.data);
  const int64_t end = begin + size;
  const int64_t count = header_.range_count;
  // hint: the first range that ends after `begin`.
  const auto is_first = [&](int64_t i) {
    return (i == count || ranges_[i].end > begin) && (i == 0 || ranges_[i - 1].end <= begin);
  };
  if (!is_first(hint)) {
    if (hint < count && is_first(hint + 1)) {
      ++hint;
    } else {
      hint = std::partition_point(ranges_, ranges_ + count, [&](const Range& r) { return r.end <= begin; }) -
             ranges_;
    }
  }
  if (hint == count || ranges_[hint].begin >= end) return;
  const Range& range = ranges_[hint];
  const Entry& own = entries_[index];
  const bool same = range.index == index && own.data == begin && own.dtype() == dtype_of(gradient) &&
                    equal(strides(own), gradient.strides, gradient.dims);
  if (!same) {
    fail(gradient_at(index), "overlaps " + accumulator_at(range.index).str() +
                                 " in memory; a gradient may only share its own accumulator's, and exactly");
  }
}

void AccumulatorTable::match(const TensorList& gradients, const std::vector<bool>& overwrite,
                             Work& work) const {
  const int64_t count = size();
  if (gradients.size() != count) {
    throw std::runtime_error("fusedacc: " + std::to_string(count) + " accumulators but " +
                             std::to_string(gradients.size()) + " gradients");
  }
  const int64_t flags = static_cast<int64_t>(overwrite.size());
  if (flags > 1 && flags != count) {
    throw std::runtime_error("fusedacc: overwrite has " + std::to_string(flags) + " values for " +
                             std::to_string(count) + " accumulators");
  }
  work.clear();
  int64_t hint = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Entry& own = entries_[i];
    const TensorView view = view_of(gradients[i], gradient_at(i));
    if (view.device_type != header_.device_type || view.device_index != header_.device_index) {
      fail(gradient_at(i), "is on " + device_name(view.device_type, view.device_index) +
                               " but its accumulator is on " + device_name(device_type(), device_index()));
    }
    if (view.dims != own.dims || !equal(view.sizes, sizes(own), own.dims)) {
      fail(gradient_at(i), "has shape " + shape_name(view.sizes, view.dims) + " but its accumulator has " +
                               shape_name(sizes(own), own.dims));
    }
    const Dtype dtype = dtype_of(view);
    const int32_t pair = find_pair(dtype, own.dtype());
    if (pair < 0) {
      fail(gradient_at(i), std::string("has ") + dtype_name(dtype) + " and its accumulator " +
                               dtype_name(own.dtype()) + "; allowed: " + kAllowedPairs);
    }
    if (own.numel == 0) continue;
    Task task{reinterpret_cast<void*>(own.data),
              view.data,
              own.numel,
              0,
              pair,
              -1,
              flags == 0 ? false : static_cast<bool>(overwrite[flags == 1 ? 0 : i])};
    if (own.dense() && equal(view.strides, strides(own), own.dims)) {
      check_overlap(view, own.numel * element_size(dtype), i, hint);
    } else {
      check_overlap(view, span_bytes(view, element_size(dtype)), i, hint);
      StridedLayout layout;
      switch (merge_dims(view.dims, view.sizes, strides(own), view.strides, layout)) {
        case Merged::kFlat:
          break;
        case Merged::kStrided:
          task.layout = static_cast<int32_t>(work.layouts.size());
          work.layouts.push_back(layout);
          break;
        case Merged::kTooManyDims:
          fail(gradient_at(i),
               "and its accumulator need a loop over more than " + std::to_string(kMaxDims) + " dimensions");
      }
    }
    work.push(task);
  }
}

void read_tensors(const TensorList& tensors, Work& work, int32_t& device_type, int32_t& device_index) {
  work.clear();
  device_type = aoti_torch_device_type_cpu();
  device_index = -1;
  for (int64_t i = 0; i < tensors.size(); ++i) {
    const Place place{"tensors", i};
    const TensorView view = view_of(tensors[i], place);
    const Dtype dtype = dtype_of(view);
    if (dtype == Dtype::kOther) fail(place, kOtherDtype);
    if (i == 0) {
      device_type = view.device_type;
      device_index = view.device_index;
    } else if (view.device_type != device_type || view.device_index != device_index) {
      fail(place, "is on " + device_name(view.device_type, view.device_index) + " but tensors[0] is on " +
                      device_name(device_type, device_index));
    }
    int64_t numel = 1;
    for (int64_t d = 0; d < view.dims; ++d) numel *= view.sizes[d];
    if (numel == 0) continue;
    Task task{view.data, view.data, numel, 0, find_pair(dtype, dtype), -1, false};
    StridedLayout layout;
    switch (merge_dims(view.dims, view.sizes, view.strides, view.strides, layout)) {
      case Merged::kFlat:
        break;
      case Merged::kStrided:
        task.layout = static_cast<int32_t>(work.layouts.size());
        work.layouts.push_back(layout);
        break;
      case Merged::kTooManyDims:
        fail(place, "needs a loop over more than " + std::to_string(kMaxDims) + " dimensions");
    }
    work.push(task);
  }
}

}  // namespace fusedacc
