// The kernels and their launcher.
#include <type_traits>
#include <utility>

#include "cuda.h"
#include "launch.h"

namespace fusedacc::cuda {
namespace {

// Blocks that a multiprocessor holds at least. Without it the compiler saves registers, for which it waits
// for the first loads before it issues the others.
constexpr int32_t kBlocks = 4;

template <int32_t pair, typename Batch>
__global__ void __launch_bounds__(kThreads, kBlocks) flat_kernel(const __grid_constant__ Batch batch) {
  PairKernels<pair>::flat_block(batch, blockIdx.x, static_cast<int32_t>(threadIdx.x));
}

template <int32_t pair, typename Batch>
__global__ void __launch_bounds__(kThreads) strided_kernel(const __grid_constant__ Batch batch) {
  PairKernels<pair>::strided_block(batch, blockIdx.x, static_cast<int32_t>(threadIdx.x));
}

template <int32_t pair>
void launch_pair(const Work& work, const Factors& factors, const Need& need, bool strided,
                 cudaStream_t stream) {
  const auto fill = [&](auto& batch, auto kernel) {
    using Batch = std::decay_t<decltype(batch)>;
    batch.factors = factors;
    batch.chunk = launch_chunk(work.elements);
    for_each_batch(work, pair, strided, batch, [&](const Batch& full, int64_t chunks) {
      kernel<<<static_cast<uint32_t>(chunks), kThreads, 0, stream>>>(full);
      check(cudaGetLastError(), strided ? "launch of strided_kernel" : "launch of flat_kernel");
    });
  };
  if (strided) {
    with_batch<StridedBatchOf, kFewBytes, kArgumentBytes>(
        need, [&](auto& batch) { fill(batch, strided_kernel<pair, std::decay_t<decltype(batch)>>); });
  } else {
    with_batch<FlatBatchOf, kFewBytes, kSomeBytes, kArgumentBytes>(
        need, [&](auto& batch) { fill(batch, flat_kernel<pair, std::decay_t<decltype(batch)>>); });
  }
}

template <int32_t... pairs>
void launch_present(const Work& work, const Factors& factors, const Needs& needs, cudaStream_t stream,
                    std::integer_sequence<int32_t, pairs...>) {
  for (const bool strided : {false, true}) {
    const auto launch_one = [&](auto pair) {
      const Need& need = needs.of[strided][pair];
      if (need.tensors > 0) launch_pair<pair>(work, factors, need, strided, stream);
    };
    (launch_one(std::integral_constant<int32_t, pairs>()), ...);
  }
}

}  // namespace

void launch(const Work& work, const Factors& factors, int32_t device_index, void* stream) {
  if (work.tasks.empty()) return;
  const DeviceGuard guard(device_index);
  launch_present(work, factors, Needs(work), static_cast<cudaStream_t>(stream),
                 std::make_integer_sequence<int32_t, kPairCount>());
}

int32_t toolkit_version() { return CUDART_VERSION; }

}  // namespace fusedacc::cuda
