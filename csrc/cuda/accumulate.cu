// The kernels and their launcher.
#include <utility>

#include "launch.h"
#include "run.h"

namespace fusedacc::cuda {
namespace {

using Flat = FlatBatchOf<kArgumentBytes>;
using Strided = StridedBatchOf<kArgumentBytes>;
static_assert(sizeof(Flat) <= kArgumentBytes && sizeof(Strided) <= kArgumentBytes);

// Blocks that a multiprocessor holds at least. Without it the compiler saves registers, for which it waits
// for the first loads before it issues the others.
constexpr int32_t kBlocks = 4;

template <int32_t pair>
__global__ void __launch_bounds__(kThreads, kBlocks) flat_kernel(const __grid_constant__ Flat batch) {
  PairKernels<pair>::flat_block(batch, blockIdx.x, static_cast<int32_t>(threadIdx.x));
}

template <int32_t pair>
__global__ void __launch_bounds__(kThreads) strided_kernel(const __grid_constant__ Strided batch) {
  PairKernels<pair>::strided_block(batch, blockIdx.x, static_cast<int32_t>(threadIdx.x));
}

template <int32_t pair>
void launch_pair(const Work& work, const Factors& factors, bool strided, cudaStream_t stream) {
  if (strided) {
    Strided batch;
    batch.factors = factors;
    for_each_batch(work, pair, true, batch, [&](const Strided& full, int64_t chunks) {
      strided_kernel<pair><<<static_cast<uint32_t>(chunks), kThreads, 0, stream>>>(full);
      check(cudaGetLastError(), "launch of strided_kernel");
    });
  } else {
    Flat batch;
    batch.factors = factors;
    for_each_batch(work, pair, false, batch, [&](const Flat& full, int64_t chunks) {
      flat_kernel<pair><<<static_cast<uint32_t>(chunks), kThreads, 0, stream>>>(full);
      check(cudaGetLastError(), "launch of flat_kernel");
    });
  }
}

template <int32_t... pairs>
void launch_present(const Work& work, const Factors& factors, const bool (&present)[2][kPairCount],
                    cudaStream_t stream, std::integer_sequence<int32_t, pairs...>) {
  for (const bool strided : {false, true}) {
    ((present[strided][pairs] ? launch_pair<pairs>(work, factors, strided, stream) : void()), ...);
  }
}

}  // namespace

void launch(const Work& work, const Factors& factors, int32_t device_index, void* stream) {
  if (work.tasks.empty()) return;
  const DeviceGuard guard(device_index);
  bool present[2][kPairCount] = {};
  for (const Task& task : work.tasks) present[task.layout >= 0][task.pair] = true;
  launch_present(work, factors, present, static_cast<cudaStream_t>(stream),
                 std::make_integer_sequence<int32_t, kPairCount>());
}

int32_t toolkit_version() { return CUDART_VERSION; }

}  // namespace fusedacc::cuda
