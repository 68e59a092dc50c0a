// The kernels that leave norms, and their launchers.
#include <utility>

#include "join_block.h"
#include "launch.h"
#include "norm_tensor.h"
#include "run.h"

namespace fusedacc::cuda {
namespace {

using Flat = FlatNormBatchOf<kArgumentBytes>;
using Strided = StridedNormBatchOf<kArgumentBytes>;
using Lists = PartialLists<kArgumentBytes>;
static_assert(sizeof(Flat) <= kArgumentBytes && sizeof(Strided) <= kArgumentBytes &&
              sizeof(Lists) <= kArgumentBytes);

template <int32_t pair, NormKind kind, bool reads>
__global__ void __launch_bounds__(kThreads) flat_norm_kernel(const __grid_constant__ Flat batch) {
  using Kernels = NormKernels<pair, kind, reads>;
  const auto chunk = Kernels::find(batch, blockIdx.x);
  const double norm = Kernels::flat_block(batch, chunk, JoinBlock<kThreads>{});
  if (threadIdx.x == 0) *chunk.partial = norm;
}

template <int32_t pair, NormKind kind, bool reads>
__global__ void __launch_bounds__(kThreads) strided_norm_kernel(const __grid_constant__ Strided batch) {
  using Kernels = NormKernels<pair, kind, reads>;
  const auto chunk = Kernels::find(batch, blockIdx.x);
  const double norm = Kernels::strided_block(batch, chunk, JoinBlock<kThreads>{});
  if (threadIdx.x == 0) *chunk.partial = norm;
}

template <NormKind kind>
__global__ void __launch_bounds__(kFinishThreads) finish_norm_kernel(const __grid_constant__ Lists lists) {
  finish_block<kind>(lists, threadIdx.x == 0, JoinBlock<kFinishThreads>{});
}

template <int32_t pair, NormKind kind, bool reads>
void launch_pair(const Work& work, const Factors& factors, double* partials, bool strided,
                 cudaStream_t stream) {
  if (strided) {
    Strided batch;
    batch.factors = factors;
    batch.partials = partials;
    for_each_batch(work, pair, true, batch, [&](const Strided& full, int64_t chunks) {
      strided_norm_kernel<pair, kind, reads><<<static_cast<uint32_t>(chunks), kThreads, 0, stream>>>(full);
      check(cudaGetLastError(), "launch of strided_norm_kernel");
    });
  } else {
    Flat batch;
    batch.factors = factors;
    batch.partials = partials;
    for_each_batch(work, pair, false, batch, [&](const Flat& full, int64_t chunks) {
      flat_norm_kernel<pair, kind, reads><<<static_cast<uint32_t>(chunks), kThreads, 0, stream>>>(full);
      check(cudaGetLastError(), "launch of flat_norm_kernel");
    });
  }
}

template <int32_t pair>
void launch_kind(const Work& work, const Factors& factors, const NormRequest& norm, bool strided,
                 cudaStream_t stream) {
  constexpr NormKind two = NormKind::kTwo, infinity = NormKind::kInfinity;
  const bool is_two = norm.kind == two;
  if (!norm.reads) {
    (is_two ? launch_pair<pair, two, false>
            : launch_pair<pair, infinity, false>)(work, factors, norm.partials, strided, stream);
  } else if constexpr (kPairs[pair].gradient == kPairs[pair].accumulator) {
    (is_two ? launch_pair<pair, two, true> : launch_pair<pair, infinity, true>)(work, factors, norm.partials,
                                                                                strided, stream);
  }
}

template <int32_t... pairs>
void launch_present(const Work& work, const Factors& factors, const NormRequest& norm,
                    const bool (&present)[2][kPairCount], cudaStream_t stream,
                    std::integer_sequence<int32_t, pairs...>) {
  for (const bool strided : {false, true}) {
    ((present[strided][pairs] ? launch_kind<pairs>(work, factors, norm, strided, stream) : void()), ...);
  }
}

}  // namespace

void launch_norm(const Work& work, const Factors& factors, const NormRequest& norm, int32_t device_index,
                 void* stream) {
  if (work.tasks.empty()) return;
  const DeviceGuard guard(device_index);
  bool present[2][kPairCount] = {};
  for (const Task& task : work.tasks) present[task.layout >= 0][task.pair] = true;
  launch_present(work, factors, norm, present, static_cast<cudaStream_t>(stream),
                 std::make_integer_sequence<int32_t, kPairCount>());
}

void launch_finish(const FinishRequest& finish, int32_t device_index, void* stream) {
  const DeviceGuard guard(device_index);
  Lists lists;
  if (finish.partials.size() > Lists::kCapacity) {
    throw std::runtime_error("fusedacc: more than " + std::to_string(Lists::kCapacity) +
                             " tensors of partials; join some first");
  }
  lists.count = 0;
  for (const Partials& partials : finish.partials) {
    lists.partials[lists.count] = partials.data;
    lists.sizes[lists.count++] = partials.count;
  }
  lists.norm = finish.norm;
  lists.found = finish.found;
  lists.wide = finish.wide;
  const auto on = static_cast<cudaStream_t>(stream);
  if (finish.kind == NormKind::kTwo) {
    finish_norm_kernel<NormKind::kTwo><<<1, kFinishThreads, 0, on>>>(lists);
  } else {
    finish_norm_kernel<NormKind::kInfinity><<<1, kFinishThreads, 0, on>>>(lists);
  }
  check(cudaGetLastError(), "launch of finish_norm_kernel");
}

}  // namespace fusedacc::cuda
