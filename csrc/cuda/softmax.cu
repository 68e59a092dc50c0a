// The kernels on slices of a language model's logits. A block takes one token's row.
#include <cmath>

#include "../common/softmax.h"
#include "device/accumulate_block.h"
#include "launch.h"

namespace fusedacc::cuda {

namespace {

constexpr int32_t kWarps = kThreads / kSoftmaxLanes;
constexpr int32_t kSteps = kSoftmaxBlock / kSoftmaxLanes;
static_assert(kSoftmaxLanes == 32, "a lane is a thread of a warp");

// Joins value_of(class) of a row to `neutral`, for every thread alike and in the order of the CPU's loops.
template <typename Compute, typename Value, typename Join>
__device__ __forceinline__ Compute join_row(int64_t classes, Compute neutral, Value&& value_of, Join&& join) {
  __shared__ Compute of_warp[kWarps];
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % kSoftmaxLanes, warp = thread / kSoftmaxLanes;
  Compute joined = neutral;
  for (int64_t begin = 0; begin < classes; begin += kThreads * kSteps) {
    const int64_t first = begin + warp * kSoftmaxBlock + lane;
    Compute own = neutral;
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      const int64_t i = first + step * kSoftmaxLanes;
      if (i < classes) own = join(own, value_of(i));
    }
#pragma unroll
    for (int32_t half = kSoftmaxLanes / 2; half > 0; half /= 2) {
      own = join(own, __shfl_xor_sync(0xffffffffu, own, half));
    }
    __syncthreads();  // the values before these have been read
    if (lane == 0) of_warp[warp] = own;
    __syncthreads();
#pragma unroll
    for (int32_t each = 0; each < kWarps; ++each) joined = join(joined, of_warp[each]);
  }
  return joined;
}

template <Dtype dtype>
__global__ void __launch_bounds__(kThreads, kBlocks)
    softmax_statistics_kernel(const __grid_constant__ SoftmaxSlice slice) {
  using Element = ElementOf<dtype>;
  using Compute = ComputeOf<Element>;
  const int64_t token = blockIdx.x, tokens = slice.tokens;
  const auto* row = static_cast<const Element*>(slice.logits) + token * slice.classes;
  auto* own = static_cast<Compute*>(slice.numbers) + token;
  const auto logit = [&](int64_t i) { return widen(row[i]); };
  const auto sum = [](Compute a, Compute b) { return a + b; };
  const auto most_of = [](Compute a, Compute b) { return larger(a, b); };
  const Compute top = *own, most = join_row(slice.classes, top, logit, most_of);
  const bool writes = threadIdx.x == 0;
  if (slice.smooths) {
    const auto product = [&](int64_t i) { return logit(i) * slice.weight_of<Compute>(i); };
    const Compute weighted = join_row(slice.classes, Compute(0), product, sum);
    if (writes) own[3 * tokens] += weighted;
  }
  const int64_t target = slice.target_of(token);
  if (writes && target >= 0) own[2 * tokens] = logit(target);
  if (most == -INFINITY) return;  // the sum is still that of nothing
  const auto power = [&](int64_t i) { return exponential(logit(i) - most); };
  const Compute total = join_row(slice.classes, Compute(0), power, sum);
  if (!writes) return;
  own[tokens] = own[tokens] * exponential(top - most) + total;
  *own = most;
}

template <Dtype dtype>
__global__ void __launch_bounds__(kThreads, kBlocks)
    softmax_gradient_kernel(const __grid_constant__ SoftmaxSlice slice) {
  using Element = ElementOf<dtype>;
  using Compute = ComputeOf<Element>;
  constexpr int32_t kGroup = kVectorBytes / static_cast<int32_t>(sizeof(Element));
  const int64_t token = blockIdx.x, classes = slice.classes, target = slice.target_of(token);
  auto* row = static_cast<Element*>(slice.logits) + token * classes;
  const TokenFactors<Compute> own(slice, token);
  const auto gradient = [&](Element logit, int64_t i) {
    const Compute found = own.gradient(widen(logit), slice.weight_of<Compute>(i));
    return narrow<Element, Compute>(i == target ? found - own.hit : found);
  };
  const int64_t vectors = aligned_for<kGroup>(row) ? classes / kGroup : 0;
#pragma unroll 2
  for (int64_t i = threadIdx.x; i < vectors; i += kThreads) {
    auto packed = load<kGroup>(static_cast<const Element*>(row) + i * kGroup);
#pragma unroll
    for (int32_t k = 0; k < kGroup; ++k) packed.values[k] = gradient(packed.values[k], i * kGroup + k);
    store(row + i * kGroup, packed);
  }
  for (int64_t i = vectors * kGroup + threadIdx.x; i < classes; i += kThreads) row[i] = gradient(row[i], i);
}

template <Dtype dtype>
void launch(const SoftmaxSlice& slice, cudaStream_t stream) {
  const auto kernel = slice.is_gradient ? softmax_gradient_kernel<dtype> : softmax_statistics_kernel<dtype>;
  kernel<<<grid_of(slice.tokens), kThreads, 0, stream>>>(slice);
  check(cudaGetLastError(), "launch of a softmax kernel");
}

}  // namespace

void softmax(const SoftmaxSlice& slice, Dtype dtype, int32_t device_index) {
  if (slice.tokens == 0) return;
  const DeviceGuard guard(device_index);
#define FUSEDACC_LAUNCHER(name, enumerator, ...) launch<Dtype::enumerator>,
  constexpr void (*launchers[])(const SoftmaxSlice&, cudaStream_t) = {FUSEDACC_DTYPES(FUSEDACC_LAUNCHER)};
#undef FUSEDACC_LAUNCHER
  launchers[static_cast<int32_t>(dtype)](slice, stream_of(device_index));
}

}  // namespace fusedacc::cuda
