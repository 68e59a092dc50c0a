// The kernels on rows of a table, and their launcher.
#include <utility>

#include "device/row_thread.h"
#include "launch.h"

namespace fusedacc::cuda {
namespace {

template <int32_t pair, bool aligned, bool long_rows>
__global__ void __launch_bounds__(kThreads, kBlocks)
    row_kernel(const __grid_constant__ RowArguments arguments) {
  RowKernels<pair>::template thread<aligned, long_rows>(
      arguments, static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
}

template <int32_t pair, bool aligned>
void launch_pair(const RowArguments& arguments, cudaStream_t stream) {
  const int64_t across = RowKernels<pair>::threads_of(arguments.work.table.columns, aligned);
  const int64_t count = arguments.work.numbers.count;
  const auto blocks = [&](int64_t down) { return grid_of((down * across + kThreads - 1) / kThreads); };
  row_kernel<pair, aligned, false><<<blocks(count), kThreads, 0, stream>>>(arguments);
  check(cudaGetLastError(), "launch of row_kernel");
  if (count > kRowRun) {
    row_kernel<pair, aligned, true><<<blocks(stretches(count)), kThreads, 0, stream>>>(arguments);
    check(cudaGetLastError(), "launch of row_kernel for long rows");
  }
}

template <int32_t... pairs>
void launch_one(const RowArguments& arguments, cudaStream_t stream,
                std::integer_sequence<int32_t, pairs...>) {
  constexpr void (*launchers[2][kNearestPairCount])(const RowArguments&, cudaStream_t) = {
      {launch_pair<pairs, false>...}, {launch_pair<pairs, true>...}};
  launchers[rows_aligned(arguments.work)][arguments.work.table.pair](arguments, stream);
}

}  // namespace

void launch_rows(const RowWork& work, const ScaleArgument& scale, void* sums, int32_t device_index) {
  if (work.numbers.count == 0 || work.table.columns == 0) return;
  const DeviceGuard guard(device_index);
  launch_one({work, scale, sums}, stream_of(device_index),
             std::make_integer_sequence<int32_t, kNearestPairCount>());
}

}  // namespace fusedacc::cuda
