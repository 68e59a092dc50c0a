// The kernels of lists, and their launcher.
#include <type_traits>

#include "device/accumulate_block.h"
#include "launch.h"

namespace fusedacc::cuda {
namespace {

template <int32_t pair, typename Batch>
__global__ void __launch_bounds__(kThreads, kBlocks) flat_kernel(const __grid_constant__ Batch batch) {
  PairKernels<pair>::flat_block(batch, blockIdx.x, static_cast<int32_t>(threadIdx.x));
}

template <int32_t pair, typename Batch>
__global__ void __launch_bounds__(kThreads) strided_kernel(const __grid_constant__ Batch batch) {
  PairKernels<pair>::strided_block(batch, blockIdx.x, static_cast<int32_t>(threadIdx.x));
}

template <int32_t pair>
void launch_pair(const Work& work, const Factors& factors, uint64_t seed, const Need& need, bool strided,
                 cudaStream_t stream) {
  constexpr bool stochastic = PairKernels<pair>::Functor::kStochastic;
  const auto fill = [&](auto& batch, auto kernel) {
    using Batch = std::decay_t<decltype(batch)>;
    batch.factors = factors;
    if constexpr (stochastic) batch.seed = seed;
    batch.chunk_elements = chunk_elements_for(work.elements);
    for_each_batch(work, pair, strided, batch, [&](const Batch& full, int64_t chunks) {
      kernel<<<static_cast<uint32_t>(chunks), kThreads, 0, stream>>>(full);
      check(cudaGetLastError(), strided ? "launch of strided_kernel" : "launch of flat_kernel");
    });
  };
  if (strided) {
    with_batch<SumBatches<stochastic>::template Strided, kFewBytes, kArgumentBytes>(
        need, [&](auto& batch) { fill(batch, strided_kernel<pair, std::decay_t<decltype(batch)>>); });
  } else {
    with_batch<SumBatches<stochastic>::template Flat, kFewBytes, kSomeBytes, kArgumentBytes>(
        need, [&](auto& batch) { fill(batch, flat_kernel<pair, std::decay_t<decltype(batch)>>); });
  }
}

}  // namespace

void run(const Work& work, const Factors& factors, uint64_t seed, int32_t device_index) {
  if (work.tasks.empty()) return;
  const DeviceGuard guard(device_index);
  const cudaStream_t stream = stream_of(device_index);
  for_each_kind(work, [&](auto pair, const Need& need, bool strided) {
    launch_pair<pair>(work, factors, seed, need, strided, stream);
  });
}

int32_t toolkit_version() { return CUDART_VERSION; }

}  // namespace fusedacc::cuda
