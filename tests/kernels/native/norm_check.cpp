// Runs the bodies of the CUDA kernels that leave norms on the host, block by block and thread by thread, and
// the CPU's chunks. Prints what fails and exits with 1.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

#include "cuda/device/norm_block.h"

#include "check.h"

using namespace fusedacc;

namespace {

template <int32_t bytes, bool stochastic = false>
using Flat = typename cuda::Batches<stochastic, true>::template Flat<bytes>;
template <int32_t bytes, bool stochastic = false>
using Strided = typename cuda::Batches<stochastic, true>::template Strided<bytes>;
using Lists = cuda::PartialLists<32764>;
template <int32_t bytes>
constexpr bool kFits = sizeof(Flat<bytes>) <= bytes && sizeof(Strided<bytes>) <= bytes &&
                       sizeof(Flat<bytes, true>) <= bytes && sizeof(Strided<bytes, true>) <= bytes;
static_assert(kFits<32764> && kFits<4096> && sizeof(Lists) <= 32764);
constexpr uint64_t kSeed = 0x123456789abcdef0u;
constexpr double kKeep = 0.75;

// As a block joins: by exchanges between threads whose numbers differ in one bit.
template <int32_t threads>
struct JoinAll {
  template <typename Functor, typename Value>
  typename Functor::State operator()(Functor, Value&& value) const {
    std::vector<typename Functor::State> states(threads);
    for (int32_t thread = 0; thread < threads; ++thread) states[thread] = value(thread);
    for (int32_t other = 1; other < threads; other *= 2) {
      const auto before = states;
      for (int32_t thread = 0; thread < threads; ++thread) {
        states[thread] = Functor::join(before[thread], before[thread ^ other]);
      }
    }
    for (const auto& state : states) CHECK(std::memcmp(&state, &states[0], sizeof(state)) == 0);
    return states[0];
  }
};

template <int32_t pair, NormKind kind, bool reads>
std::vector<double> partials_of(const Work& work, double scale) {
  using Kernels = cuda::NormKernels<pair, kind, reads>;
  const JoinAll<cuda::kThreads> join;
  std::vector<double> partials(static_cast<size_t>(work.chunks), -1);
  constexpr bool stochastic = kIsStochastic<AccumulatorOf<pair>>;
  static Flat<32764, stochastic> flat;
  static Strided<32764, stochastic> strided;
  flat.factors = strided.factors = {{nullptr, scale, 0}, {nullptr, kKeep, 0}};
  if constexpr (stochastic) flat.seed = strided.seed = kSeed;
  flat.partials = strided.partials = partials.data();
  for_each_batch(work, pair, false, flat, [&](const auto& full, int64_t chunks) {
    for (int64_t block = 0; block < chunks; ++block) {
      const auto chunk = Kernels::find(full, static_cast<uint32_t>(block));
      *chunk.partial = Kernels::flat_block(full, chunk, join);
    }
  });
  for_each_batch(work, pair, true, strided, [&](const auto& full, int64_t chunks) {
    for (int64_t block = 0; block < chunks; ++block) {
      const auto chunk = Kernels::find(full, static_cast<uint32_t>(block));
      *chunk.partial = Kernels::strided_block(full, chunk, join);
    }
  });
  return partials;
}

double finish(const std::vector<double>& partials, NormKind kind, float& found) {
  static Lists lists;
  double norm = -1;
  const int64_t cut = static_cast<int64_t>(partials.size()) / 3;
  lists.count = 2;
  lists.partials[0] = partials.data();
  lists.sizes[0] = cut;
  lists.partials[1] = partials.data() + cut;
  lists.sizes[1] = static_cast<int64_t>(partials.size()) - cut;
  lists.norm = &norm;
  lists.found = &found;
  lists.wide = true;
  const JoinAll<cuda::kFinishThreads> join;
  const auto run = [&] {
    if (kind == NormKind::kTwo) {
      cuda::finish_block<NormKind::kTwo>(lists, true, join);
    } else {
      cuda::finish_block<NormKind::kInfinity>(lists, true, join);
    }
  };
  run();
  float narrow_norm = -1;
  lists.norm = &narrow_norm;
  lists.wide = false;
  run();
  CHECK(narrow_norm == static_cast<float>(norm) || std::isnan(norm));
  return norm;
}

template <int32_t pair>
struct Case {
  using Gradient = GradientOf<pair>;
  using Accumulator = AccumulatorOf<pair>;
  // What reads the sums: how they were rounded is no matter then.
  static constexpr Dtype kStored = stored_as(kPairs[pair].accumulator);
  static constexpr int32_t kOwn = find_pair(kStored, kStored);

  std::vector<std::vector<Accumulator>> sums;
  std::vector<std::vector<Gradient>> fresh;
  Work work;

  // Flat tensors at random alignments; the last is a loop nest whose accumulator is dense.
  explicit Case(double magnitude) {
    std::normal_distribution<double> normal(0, magnitude);
    for (int64_t i = 0; i < 6; ++i) {
      const int64_t limits[] = {20, 3000, 3 * kChunkElements};
      const int64_t size = i == 5 ? 130 * 70 : 1 + random_below(limits[i % 3]);
      const int64_t shift = i % 2 ? random_below(9) : 0, other = i < 2 ? 0 : random_below(9);
      sums.emplace_back(size + shift);
      fresh.emplace_back(size + other);
      for (auto& element : sums.back()) element = element_of<Accumulator>(normal(generator));
      for (auto& element : fresh.back()) element = element_of<Gradient>(normal(generator));
      Task task{sums.back().data() + shift, fresh.back().data() + other, size, 0, pair, -1, i % 4 == 1, 0, random_stream()};
      if (i == 5) {
        task.layout = 0;
        work.layouts.push_back({2, {130, 70}, {70, 1}, {1, 130}});
      }
      work.push(task);
    }
  }

  // The sums alone, as norm_partials sees them: the nest is flat.
  Work sums_only() const {
    Work alone;
    for (const Task& task : work.tasks) {
      alone.push({task.accumulator, task.accumulator, task.numel, 0, kOwn, -1, false});
    }
    return alone;
  }

  // What the sums are to become, one by one.
  std::vector<std::vector<Accumulator>> expected(double scale) const {
    std::vector<std::vector<Accumulator>> all;
    for (const Task& task : work.tasks) {
      const ScaleAccumulate<Gradient, Accumulator> functor(task.by({scale, kKeep, {kSeed}}));
      const auto* into = static_cast<const Accumulator*>(task.accumulator);
      const auto* from = static_cast<const Gradient*>(task.gradient);
      all.emplace_back();
      for (int64_t i = 0; i < task.numel; ++i) {
        const Gradient value = from[task.layout < 0 ? i : i % 70 * 130 + i / 70];
        const uint32_t bits = functor.bits_at(i);
        all.back().push_back(task.overwrite ? functor.overwrite(value, bits)
                                            : functor.add(value, into[i], bits));
      }
    }
    return all;
  }
  bool equals(const std::vector<std::vector<Accumulator>>& all) const {
    for (size_t i = 0; i < all.size(); ++i) {
      if (std::memcmp(work.tasks[i].accumulator, all[i].data(), all[i].size() * sizeof(Accumulator)) != 0) {
        return false;
      }
    }
    return true;
  }

  long double norm_of_sums(NormKind kind) const {
    long double sum = 0, largest = 0;
    for (const Task& task : work.tasks) {
      for (int64_t i = 0; i < task.numel; ++i) {
        const long double value = widen(static_cast<const Accumulator*>(task.accumulator)[i]);
        sum += value * value;
        largest = std::max(largest, value < 0 ? -value : value);
      }
    }
    return kind == NormKind::kTwo ? sqrtl(sum) : largest;
  }
};

template <int32_t pair, NormKind kind>
void check_norms() {
  constexpr int32_t own = Case<pair>::kOwn;
  constexpr bool half =
      kPairs[pair].gradient == Dtype::kFloat16 || kPairs[pair].accumulator == Dtype::kFloat16;
  constexpr bool wide = kPairs[pair].accumulator == Dtype::kFloat64;
  for (int round = 0; round < 3; ++round) {
    const double small = half ? 1e-3 : wide ? 1e-290 : 1e-30, large = half ? 100.0 : wide ? 1e290 : 1e30;
    Case<pair> lists(round == 0 ? 1.0 : round == 1 ? small : large);
    const auto expected_sums = lists.expected(0.3);
    const auto fused = partials_of<pair, kind, false>(lists.work, 0.3);
    CHECK(lists.equals(expected_sums));
    const auto read = partials_of<own, kind, true>(lists.sums_only(), 0);
    CHECK(fused == read);
    float found = -1;
    const double norm = finish(fused, kind, found);
    const long double expected = lists.norm_of_sums(kind);
    // A thread adds 32 squares, a block joins 256 sums: 40 roundings at most, halved by the root.
    const long double allowed = kind == NormKind::kInfinity ? 0 : expected * (wide ? 0x1p-47L : 0x1p-18L);
    CHECK(std::fabs(norm - expected) <= allowed);
    CHECK(found == 0);
    for (const double bad : {INFINITY, NAN}) {
      const Task& task = lists.work.tasks[static_cast<size_t>(random_below(6))];
      auto* elements = static_cast<AccumulatorOf<pair>*>(task.accumulator);
      const int64_t place = random_below(task.numel);
      const auto before = elements[place];
      elements[place] = element_of<AccumulatorOf<pair>>(bad);
      const double spoilt = finish(partials_of<own, kind, true>(lists.sums_only(), 0), kind, found);
      CHECK(found == 1);
      CHECK(std::isnan(bad) ? std::isnan(spoilt) : spoilt == bad);
      elements[place] = before;
    }
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

template <int32_t... pairs>
void check_kernels(std::integer_sequence<int32_t, pairs...>) {
  (check_norms<pairs, NormKind::kTwo>(), ...);
  (check_norms<pairs, NormKind::kInfinity>(), ...);
}

}  // namespace

int main() {
  check_chunks();
  check_kernels(std::make_integer_sequence<int32_t, kPairCount>());
  float found = -1;
  CHECK(finish({}, NormKind::kTwo, found) == 0 && found == 0);
  std::printf("capacities %d and %d\n", Flat<32764>::kCapacity, Lists::kCapacity);
  return 0;
}
