#include "cpu.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../common/chunk_plan.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fusedacc::cpu {
namespace {

#if defined(__x86_64__)
bool has_amx() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & bit_AMX_TILE) != 0;
}
#endif

const Loops& choose_loops() {
  std::vector<const Loops*> usable = {&kBaselineLoops};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    usable.push_back(&kAvx2Loops);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      usable.push_back(&kAvx512Loops);
      if (__builtin_cpu_supports("avx512bf16")) {
        static const Loops with_bfloat16 = avx512_bf16_loops(has_amx() ? kAheadBytes : 0);
        usable.push_back(&with_bfloat16);
      }
    }
  }
#endif
  const char* wanted = std::getenv("FUSEDACC_CPU_CAPABILITY");
  if (wanted == nullptr || *wanted == '\0') return *usable.back();
  std::string allowed;
  for (const Loops* loops : usable) {
    if (std::strcmp(loops->name, wanted) == 0) return *loops;
    allowed += (allowed.empty() ? "" : ", ") + std::string(loops->name);
  }
  throw std::runtime_error("fusedacc: FUSEDACC_CPU_CAPABILITY=" + std::string(wanted) +
                           "; allowed on this processor: " + allowed);
}

}  // namespace

const Loops& loops() {
  static const Loops& chosen = choose_loops();
  return chosen;
}

namespace {

void run_tasks(TaskSpan tasks, const StridedLayout* layouts, int64_t elements, const Multipliers& by) {
  if (tasks.size() == 0) return;
  const Loops& chosen = loops();
  const auto visit = [&](const Task& task, int64_t from, int64_t to) {
    void* accumulator = task.accumulator;
    if (task.layout < 0) {
      chosen.flat[task.pair](accumulator, task.gradient, from, to, task.by(by), task.overwrite);
    } else {
      const StridedLayout& layout = layouts[task.layout];
      chosen.strided[task.pair](accumulator, task.gradient, layout, from, to, task.by(by), task.overwrite);
    }
  };
  parallel_for(elements, kGrain, [&](int64_t begin, int64_t end) { visit_part(tasks, begin, end, visit); });
}

}  // namespace

void run(const Work& work, Multipliers by) { run_tasks(work.tasks, work.layouts.data(), work.elements, by); }

void run_norm(const Work& work, const NormRequest& norm) {
  if (work.tasks.empty()) return;
  const auto norms = loops().norm[static_cast<int32_t>(norm.kind)];
  const auto visit = [&](const Task& task, int64_t from, int64_t to, int64_t chunk) {
    const StridedLayout* layout = task.layout < 0 ? nullptr : &work.layouts[task.layout];
    norm.partials[chunk] = norms[task.pair](task.accumulator, layout, from, to);
  };
  parallel_for(work.chunks, kGrain / kChunkElements,
               [&](int64_t begin, int64_t end) { visit_chunks(work.tasks, begin, end, visit); });
}

void finish_norm(const FinishRequest& finish) {
  std::vector<double> all;
  for (const Partials& partials : finish.partials) {
    all.insert(all.end(), partials.data, partials.data + partials.count);
  }
  const int32_t pair = find_pair(Dtype::kFloat64, Dtype::kFloat64);
  const auto norm_of = loops().norm[static_cast<int32_t>(finish.kind)][pair];
  const double norm = norm_of(all.data(), nullptr, 0, static_cast<int64_t>(all.size()));
  if (finish.wide) {
    *static_cast<double*>(finish.norm) = norm;
  } else {
    *static_cast<float*>(finish.norm) = static_cast<float>(norm);
  }
  *finish.nonfinite = std::isfinite(norm) ? 0.0f : 1.0f;
}

}  // namespace fusedacc::cpu

// Computes accumulator = beta * accumulator + scale * gradient, or scale * gradient if it overwrites, in the
// order of memory, for csrc/autograd/. dtypes: numbers of dtypes.h, a pair of kPairs.
extern "C" __attribute__((visibility("default"))) void fusedacc_add_flat(
    void* accumulator, const void* gradient, int64_t numel, int32_t gradient_dtype, int32_t accumulator_dtype,
    bool overwrites, const fusedacc::Multipliers* by) {
  using namespace fusedacc;
  if (numel == 0) return;
  const int32_t pair = find_pair(static_cast<Dtype>(gradient_dtype), static_cast<Dtype>(accumulator_dtype));
  const Task task{accumulator, gradient, numel, 0, pair, -1, overwrites};
  cpu::run_tasks({&task, 1}, nullptr, numel, *by);
}
