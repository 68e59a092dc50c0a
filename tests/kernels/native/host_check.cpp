// Runs the torch-free headers on the host: the launch plans, and the bodies of kernels on more elements than
// 32 bits count. The emulated GPU runs them on fewer (tests/cuda). Prints what fails and exits with 1.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "cuda/device/accumulate_block.h"

#include "check.h"

using namespace fusedacc;

namespace {

using Nearest = cuda::NearestBatches;
using Flat = Nearest::Flat<32764>;
using Strided = Nearest::Strided<32764>;
using SmallFlat = Nearest::Flat<4096>;
using Stochastic = cuda::StochasticBatches;
using Norms = cuda::NormBatches;

// The nest that merge_dims leaves visits exactly the pairs of offsets that the tensors hold.
void check_merging() {
  for (int round = 0; round < 1000; ++round) {
    const int64_t dims = random_below(5);
    std::vector<int64_t> sizes, sums, fresh, order;
    for (int64_t d = 0; d < dims; ++d) order.insert(order.begin() + random_below(d + 1), d);
    for (int64_t d = 0; d < dims; ++d) sizes.push_back(1 + random_below(4));
    sums.resize(dims);
    fresh.resize(dims);
    int64_t stride = 1;
    for (const int64_t d : order) {
      sums[d] = stride;
      stride *= sizes[d] + random_below(2);
    }
    const int64_t kind = random_below(3);
    for (int64_t d = 0; d < dims; ++d) fresh[d] = kind == 0 ? sums[d] : kind == 1 ? random_below(7) : 0;
    bool dense = false;
    CHECK(strides_nest(dims, sizes.data(), sums.data(), dense));

    const auto offsets = [](int64_t n, const int64_t* size, const int64_t* a, const int64_t* b) {
      std::map<int64_t, int64_t> pairs;
      int64_t total = 1;
      for (int64_t d = 0; d < n; ++d) total *= size[d];
      for (int64_t i = 0; i < total; ++i) {
        int64_t rest = i, to = 0, from = 0;
        for (int64_t d = n; d-- > 0; rest /= size[d]) {
          to += rest % size[d] * a[d];
          from += rest % size[d] * b[d];
        }
        CHECK(pairs.emplace(to, from).second);
      }
      return pairs;
    };
    const auto expected = offsets(dims, sizes.data(), sums.data(), fresh.data());
    CHECK(dense == (expected.rbegin()->first == static_cast<int64_t>(expected.size()) - 1));
    StridedLayout layout{};
    if (merge_dims(dims, sizes.data(), sums.data(), fresh.data(), layout) == Merged::kFlat) {
      int64_t i = 0;
      for (const auto& [to, from] : expected) {
        CHECK(to == i && from == i);
        ++i;
      }
    } else {
      CHECK(offsets(layout.dims, layout.sizes, layout.accumulator_strides, layout.gradient_strides) ==
            expected);
    }
  }
  const int64_t sizes[] = {3, 4}, repeated[] = {0, 1}, interleaved[] = {2, 3};
  bool dense = false;
  CHECK(!strides_nest(2, sizes, repeated, dense));
  CHECK(!strides_nest(2, sizes, interleaved, dense));
}

Work work_of(const std::vector<int64_t>& sizes) {
  Work work;
  for (const int64_t size : sizes) {
    work.tasks.push_back({nullptr, nullptr, size, work.elements, 0, -1, random_below(2) == 0});
    work.elements += size;
  }
  return work;
}

// Every chunk of every tensor belongs to one block; nothing else does.
template <typename Batch>
int64_t check_plan(const std::vector<int64_t>& sizes) {
  const Work work = work_of(sizes);
  static Batch batch;
  size_t done = 0;
  int64_t launches = 0;
  for_each_batch(work, 0, false, batch, [&](const Batch& full, int64_t chunks) {
    ++launches;
    CHECK(full.count > 0 && full.count <= Batch::kCapacity && chunks <= kMaxChunks);
    int64_t next = 0;
    for (int32_t i = 0; i < full.count; ++i, ++done) {
      CHECK(full.first_chunk[i] == next);
      const Task& task = work.tasks[done];
      CHECK(full.sizes[i] == (task.overwrite ? ~task.numel : task.numel));
      const int64_t needed = (task.numel + kChunkElements - 1) / kChunkElements;
      for (const int64_t chunk : {int64_t{0}, needed / 2, needed - 1}) {
        const auto first = [&](int32_t k) { return full.first_chunk[k]; };
        CHECK(find_segment(full.count, static_cast<uint32_t>(next + chunk), first) == i);
      }
      next += needed;
    }
    CHECK(next == chunks);
  });
  CHECK(done == sizes.size());
  return launches;
}

void check_plans() {
  CHECK(chunk_elements_for(1) == 2048 && chunk_elements_for((int64_t{1} << 22) - 1) == 2048);
  CHECK(chunk_elements_for(int64_t{1} << 22) == kChunkElements);
  CHECK(check_plan<Flat>({}) == 0);
  CHECK(check_plan<Flat>(std::vector<int64_t>(1000, 1000)) == 1);
  CHECK(check_plan<Flat>(std::vector<int64_t>(Flat::kCapacity, 7)) == 1);
  CHECK(check_plan<Flat>(std::vector<int64_t>(Flat::kCapacity + 1, 7)) == 2);
  CHECK(check_plan<SmallFlat>(std::vector<int64_t>(300, 7)) ==
        (300 + SmallFlat::kCapacity - 1) / SmallFlat::kCapacity);
  CHECK(check_plan<Flat>({int64_t{1} << 31, 5, (int64_t{1} << 40) + 3, kChunkElements, kChunkElements + 1}) ==
        1);
  // Together more chunks than one grid has.
  CHECK(check_plan<Flat>({int64_t{1} << 43, int64_t{1} << 43, 9}) == 2);
  for (int round = 0; round < 50; ++round) {
    std::vector<int64_t> sizes(1 + random_below(3000));
    for (int64_t& size : sizes) size = 1 + random_below(int64_t{1} << random_below(34));
    check_plan<Flat>(sizes);
  }
}

template <template <int32_t> class BatchOf>
size_t chosen(int64_t tensors, int64_t dims) {
  size_t bytes = 0;
  cuda::with_batch<BatchOf, cuda::kFewBytes, cuda::kSomeBytes, 32764>(
      {tensors, dims}, [&](const auto& batch) { bytes = sizeof(batch); });
  return bytes;
}

// A launch sends the smallest arguments that have room for all tensors and dimensions.
void check_capacities() {
  Work work = work_of({5, 6, 7});
  work.tasks[1].pair = 4;
  work.tasks[2].layout = 0;
  work.layouts.push_back({3, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}});
  const Needs needs(work);
  CHECK(needs.of[0][0].tensors == 1 && needs.of[0][4].tensors == 1 && needs.of[0][0].dims == 0);
  CHECK(needs.of[1][0].tensors == 1 && needs.of[1][0].dims == 3 && needs.of[1][4].tensors == 0);
  CHECK(chosen<Nearest::Flat>(1, 0) <= cuda::kFewBytes);
  CHECK(chosen<Nearest::Flat>(21, 0) <= cuda::kFewBytes && chosen<Nearest::Flat>(22, 0) > cuda::kFewBytes);
  CHECK(chosen<Nearest::Flat>(144, 0) <= cuda::kSomeBytes);
  CHECK(chosen<Nearest::Flat>(145, 0) == sizeof(Flat) && chosen<Nearest::Flat>(9999, 0) == sizeof(Flat));
  CHECK(chosen<Norms::Flat>(16, 0) <= cuda::kFewBytes && chosen<Norms::Flat>(17, 0) > cuda::kFewBytes);
  CHECK(chosen<Stochastic::Flat>(16, 0) <= cuda::kFewBytes &&
        chosen<Stochastic::Flat>(17, 0) > cuda::kFewBytes);
  CHECK(chosen<Nearest::Strided>(5, 15) <= cuda::kFewBytes &&
        chosen<Nearest::Strided>(2, 32) > cuda::kFewBytes);
  CHECK(chosen<Nearest::Strided>(6, 12) > cuda::kFewBytes);
  CHECK(chosen<Stochastic::Strided>(5, 14) <= cuda::kFewBytes);
}

// The CPU's parts cover every element once, wherever the line is cut.
void check_parts() {
  for (int round = 0; round < 100; ++round) {
    std::vector<int64_t> sizes(1 + random_below(20));
    for (int64_t& size : sizes) size = 1 + random_below(round % 2 ? 20 : 3000);
    const Work work = work_of(sizes);
    std::vector<int64_t> reached(sizes.size(), 0);
    for (int64_t begin = 0; begin < work.elements;) {
      const int64_t end = std::min(work.elements, begin + 1 + random_below(4000));
      visit_part(work.tasks, begin, end, [&](const Task& task, int64_t from, int64_t to) {
        int64_t& at = reached[&task - work.tasks.data()];
        CHECK(from == at && to > from);
        at = to;
      });
      begin = end;
    }
    CHECK(reached == sizes);
  }
}

// Parts of whole chunks cover all chunks once, in order.
void check_chunks() {
  for (int round = 0; round < 100; ++round) {
    Work work;
    const int64_t count = 1 + random_below(20);
    for (int64_t i = 0; i < count; ++i) {
      work.push({nullptr, nullptr, 1 + random_below(5 * kChunkElements), 0, 0, -1, false});
    }
    int64_t next = 0, elements = 0;
    for (int64_t begin = 0; begin < work.chunks;) {
      const int64_t end = std::min(work.chunks, begin + 1 + random_below(9));
      visit_chunks(work.tasks, begin, end, [&](const Task& task, int64_t from, int64_t to, int64_t chunk) {
        CHECK(chunk == next++);
        CHECK(from == (chunk - task.first_chunk) * kChunkElements && task.first + from == elements);
        CHECK(to > from && to <= task.numel && (to == task.numel || to - from == kChunkElements));
        elements += to - from;
      });
      begin = end;
    }
    CHECK(next == work.chunks && elements == work.elements);
  }
}

template <typename T>
T* reserve(int64_t elements) {
  void* memory = mmap(nullptr, elements * sizeof(T), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(memory != MAP_FAILED);
  return static_cast<T*>(memory);
}

// More than 2^32 elements: only the pages of three chunks are ever touched.
void check_huge() {
  using Kernels = cuda::PairKernels<find_pair(Dtype::kBFloat16, Dtype::kFloat32)>;
  const int64_t size = (int64_t{1} << 32) + 2 * kChunkElements + 5;
  auto* sum = reserve<float>(size);
  auto* fresh = reserve<BFloat16>(size);
  Work work;
  work.tasks.push_back({sum, fresh, size, 0, 1, -1, false});
  static Flat batch;
  batch.factors = {{nullptr, 2, 0}, {nullptr, 1, 0}};
  for_each_batch(work, 1, false, batch, [&](const Flat& full, int64_t chunks) {
    for (const int64_t block : {int64_t{0}, chunks - 2, chunks - 1}) {
      const int64_t first = block * kChunkElements, end = std::min(size, first + kChunkElements);
      for (int64_t k = first; k < end; ++k) fresh[k] = narrow<BFloat16, float>(static_cast<float>(k % 256));
      for (int32_t thread = 0; thread < cuda::kThreads; ++thread) {
        Kernels::flat_block(full, static_cast<uint32_t>(block), thread);
      }
      for (int64_t k = first; k < end; ++k) CHECK(sum[k] == 2 * static_cast<float>(k % 256));
    }
  });
  // A loop nest of the same size: rows of the accumulator are columns of the gradient.
  const int64_t rows = (int64_t{1} << 32) / 1024 + 8, columns = 1024;
  Work nest;
  nest.tasks.push_back({sum, fresh, rows * columns, 0, 1, 0, true});
  nest.layouts.push_back({2, {columns, rows}, {rows, 1}, {1, columns}});
  static Strided strided;
  strided.factors = {{nullptr, 3, 0}, {nullptr, 1, 0}};
  for_each_batch(nest, 1, true, strided, [&](const Strided& full, int64_t chunks) {
    const int64_t block = chunks - 1, first = block * kChunkElements;
    for (int64_t k = first; k < rows * columns; ++k) {
      fresh[(k % rows) * columns + k / rows] = narrow<BFloat16, float>(static_cast<float>(k % 256));
    }
    for (int32_t thread = 0; thread < cuda::kThreads; ++thread) {
      Kernels::strided_block(full, static_cast<uint32_t>(block), thread);
    }
    for (int64_t k = first; k < rows * columns; ++k) CHECK(sum[k] == 3 * static_cast<float>(k % 256));
  });
  munmap(sum, size * sizeof(float));
  munmap(fresh, size * sizeof(BFloat16));
}

}  // namespace

int main() {
  check_merging();
  check_plans();
  check_capacities();
  check_parts();
  check_chunks();
  check_huge();
  std::printf("flat capacity %d, arguments %zu and %zu bytes\n", Flat::kCapacity, sizeof(Flat),
              sizeof(Strided));
  return 0;
}
