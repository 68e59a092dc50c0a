#include "tensor_checks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace fusedacc {
namespace {

struct Kept {
  bool keep = false;
  std::vector<std::pair<std::unique_ptr<AtenTensorHandle[]>, size_t>> lists;
};
thread_local Kept kept;

void delete_all(const AtenTensorHandle* handles, size_t size) {
  for (size_t i = 0; i < size; ++i) aoti_torch_delete_tensor_object(handles[i]);
}

constexpr int64_t kMagic = 0x6663636164657375;

Place accumulator_at(int64_t i) { return {"accumulators", i}; }
Place gradient_at(int64_t i) { return {"gradients", i}; }

bool equal(const int64_t* a, const int64_t* b, int64_t count) {
  for (int64_t d = 0; d < count; ++d) {
    if (a[d] != b[d]) return false;
  }
  return true;
}

int64_t numel_of(const TensorView& view) {
  int64_t numel = 1;
  for (int64_t d = 0; d < view.dims; ++d) numel *= view.sizes[d];
  return numel;
}

// The shims' dtype numbers, in the order of Dtype.
const auto& codes() {
#define FUSEDACC_CODE(name, ...) aoti_torch_dtype_##name(),
  static const std::array<int32_t, kDtypeCount> numbers{FUSEDACC_DTYPES(FUSEDACC_CODE)};
#undef FUSEDACC_CODE
  return numbers;
}

std::string dtype_names() {
  std::string names;
  for (int32_t i = 0; i < kDtypeCount; ++i) {
    if (i > 0) names += i + 1 < kDtypeCount ? ", " : " or ";
    names += kDtypes[i].name;
  }
  return names;
}

// As in fusedacc/kernels/dtypes.py: sorted by the accumulator's name, then by the gradient's.
std::string allowed_pairs() {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const DtypePair& pair : kPairs) {
    if (pair.accumulator != stored_as(pair.accumulator)) continue;
    pairs.emplace_back(dtype_name(pair.accumulator), dtype_name(pair.gradient));
  }
  std::sort(pairs.begin(), pairs.end());
  std::string names;
  for (const auto& [accumulator, gradient] : pairs) {
    names += (names.empty() ? "" : ", ") + gradient + " into " + accumulator;
  }
  return names;
}

[[noreturn]] void fail_dtype(const Place& place, const char* what) {
  fail(place, std::string(what) + " a dtype that is not " + dtype_names());
}

}  // namespace

void TensorList::drop(std::unique_ptr<AtenTensorHandle[]> handles, size_t size) {
  if (kept.keep) {
    kept.lists.emplace_back(std::move(handles), size);
  } else {
    delete_all(handles.get(), size);
  }
}

std::string Device::name() const {
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(index);
  if (type == aoti_torch_device_type_meta()) return "meta";
  return "another device";
}

AtenTensorHandle empty(std::initializer_list<int64_t> sizes, int32_t dtype, const Device& device) {
  const int64_t strides[] = {sizes.size() == 2 ? sizes.end()[-1] : 1, 1};
  AtenTensorHandle handle = nullptr;
  FUSEDACC_SHIM(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype,
                                         device.type, device.index < 0 ? 0 : device.index, &handle));
  return handle;
}

void* data_of(const OwnedTensor& tensor) {
  void* data = nullptr;
  FUSEDACC_SHIM(aoti_torch_get_data_ptr(tensor.get(), &data));
  return data;
}

std::string Place::str() const {
  return index < 0 ? std::string(argument) : std::string(argument) + "[" + std::to_string(index) + "]";
}

void fail(const Place& place, const std::string& problem) {
  throw std::runtime_error("fusedacc: " + place.str() + " " + problem);
}

std::string shape_name(const int64_t* sizes, int64_t dims) {
  std::string name = "[";
  for (int64_t d = 0; d < dims; ++d) name += (d ? ", " : "") + std::to_string(sizes[d]);
  return name + "]";
}

int64_t TensorView::span(Dtype dtype) const {
  int64_t last = 0;
  for (int64_t d = 0; d < dims; ++d) last += (sizes[d] - 1) * strides[d];
  return (last + 1) * element_size(dtype);
}

TensorView view_of(AtenTensorHandle tensor, const Place& place) {
  static const int32_t strided = aoti_torch_layout_strided(), cpu = aoti_torch_device_type_cpu();
  TensorView view;
  int32_t layout = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  aoti_torch_get_layout(tensor, &layout);
  if (layout != strided)
    fail(place, "is sparse or of another special layout; only strided tensors can be used");
  Device& device = view.device;
  bool read = aoti_torch_get_device_type(tensor, &device.type) == 0 &&
              aoti_torch_get_dtype(tensor, &view.dtype) == 0 && aoti_torch_get_dim(tensor, &view.dims) == 0 &&
              aoti_torch_get_sizes(tensor, &sizes) == 0 && aoti_torch_get_strides(tensor, &strides) == 0 &&
              aoti_torch_get_data_ptr(tensor, &view.data) == 0;
  device.index = -1;
  if (device.type != cpu) read = read && aoti_torch_get_device_index(tensor, &device.index) == 0;
  if (!read) fail(place, "has no memory that can be read");
  view.sizes = sizes;
  view.strides = strides;
  return view;
}

TensorView view_of(AtenTensorHandle tensor, const Place& place, int64_t dims) {
  const TensorView view = view_of(tensor, place);
  if (view.dims != dims) {
    fail(place, "has " + std::to_string(view.dims) + " dimensions; it must have " + std::to_string(dims));
  }
  return view;
}

Dtype dtype_of(const TensorView& view) {
  const auto code = std::find(codes().begin(), codes().end(), view.dtype);
  return code == codes().end() ? Dtype::kOther : static_cast<Dtype>(code - codes().begin());
}

int32_t code_of(Dtype dtype) { return codes()[static_cast<int32_t>(dtype)]; }

void check_beside(const Place& place, const TensorView& view, const Beside& beside) {
  if (view.device != beside.device) {
    fail(place, "is on " + view.device.name() + " but " + beside.what + " on " + beside.device.name());
  }
}

void check_on_cpu(const Place& place, const TensorView& view) {
  if (view.device != Device::cpu()) fail(place, "is on " + view.device.name() + "; it must be on cpu");
}

int32_t checked_pair(const Place& place, Dtype gradient, const char* accumulator, Dtype own) {
  const int32_t pair = find_pair(gradient, own);
  if (pair < 0) {
    fail(place, std::string("has ") + dtype_name(gradient) + " and " + accumulator + " " + dtype_name(own) +
                    "; allowed: " + allowed_pairs());
  }
  return pair;
}

bool overlap(const TensorView& a, const TensorView& b) {
  if (numel_of(a) == 0 || numel_of(b) == 0) return false;
  const auto *first = static_cast<const char*>(a.data), *second = static_cast<const char*>(b.data);
  return first < second + b.span(dtype_of(b)) && second < first + a.span(dtype_of(a));
}

ScaleArgument scalar_argument(const char* name, AtenTensorHandle tensor, double number,
                              const Beside& beside) {
  if (tensor == nullptr) return {nullptr, number, 0};
  const TensorView view = view_of(tensor, name);
  const Dtype dtype = dtype_of(view);
  if (view.dims != 0) fail(name, "must be a number or a 0-dim tensor");
  if (dtype == Dtype::kOther) fail_dtype(name, "is a tensor of");
  check_beside(name, view, beside);
  return {view.data, 0, static_cast<int32_t>(dtype)};
}

void AccumulatorTable::pack(const TensorList& accumulators, std::vector<int64_t>& words) {
  static_assert(sizeof(Header) == 7 * 8 && sizeof(Entry) == 5 * 8 && sizeof(Range) == 3 * 8);
  const int64_t count = accumulators.size();
  Device device = Device::cpu();
  words.resize(7 + 5 * count);
  static thread_local std::vector<Range> ranges;
  ranges.clear();
  for (int64_t i = 0; i < count; ++i) {
    const TensorView view = view_of(accumulators[i], accumulator_at(i));
    const Dtype dtype = dtype_of(view);
    if (dtype == Dtype::kOther) fail_dtype(accumulator_at(i), "has");
    if (i == 0) device = view.device;
    check_beside(accumulator_at(i), view, {"accumulators[0] is", device});
    bool dense = true;
    const int64_t numel = numel_of(view);
    if (numel > 0) {
      if (!strides_nest(view.dims, view.sizes, view.strides, dense)) {
        fail(accumulator_at(i), "overlaps itself: strides " + shape_name(view.strides, view.dims) +
                                    " for shape " + shape_name(view.sizes, view.dims));
      }
      const int64_t begin = reinterpret_cast<int64_t>(view.data);
      ranges.push_back({begin, begin + view.span(dtype), i});
    }
    const Entry entry{reinterpret_cast<int64_t>(view.data), numel, view.dims,
                      static_cast<int64_t>(dtype) | static_cast<int64_t>(dense) << 8,
                      static_cast<int64_t>(words.size())};
    std::memcpy(&words[7 + 5 * i], &entry, sizeof(entry));
    words.insert(words.end(), view.sizes, view.sizes + view.dims);
    words.insert(words.end(), view.strides, view.strides + view.dims);
  }
  const size_t meeting = sort_ranges(ranges);
  if (meeting < ranges.size()) {
    const auto pair = std::minmax(ranges[meeting].index, ranges[meeting - 1].index);
    fail(accumulator_at(pair.second), "overlaps " + accumulator_at(pair.first).str() + " in memory");
  }
  const int64_t first_range = static_cast<int64_t>(words.size()), apart = static_cast<int64_t>(ranges.size());
  const auto* range_words = reinterpret_cast<const int64_t*>(ranges.data());
  words.insert(words.end(), range_words, range_words + 3 * ranges.size());
  const Header header{kMagic,     static_cast<int64_t>(words.size()), count, device.type, device.index, apart,
                      first_range};
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

void AccumulatorTable::check_overlap(const TensorView& gradient, int64_t size, int64_t index,
                                     int64_t& hint) const {
  const int64_t begin = reinterpret_cast<int64_t>(gradient.data);
  const Range* range = find_overlap(ranges_, header_.range_count, begin, begin + size, hint);
  if (range == nullptr) return;
  const Entry& own = entries_[index];
  const bool same = range->index == index && own.data == begin && own.dtype() == dtype_of(gradient) &&
                    equal(strides(own), gradient.strides, gradient.dims);
  if (!same) {
    fail(gradient_at(index), "overlaps " + accumulator_at(range->index).str() +
                                 " in memory; a gradient may only share its own accumulator's, and exactly");
  }
}

void AccumulatorTable::match(const TensorList& gradients, const std::vector<bool>& overwrite,
                             const std::vector<int64_t>& streams, Work& work) const {
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
  const bool stochastically = !streams.empty();
  if (stochastically && static_cast<int64_t>(streams.size()) != count) {
    throw std::runtime_error("fusedacc: streams has " + std::to_string(streams.size()) + " values for " +
                             std::to_string(count) + " accumulators");
  }
  work.clear();
  int64_t hint = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Entry& own = entries_[i];
    const TensorView view = view_of(gradients[i], gradient_at(i));
    check_beside(gradient_at(i), view, {"its accumulator is", device()});
    if (view.dims != own.dims || !equal(view.sizes, sizes(own), own.dims)) {
      fail(gradient_at(i), "has shape " + shape_name(view.sizes, view.dims) + " but its accumulator has " +
                               shape_name(sizes(own), own.dims));
    }
    const Dtype dtype = dtype_of(view);
    int32_t pair = checked_pair(gradient_at(i), dtype, "its accumulator", own.dtype());
    if (stochastically) pair = stochastic(pair);
    if (pair < 0) {
      fail(gradient_at(i), std::string("is added to its accumulator of ") + dtype_name(own.dtype()) +
                               "; only sums of bfloat16 can be rounded stochastically");
    }
    if (own.numel == 0) continue;
    Task task{reinterpret_cast<void*>(own.data),
              view.data,
              own.numel,
              0,
              pair,
              -1,
              flags == 0 ? false : static_cast<bool>(overwrite[flags == 1 ? 0 : i])};
    if (stochastically) task.stream = static_cast<uint64_t>(streams[i]);
    if (own.dense() && equal(view.strides, strides(own), own.dims)) {
      check_overlap(view, own.numel * element_size(dtype), i, hint);
      work.push(task);
    } else {
      check_overlap(view, view.span(dtype), i, hint);
      if (!work.push(task, view.dims, view.sizes, strides(own), view.strides)) {
        fail(gradient_at(i),
             "and its accumulator need a loop over more than " + std::to_string(kMaxDims) + " dimensions");
      }
    }
  }
}

Device read_tensors(const TensorList& tensors, Work& work) {
  work.clear();
  Device device = Device::cpu();
  for (int64_t i = 0; i < tensors.size(); ++i) {
    const Place place{"tensors", i};
    const TensorView view = view_of(tensors[i], place);
    const Dtype dtype = dtype_of(view);
    const int32_t pair = find_pair(dtype, dtype);
    if (pair < 0) fail_dtype(place, "has");
    if (i == 0) device = view.device;
    check_beside(place, view, {"tensors[0] is", device});
    const int64_t numel = numel_of(view);
    if (numel == 0) continue;
    if (!work.push({view.data, view.data, numel, 0, pair, -1, false}, view.dims, view.sizes, view.strides,
                   view.strides)) {
      fail(place, "needs a loop over more than " + std::to_string(kMaxDims) + " dimensions");
    }
  }
  return device;
}

}  // namespace fusedacc

// Recent torch takes the GIL when a tensor loses its last reference outside Python: inside an operator, which
// runs without the GIL, once per tensor, at half of the cost of a whole call on small tensors. A caller that
// holds the GIL brackets its call with these two functions, and the references are dropped in the second.
extern "C" __attribute__((visibility("default"))) void fusedacc_keep_references() {
  fusedacc::kept.keep = true;
}

extern "C" __attribute__((visibility("default"))) void fusedacc_drop_references() {
  fusedacc::kept.keep = false;
  for (const auto& [handles, size] : fusedacc::kept.lists) fusedacc::delete_all(handles.get(), size);
  fusedacc::kept.lists.clear();
}
