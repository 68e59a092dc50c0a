// The kernels that compute norms, and their launchers.
#include <type_traits>

#include "device/norm_block.h"
#include "launch.h"

namespace fusedacc::cuda {
namespace {

// Combines the values of a block's threads, for every thread: first within each warp by exchanges, then the
// warps' values in every warp. `join` commutes, so all threads get the same bits.
template <int32_t threads>
struct JoinBlock {
  template <typename Functor, typename Value>
  __device__ __forceinline__ typename Functor::State operator()(Functor, Value&& value) const {
    using State = typename Functor::State;
    constexpr int32_t warps = threads / 32;
    __shared__ State of_warp[warps];
    State state = value(static_cast<int32_t>(threadIdx.x));
#pragma unroll
    for (int32_t other = 16; other > 0; other /= 2) {
      state = Functor::join(state, __shfl_xor_sync(0xffffffffu, state, other));
    }
    __syncthreads();  // a join before may still be read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = state;
    __syncthreads();
    state = of_warp[threadIdx.x % warps];
#pragma unroll
    for (int32_t other = warps / 2; other > 0; other /= 2) {
      state = Functor::join(state, __shfl_xor_sync(0xffffffffu, state, other));
    }
    return state;
  }
};

using Lists = PartialLists<kArgumentBytes>;
static_assert(sizeof(Lists) <= kArgumentBytes);

template <Dtype dtype, NormKind kind, typename Batch>
__global__ void __launch_bounds__(kThreads, kBlocks) flat_norm_kernel(const __grid_constant__ Batch batch) {
  using Kernels = NormKernels<ElementOf<dtype>, kind>;
  const auto chunk = Kernels::find(batch, blockIdx.x);
  const double norm = Kernels::flat_block(batch, chunk, JoinBlock<kThreads>{});
  if (threadIdx.x == 0) *chunk.partial = norm;
}

template <Dtype dtype, NormKind kind, typename Batch>
__global__ void __launch_bounds__(kThreads) strided_norm_kernel(const __grid_constant__ Batch batch) {
  using Kernels = NormKernels<ElementOf<dtype>, kind>;
  const auto chunk = Kernels::find(batch, blockIdx.x);
  const double norm = Kernels::strided_block(batch, chunk, JoinBlock<kThreads>{});
  if (threadIdx.x == 0) *chunk.partial = norm;
}

template <NormKind kind>
__global__ void __launch_bounds__(kFinishThreads) finish_norm_kernel(const __grid_constant__ Lists lists) {
  finish_block<kind>(lists, threadIdx.x == 0, JoinBlock<kFinishThreads>{});
}

template <int32_t pair, NormKind kind>
void launch_pair(const Work& work, double* partials, const Need& need, bool strided, cudaStream_t stream) {
  constexpr Dtype dtype = kPairs[pair].accumulator;
  const auto fill = [&](auto& batch, auto kernel) {
    using Batch = std::decay_t<decltype(batch)>;
    batch.partials = partials;
    for_each_batch(work, pair, strided, batch, [&](const Batch& full, int64_t chunks) {
      kernel<<<static_cast<uint32_t>(chunks), kThreads, 0, stream>>>(full);
      check(cudaGetLastError(), strided ? "launch of strided_norm_kernel" : "launch of flat_norm_kernel");
    });
  };
  if (strided) {
    with_batch<NormBatches::Strided, kArgumentBytes>(need, [&](auto& batch) {
      fill(batch, strided_norm_kernel<dtype, kind, std::decay_t<decltype(batch)>>);
    });
  } else {
    with_batch<NormBatches::Flat, kFewBytes, kArgumentBytes>(need, [&](auto& batch) {
      fill(batch, flat_norm_kernel<dtype, kind, std::decay_t<decltype(batch)>>);
    });
  }
}

}  // namespace

std::string launch_problem(int32_t device_index) {
  const DeviceGuard guard(device_index);
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, finish_norm_kernel<NormKind::kTwo>);
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // else the next launch would find this error
  return cudaGetErrorString(error);
}

void run_norm(const Work& work, const NormRequest& norm, int32_t device_index) {
  if (work.tasks.empty()) return;
  const DeviceGuard guard(device_index);
  const cudaStream_t stream = stream_of(device_index);
  for_each_kind(work, [&](auto pair, const Need& need, bool strided) {
    // A norm's tasks have the tensor on both sides.
    if constexpr (kPairs[pair].gradient == kPairs[pair].accumulator) {
      with_norm_kind(norm.kind,
                     [&](auto kind) { launch_pair<pair, kind>(work, norm.partials, need, strided, stream); });
    }
  });
}

void launch_finish(const FinishRequest& finish, int32_t device_index) {
  const DeviceGuard guard(device_index);
  const cudaStream_t stream = stream_of(device_index);
  Lists lists;
  if (finish.partials.size() > Lists::kCapacity) {
    throw std::runtime_error("fusedacc: more than " + std::to_string(Lists::kCapacity) +
                             " tensors of partials; join some first");
  }
  lists.count = 0;
  for (const Partials& partials : finish.partials) {
    lists.partials[lists.count] = partials.data;
    lists.sizes[lists.count] = partials.count;
    ++lists.count;
  }
  lists.norm = finish.norm;
  lists.nonfinite = finish.nonfinite;
  lists.wide = finish.wide;
  with_norm_kind(finish.kind,
                 [&](auto kind) { finish_norm_kernel<kind><<<1, kFinishThreads, 0, stream>>>(lists); });
  check(cudaGetLastError(), "launch of finish_norm_kernel");
}

}  // namespace fusedacc::cuda
