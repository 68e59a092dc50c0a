// The kernels on slices of a language model's logits, and their launchers. A block takes one token's row.
#include <cmath>

#include "../common/softmax.h"
#include "device/accumulate_block.h"
#include "launch.h"

namespace fusedacc::cuda {

namespace {

constexpr int32_t kWarps = kThreads / kSoftmaxLanes;
constexpr int32_t kSteps = kSoftmaxBlock / kSoftmaxLanes;
static_assert(kSoftmaxLanes == 32, "a lane is a thread of a warp");

// The sum of value_of(class) over a row, for every thread alike.
template <typename Compute, typename Value>
__device__ __forceinline__ Compute sum_of_row(int64_t classes, Value&& value_of) {
  __shared__ Compute of_warp[kWarps];
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % kSoftmaxLanes, warp = thread / kSoftmaxLanes;
  Compute total = 0;
  for (int64_t begin = 0; begin < classes; begin += kThreads * kSteps) {
    const int64_t first = begin + warp * kSoftmaxBlock + lane;
    Compute sum = 0;
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      const int64_t i = first + step * kSoftmaxLanes;
      if (i < classes) sum += value_of(i);
    }
#pragma unroll
    for (int32_t half = kSoftmaxLanes / 2; half > 0; half /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, half);
    }
    __syncthreads();  // the sums before these have been read
    if (lane == 0) of_warp[warp] = sum;
    __syncthreads();
#pragma unroll
    for (int32_t each = 0; each < kWarps; ++each) total += of_warp[each];
  }
  return total;
}

// The largest of `value` and a row's logits, for every thread alike.
template <typename Element, typename Compute>
__device__ __forceinline__ Compute largest_of_row(const Element* row, int64_t classes, Compute value) {
  __shared__ Compute of_warp[kWarps];
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
#pragma unroll 8
  for (int64_t i = thread; i < classes; i += kThreads) value = larger(value, widen(row[i]));
#pragma unroll
  for (int32_t half = kSoftmaxLanes / 2; half > 0; half /= 2) {
    value = larger(value, __shfl_xor_sync(0xffffffffu, value, half));
  }
  if (thread % kSoftmaxLanes == 0) of_warp[thread / kSoftmaxLanes] = value;
  __syncthreads();
#pragma unroll
  for (int32_t each = 0; each < kWarps; ++each) value = larger(value, of_warp[each]);
  return value;
}

template <Dtype dtype>
__global__ void __launch_bounds__(kThreads, kBlocks)
    softmax_statistics_kernel(const __grid_constant__ SoftmaxSlice slice) {
  using Element = ElementOf<dtype>;
  using Compute = ComputeOf<Element>;
  const int64_t token = blockIdx.x, tokens = slice.tokens;
  const auto* row = static_cast<const Element*>(slice.logits) + token * slice.classes;
  auto* own = static_cast<Compute*>(slice.numbers) + token;
  const Compute top = *own, most = largest_of_row(row, slice.classes, top);
  const bool writes = threadIdx.x == 0;
  if (slice.smooths) {
    const Compute weighted = sum_of_row<Compute>(slice.classes, [&](int64_t i) {
      return slice.class_weights == nullptr ? widen(row[i]) : widen(row[i]) * slice.weight_of<Compute>(i);
    });
    if (writes) own[3 * tokens] += weighted;
  }
  const int64_t target = slice.target_of(token);
  if (writes && target >= 0) own[2 * tokens] = widen(row[target]);
  if (most == -INFINITY) return;  // the sum is still that of nothing
  const auto power_of = [&](int64_t i) { return exponential(widen(row[i]) - most); };
  const Compute total = sum_of_row<Compute>(slice.classes, power_of);
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
void launch_pass(const SoftmaxSlice& slice, cudaStream_t stream) {
  const uint32_t blocks = grid_of(slice.tokens);
  if (slice.is_gradient) {
    softmax_gradient_kernel<dtype><<<blocks, kThreads, 0, stream>>>(slice);
  } else {
    softmax_statistics_kernel<dtype><<<blocks, kThreads, 0, stream>>>(slice);
  }
  check(cudaGetLastError(), "launch of a softmax kernel");
}

}  // namespace

void launch_softmax(const SoftmaxSlice& slice, Dtype dtype, int32_t device_index, void* stream) {
  if (slice.tokens == 0) return;
  const DeviceGuard guard(device_index);
#define FUSEDACC_LAUNCHER(name, enumerator, ...) launch_pass<Dtype::enumerator>,
  constexpr void (*launchers[])(const SoftmaxSlice&, cudaStream_t) = {FUSEDACC_DTYPES(FUSEDACC_LAUNCHER)};
#undef FUSEDACC_LAUNCHER
  launchers[static_cast<int32_t>(dtype)](slice, static_cast<cudaStream_t>(stream));
}

}  // namespace fusedacc::cuda
