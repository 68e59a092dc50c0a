// Runs csrc/cuda/lists.cpp on the host, on a torch made up here: how many launches the end of a norm takes, by
// the kernels' own bodies, and that devices are torch's guard's. Prints what fails and exits with 1.
#include "cuda/lists.cpp"

#include <cmath>
#include <limits>
#include <vector>

#include "cuda/device/norm_block.h"

#include "check.h"

using namespace fusedacc;

namespace {

int guards, reading, finishing;
std::vector<std::vector<double>> allocated;

// As the threads of a block, one after another.
template <int32_t threads>
struct JoinAll {
  template <typename Functor, typename Value>
  typename Functor::State operator()(Functor, Value&& value) const {
    typename Functor::State state = value(0);
    for (int32_t thread = 1; thread < threads; ++thread) state = Functor::join(state, value(thread));
    return state;
  }
};

}  // namespace

extern "C" {

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream) {
  CHECK(device_index == 3);
  *stream = &reading;
  return 0;
}
AOTITorchError aoti_torch_create_cuda_guard(int32_t device_index, void** guard) {
  CHECK(device_index == 3);
  ++guards;
  *guard = &guards;
  return 0;
}
AOTITorchError aoti_torch_delete_cuda_guard(void* guard) {
  CHECK(guard == &guards);
  --guards;
  return 0;
}
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle) { return 0; }
int32_t aoti_torch_dtype_float64() { return 7; }
int32_t aoti_torch_device_type_cuda() { return 1; }
}

namespace fusedacc {

AtenTensorHandle empty(std::initializer_list<int64_t> sizes, int32_t dtype, const Device& device) {
  CHECK(sizes.size() == 1 && dtype == 7 && device.index == 3);
  allocated.emplace_back(static_cast<size_t>(*sizes.begin()), -1.0);
  return reinterpret_cast<AtenTensorHandle>(allocated.back().data());
}
void* data_of(const OwnedTensor& tensor) { return tensor.get(); }

namespace cuda {

template <NormKind kind>
void read_all(const Work& work, const NormRequest& norm) {
  constexpr int32_t pair = find_pair(Dtype::kFloat64, Dtype::kFloat64);
  using Kernels = NormKernels<pair, kind, true>;
  static Batches<false, true>::Flat<32764> batch;
  batch.partials = norm.partials;
  for_each_batch(work, pair, false, batch, [&](const auto& full, int64_t chunks) {
    for (int64_t block = 0; block < chunks; ++block) {
      const auto chunk = Kernels::find(full, static_cast<uint32_t>(block));
      *chunk.partial = Kernels::flat_block(full, chunk, JoinAll<kThreads>{});
    }
  });
}

void launch_norm(const Work& work, const Factors&, uint64_t, const NormRequest& norm, int32_t device_index, void*) {
  const DeviceGuard guard(device_index);
  CHECK(guards == 1 && norm.reads);
  ++reading;
  (norm.kind == NormKind::kTwo ? read_all<NormKind::kTwo> : read_all<NormKind::kInfinity>)(work, norm);
}

void launch_finish(const FinishRequest& finish, int32_t device_index, void* stream) {
  const DeviceGuard guard(device_index);
  CHECK(stream == &reading);
  ++finishing;
  static PartialLists<32764> lists;
  lists.count = 0;
  for (const Partials& partials : finish.partials) {
    lists.partials[lists.count] = partials.data;
    lists.sizes[lists.count++] = partials.count;
  }
  lists.norm = finish.norm;
  lists.found = finish.found;
  lists.wide = finish.wide;
  if (finish.kind == NormKind::kTwo) {
    finish_block<NormKind::kTwo>(lists, true, JoinAll<kFinishThreads>{});
  } else {
    finish_block<NormKind::kInfinity>(lists, true, JoinAll<kFinishThreads>{});
  }
}

void launch(const Work&, const Factors&, uint64_t, int32_t, void*) {}
int32_t toolkit_version() { return 0; }

}  // namespace cuda
}  // namespace fusedacc

namespace {

void check(NormKind kind, const std::vector<int64_t>& sizes, int launches, double bad) {
  std::vector<std::vector<double>> lists;
  long double sum = 0, largest = 0;
  for (const int64_t size : sizes) {
    lists.emplace_back(static_cast<size_t>(size));
    for (double& value : lists.back()) {
      value = static_cast<double>(random_below(1 << 20)) / 64;
      sum += static_cast<long double>(value) * value;
      largest = std::max(largest, static_cast<long double>(value));
    }
  }
  if (bad != 0) lists.back().back() = bad;
  double norm = -1, again = -2;
  float found = -1;
  for (double* to : {&norm, &again}) {
    FinishRequest finish{kind, {}, to, &found, true};
    for (const auto& list : lists)
      finish.partials.push_back({list.data(), static_cast<int64_t>(list.size())});
    reading = finishing = 0;
    cuda::finish_norm(finish, 3);
    CHECK(reading == launches - 1 && finishing == 1 && guards == 0);
  }
  if (bad != 0) {
    CHECK(found == 1 && (std::isnan(bad) ? std::isnan(norm) : norm == bad));
    return;
  }
  const long double expected = kind == NormKind::kTwo ? sqrtl(sum) : largest;
  CHECK(norm == again && found == 0);
  CHECK(std::fabs(norm - expected) <= (kind == NormKind::kTwo ? expected * 0x1p-46L : 0));
}

}  // namespace

int main() {
  for (const NormKind kind : {NormKind::kTwo, NormKind::kInfinity}) {
    for (const double bad : {0.0, double{NAN}, std::numeric_limits<double>::infinity()}) {
      check(kind, {1}, 1, bad);
      check(kind, {cuda::kMostPartials - 5, 0, 5}, 1, bad);
      check(kind, {cuda::kMostPartials + 1}, 2, bad);
      check(kind, {7, 100000, 1, 8192}, 2, bad);
    }
  }
  std::printf("ends of norms agree\n");
}
