// Sums that are rounded stochastically, on the host: the random bits, and the bodies of the CUDA kernels, block
// by block and thread by thread, against the CPU's loops. Prints what fails and exits with 1.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu/norm_loops_impl.h"
#include "cuda/device/norm_block.h"
#include "cuda/device/row_thread.h"

#include "check.h"

namespace fusedacc::cpu {
int64_t norm_ahead_bytes = 0;
}

using namespace fusedacc;

namespace {

constexpr int32_t kHalf = find_pair(Dtype::kBFloat16, Dtype::kStochasticBFloat16);
constexpr int32_t kSingle = find_pair(Dtype::kFloat32, Dtype::kStochasticBFloat16);
constexpr double kScale = 0.3, kKeep = 0.7;

// The known answers of its authors' Random123, kat_vectors.
void check_philox() {
  struct Answer {
    Noise noise;
    uint64_t block;
    uint32_t words[4];
  };
  const Answer answers[] = {
      {{0, 0}, 0, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
      {{~uint64_t{0}, ~uint64_t{0}}, ~uint64_t{0}, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
      {{0x299f31d0a4093822, 0x0370734413198a2e},
       0x85a308d3243f6a88,
       {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}};
  for (const Answer& answer : answers) {
    const random::Words words = random::philox(answer.noise, answer.block);
    CHECK(std::memcmp(words.values, answer.words, sizeof(answer.words)) == 0);
    for (int32_t i = 0; i < 8; ++i) {
      CHECK(random::bits_of(words, i) == (answer.words[i / 2] >> 16 * (i % 2) & 0xffff));
    }
  }
}

template <int32_t count, bool in_block, typename Functor>
void check_neighbours(const Functor& functor, int64_t offset) {
  const auto bits = cuda::neighbour_bits<count, in_block>(functor, offset);
  for (int32_t i = 0; i < count; ++i) CHECK(bits[i] == functor.bits_at(offset + i));
}

// Wherever neighbours begin, beyond 32 bits of elements and of counters too.
void check_neighbours() {
  for (const int64_t first : {int64_t{0}, (int64_t{1} << 32) - 9, (int64_t{1} << 35) - 9, int64_t{1} << 40}) {
    const Noise noise{generator(), random_stream(), first};
    const ScaleAccumulate<float, StochasticBFloat16> functor({kScale, kKeep, noise});
    for (int64_t offset = 0; offset < 24; ++offset) {
      check_neighbours<1, true>(functor, offset);
      check_neighbours<4, false>(functor, offset);
      check_neighbours<8, false>(functor, offset);
      if ((first + offset) % 4 == 0) check_neighbours<4, true>(functor, offset);
      if ((first + offset) % 8 == 0) check_neighbours<8, true>(functor, offset);
    }
  }
}

template <typename T>
void check_same(const std::vector<T>& ours, const std::vector<T>& theirs) {
  CHECK(ours.size() == theirs.size());
  CHECK(std::memcmp(ours.data(), theirs.data(), ours.size() * sizeof(T)) == 0);
}

// Several tensors, which lie side by side at any alignment; the last ones need a loop nest.
template <int32_t pair>
struct Lists {
  using Gradient = GradientOf<pair>;
  using Accumulator = AccumulatorOf<pair>;
  struct Tensor {
    int64_t into, from, room;
  };

  std::vector<Tensor> tensors;
  std::vector<Accumulator> sums;
  std::vector<Gradient> fresh;
  Work shape;
  uint64_t seed = generator();

  explicit Lists(bool aligned) {
    const int64_t sizes[] = {8, 1, 2048, 4096, 3 * kChunkElements, 777, kChunkElements + 5, 20, 9100, 9100};
    int64_t into = 0, from = 0;
    for (size_t i = 0; i < std::size(sizes); ++i) {
      const bool nest = i + 2 >= std::size(sizes);
      const int64_t rows = 70, columns = 130, pitch = columns + 3;
      Task task{nullptr, nullptr, sizes[i], 0, pair, -1, random_below(2) == 0, 0, random_stream()};
      const int64_t room = nest ? rows * pitch : sizes[i];
      // A gap before each, which nothing may write to.
      into += aligned ? 16 : 1 + random_below(16);
      from += aligned ? 16 : 1 + random_below(16);
      if (aligned) into = (into + 15) / 16 * 16, from = (from + 15) / 16 * 16;
      tensors.push_back({into, from, room});
      into += room;
      from += room;
      if (nest) {
        task.layout = static_cast<int32_t>(shape.layouts.size());
        const bool across = shape.layouts.empty();
        shape.layouts.push_back({2, {rows, columns}, {pitch, 1}, {across ? 1 : columns, across ? rows : 1}});
      }
      shape.push(task);
    }
    sums = random_elements<Accumulator>(into + 16);
    fresh = random_elements<Gradient>(from + 16);
  }

  Work on(std::vector<Accumulator>& target) const {
    Work work = shape;
    for (size_t i = 0; i < tensors.size(); ++i) {
      work.tasks[i].accumulator = target.data() + tensors[i].into;
      work.tasks[i].gradient = fresh.data() + tensors[i].from;
    }
    return work;
  }

  // By the CPU, in parts cut anywhere.
  std::vector<Accumulator> by_cpu(double keep) const {
    using Loops = cpu::PairLoops<pair>;
    auto target = sums;
    const Work work = on(target);
    for (const Task& task : work.tasks) {
      const Multipliers by = task.by({kScale, keep, {seed}});
      for (int64_t begin = 0; begin < task.numel;) {
        const int64_t end = std::min(task.numel, begin + 1 + random_below(5000));
        if (task.layout < 0) {
          Loops::flat(task.accumulator, task.gradient, begin, end, by, task.overwrite);
        } else {
          Loops::strided(task.accumulator, task.gradient, work.layouts[static_cast<size_t>(task.layout)], begin,
                         end, by, task.overwrite);
        }
        begin = end;
      }
    }
    return target;
  }

  // By the kernels: flat(batch, block) and strided(batch, block) are what a block does.
  template <bool norms, typename Flat, typename Strided>
  std::vector<Accumulator> by_kernels(double keep, int32_t chunk, Flat&& flat, Strided&& strided) const {
    using Batches = cuda::Batches<true, norms>;
    auto target = sums;
    const Work work = on(target);
    std::vector<double> partials(static_cast<size_t>(work.chunks));
    const auto launch = [&](auto& batch, bool nests, auto&& run) {
      batch.factors = {{nullptr, kScale, 0}, {nullptr, keep, 0}};
      batch.seed = seed;
      batch.chunk = chunk;
      if constexpr (norms) batch.partials = partials.data();
      for_each_batch(work, pair, nests, batch, [&](const auto& full, int64_t chunks) {
        for (int64_t block = 0; block < chunks; ++block) run(full, static_cast<uint32_t>(block));
      });
    };
    static typename Batches::template Flat<200> few;  // several launches
    static typename Batches::template Strided<32764> nests;
    launch(few, false, flat);
    launch(nests, true, strided);
    return target;
  }
};

// The threads of a block, one after another.
template <typename Run>
void for_threads(Run&& run) {
  for (int32_t thread = 0; thread < cuda::kThreads; ++thread) run(thread);
}
struct JoinInTurn {
  template <typename Functor, typename Value>
  typename Functor::State operator()(Functor, Value&& value) const {
    typename Functor::State state = 0;
    for_threads([&](int32_t thread) { state = Functor::join(state, value(thread)); });
    return state;
  }
};

template <int32_t pair>
void check_lists() {
  using Kernels = cuda::PairKernels<pair>;
  using Norms = cuda::NormKernels<pair, NormKind::kTwo, false>;
  for (int32_t round = 0; round < 8; ++round) {
    const Lists<pair> lists(round < 2);
    const double keep = round % 2 ? 1 : kKeep;
    const auto expected = lists.by_cpu(keep);
    for (const int32_t chunk : {launch_chunk(1), static_cast<int32_t>(kChunkElements)}) {
      const auto found = lists.template by_kernels<false>(
          keep, chunk,
          [](const auto& batch, uint32_t block) {
            for_threads([&](int32_t thread) { Kernels::flat_block(batch, block, thread); });
          },
          [](const auto& batch, uint32_t block) {
            for_threads([&](int32_t thread) { Kernels::strided_block(batch, block, thread); });
          });
      check_same(found, expected);
    }
    const auto measured = lists.template by_kernels<true>(
        keep, static_cast<int32_t>(kChunkElements),
        [](const auto& batch, uint32_t block) {
          const auto chunk = Norms::find(batch, block);
          *chunk.partial = Norms::flat_block(batch, chunk, JoinInTurn{});
        },
        [](const auto& batch, uint32_t block) {
          const auto chunk = Norms::find(batch, block);
          *chunk.partial = Norms::strided_block(batch, chunk, JoinInTurn{});
        });
    check_same(measured, expected);
  }
}

// A table with one row that many gradients belong to.
template <int32_t pair, bool aligned>
void check_rows(int64_t columns, int64_t stride) {
  using Kernels = cuda::RowKernels<pair>;
  using Gradient = GradientOf<pair>;
  const int64_t rows = 9, count = 200;
  const Noise noise{generator(), random_stream()};
  const auto before = random_elements<AccumulatorOf<pair>>(rows * stride);
  const auto fresh = random_elements<Gradient>(count * stride);
  std::vector<cpu::RowPlace> places;
  for (int64_t i = 0; i < count; ++i) places.push_back({random_below(2) ? 4 : random_below(rows), i});
  std::stable_sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.row < b.row; });

  auto expected = before;
  std::vector<int64_t> numbers, order;
  for (size_t i = 0; i < places.size();) {
    const int64_t row = places[i].row;
    size_t end = i;
    for (; end < places.size() && places[end].row == row; ++end) {
      numbers.push_back(row);
      order.push_back(places[end].position);
    }
    const cpu::RowGradients own{fresh.data(), stride, &places[i], static_cast<int64_t>(end - i)};
    const Multipliers by{kScale, 1, noise.from(row * stride)};
    const int64_t cut = random_below(columns + 1);
    for (const auto& [first, last] : {std::pair{int64_t{0}, cut}, std::pair{cut, columns}}) {
      cpu::RowLoops<pair>::add(expected.data() + row * stride, own, first, last, by, true);
    }
    i = end;
  }

  auto found = before;
  cuda::RowArguments arguments{};
  arguments.work = {{found.data(), stride, rows, columns, pair},
                    {numbers.data(), 1, count, true, order.data()},
                    fresh.data(),
                    stride,
                    -1,
                    true,
                    noise};
  arguments.scale = {nullptr, kScale, 0};
  std::vector<float> sums(static_cast<size_t>(cuda::sums_needed(arguments.work)));
  arguments.sums = sums.data();
  CHECK(!aligned || cuda::rows_aligned(arguments.work));
  const int64_t across = Kernels::threads_of(columns, aligned);
  for (int64_t thread = 0; thread < count * across; ++thread) {
    Kernels::template thread<aligned, false>(arguments, thread);
  }
  for (int64_t thread = 0; thread < cuda::stretches(count) * across; ++thread) {
    Kernels::template thread<aligned, true>(arguments, thread);
  }
  check_same(found, expected);
}

template <int32_t pair>
void check_pair() {
  check_lists<pair>();
  check_rows<pair, true>(40, 48);
  check_rows<pair, true>(43, 48);
  check_rows<pair, false>(43, 45);
  check_rows<pair, false>(1, 1);
  check_rows<pair, false>(2100, 2101);
}

}  // namespace

int main() {
  check_philox();
  check_neighbours();
  check_pair<kHalf>();
  check_pair<kSingle>();
  std::printf("sums have the CPU's bits\n");
  return 0;
}
