// The kernels on the rows of a table, and their launchers.
#include <utility>

#include "join_block.h"
#include "launch.h"
#include "norm_tensor.h"
#include "row_launch.h"

namespace fusedacc::cuda {
namespace {

// Blocks that a multiprocessor holds at least: without it the compiler saves registers that it then lacks.
constexpr int32_t kBlocks = 4;

template <int32_t pair, bool aligned, bool long_rows>
__global__ void __launch_bounds__(kThreads, kBlocks)
    row_kernel(const __grid_constant__ RowArguments arguments) {
  RowKernels<pair>::template thread<aligned, long_rows>(
      arguments, static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
}

// One block for each chunk of each number's row; all but the first number of a row leave 0.
template <int32_t pair, NormKind kind>
__global__ void __launch_bounds__(kThreads, kBlocks)
    row_norm_kernel(const Table table, const RowNumbers numbers, int64_t chunks, double* partials) {
  using Element = AccumulatorOf<pair>;
  const int64_t place = blockIdx.x / chunks, first = blockIdx.x % chunks * kChunkElements;
  const int64_t row = numbers[place];
  double norm = 0;
  if (row >= 0 && row < table.rows && (place == 0 || numbers[place - 1] != row)) {
    const int64_t left = table.columns - first;
    const FlatReader<Element> reader{static_cast<const Element*>(table.data) + row * table.stride + first};
    norm = chunk_norm<kind>(reader, static_cast<int32_t>(left < kChunkElements ? left : kChunkElements),
                            JoinBlock<kThreads>{});
  }
  if (threadIdx.x == 0) partials[blockIdx.x] = norm;
}

uint32_t grid_of(int64_t blocks) {
  if (blocks > kMaxChunks) {
    throw std::runtime_error("fusedacc: " + std::to_string(blocks) +
                             " blocks for one launch; allowed: " + std::to_string(kMaxChunks));
  }
  return static_cast<uint32_t>(blocks);
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
  constexpr void (*launchers[])(const RowArguments&, cudaStream_t) = {launch_pair<pairs, false>...};
  constexpr void (*aligned[])(const RowArguments&, cudaStream_t) = {launch_pair<pairs, true>...};
  const int32_t pair = arguments.work.table.pair;
  (rows_aligned(arguments.work) ? aligned : launchers)[pair](arguments, stream);
}

template <int32_t pair>
void launch_norm(const Table& table, const RowNumbers& numbers, NormKind kind, double* partials,
                 cudaStream_t stream) {
  if constexpr (kPairs[pair].gradient == kPairs[pair].accumulator) {
    const int64_t chunks = chunks_of(table.columns);
    const auto kernel = kind == NormKind::kTwo ? row_norm_kernel<pair, NormKind::kTwo>
                                               : row_norm_kernel<pair, NormKind::kInfinity>;
    kernel<<<grid_of(numbers.count * chunks), kThreads, 0, stream>>>(table, numbers, chunks, partials);
    check(cudaGetLastError(), "launch of row_norm_kernel");
  }
}

template <int32_t... pairs>
void launch_one_norm(const Table& table, const RowNumbers& numbers, NormKind kind, double* partials,
                     cudaStream_t stream, std::integer_sequence<int32_t, pairs...>) {
  ((table.pair == pairs ? launch_norm<pairs>(table, numbers, kind, partials, stream) : void()), ...);
}

using Pairs = std::make_integer_sequence<int32_t, kPairCount>;

}  // namespace

void launch_rows(const RowWork& work, const ScaleArgument& scale, void* sums, int32_t device_index,
                 void* stream) {
  if (work.numbers.count == 0 || work.table.columns == 0) return;
  const DeviceGuard guard(device_index);
  launch_one({work, scale, sums}, static_cast<cudaStream_t>(stream), Pairs());
}

void launch_row_norms(const Table& table, const RowNumbers& numbers, NormKind kind, double* partials,
                      int32_t device_index, void* stream) {
  if (numbers.count == 0 || table.columns == 0) return;
  const DeviceGuard guard(device_index);
  launch_one_norm(table, numbers, kind, partials, static_cast<cudaStream_t>(stream), Pairs());
}

}  // namespace fusedacc::cuda
