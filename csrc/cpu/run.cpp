#include "run.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../chunk_plan.h"
#include "share_out.h"

namespace fusedacc::cpu {
namespace {

const Loops& choose_loops() {
  std::vector<const Loops*> usable = {&kBaselineLoops};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    usable.push_back(&kAvx2Loops);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      usable.push_back(&kAvx512Loops);
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

struct Context {
  TaskSpan tasks;
  const StridedLayout* layouts;
  const Loops& loops;
  Multipliers by;
};

void run_part(int64_t begin, int64_t end, void* opaque) {
  const Context& context = *static_cast<const Context*>(opaque);
  visit_part(context.tasks, begin, end, [&](const Task& task, int64_t from, int64_t to) {
    if (task.layout < 0) {
      context.loops.flat[task.pair](task.accumulator, task.gradient, from, to, context.by, task.overwrite);
    } else {
      context.loops.strided[task.pair](task.accumulator, task.gradient, context.layouts[task.layout], from,
                                       to, context.by, task.overwrite);
    }
  });
}

struct NormContext {
  TaskSpan tasks;
  const StridedLayout* layouts;
  const Loops& loops;
  Multipliers by;
  NormRequest norm;
};

void run_norm_part(int64_t begin, int64_t end, void* opaque) {
  const NormContext& context = *static_cast<const NormContext*>(opaque);
  const int32_t kind = static_cast<int32_t>(context.norm.kind);
  visit_chunks(context.tasks, begin, end, [&](const Task& task, int64_t from, int64_t to, int64_t chunk) {
    const StridedLayout* layout = task.layout < 0 ? nullptr : &context.layouts[task.layout];
    double& partial = context.norm.partials[chunk];
    if (context.norm.reads) {
      partial = context.loops.norm[kind][task.pair](task.accumulator, layout, from, to);
      return;
    }
    const bool stream = task.numel * element_size(kPairs[task.pair].accumulator) >= kStreamBytes;
    partial = context.loops.add_norm[kind][task.pair](task.accumulator, task.gradient, layout, from, to,
                                                      context.by, task.overwrite, stream);
  });
}

}  // namespace

const Loops& loops() {
  static const Loops& chosen = choose_loops();
  return chosen;
}

namespace {

void run_tasks(TaskSpan tasks, const StridedLayout* layouts, int64_t elements, Multipliers by) {
  if (tasks.size() == 0) return;
  Context context{tasks, layouts, loops(), by};
  share_out(elements, kGrain, run_part, context);
}

void run_norm_tasks(TaskSpan tasks, const StridedLayout* layouts, int64_t chunks, Multipliers by,
                    const NormRequest& norm) {
  if (tasks.size() == 0) return;
  NormContext context{tasks, layouts, loops(), by, norm};
  share_out(chunks, kGrain / kChunkElements, run_norm_part, context);
}

double norm_of_partials(const double* partials, int64_t count, NormKind kind) {
  const int32_t pair = find_pair(Dtype::kFloat64, Dtype::kFloat64);
  return loops().norm[static_cast<int32_t>(kind)][pair](partials, nullptr, 0, count);
}

}  // namespace

void run(const Work& work, Multipliers by) { run_tasks(work.tasks, work.layouts.data(), work.elements, by); }

void run_norm(const Work& work, Multipliers by, const NormRequest& norm) {
  run_norm_tasks(work.tasks, work.layouts.data(), work.chunks, by, norm);
}

void finish_norm(const FinishRequest& finish) {
  std::vector<double> all;
  for (const Partials& partials : finish.partials) {
    all.insert(all.end(), partials.data, partials.data + partials.count);
  }
  const double norm = norm_of_partials(all.data(), static_cast<int64_t>(all.size()), finish.kind);
  if (finish.wide) {
    *static_cast<double*>(finish.norm) = norm;
  } else {
    *static_cast<float*>(finish.norm) = static_cast<float>(norm);
  }
  *finish.found = std::isfinite(norm) ? 0.0f : 1.0f;
}

const char* capability() { return loops().name; }

}  // namespace fusedacc::cpu

// For the module of csrc/autograd/, which checks lists by itself: tasks that are all flat, and never none.
extern "C" {

__attribute__((visibility("default"))) void fusedacc_run(const fusedacc::Task* tasks, int64_t count,
                                                         double scale, double keep) {
  const fusedacc::Task& last = tasks[count - 1];
  fusedacc::cpu::run_tasks({tasks, count}, nullptr, last.first + last.numel, {scale, keep});
}

// kind: a NormKind; partials: room for one of each chunk.
__attribute__((visibility("default"))) void fusedacc_run_norm(const fusedacc::Task* tasks, int64_t count,
                                                              double scale, double keep, int32_t kind,
                                                              bool reads, double* partials) {
  const fusedacc::Task& last = tasks[count - 1];
  fusedacc::cpu::run_norm_tasks({tasks, count}, nullptr, last.first_chunk + fusedacc::chunks_of(last.numel),
                                {scale, keep}, {static_cast<fusedacc::NormKind>(kind), partials, reads});
}

__attribute__((visibility("default"))) double fusedacc_join_norms(const double* partials, int64_t count,
                                                                  int32_t kind) {
  return fusedacc::cpu::norm_of_partials(partials, count, static_cast<fusedacc::NormKind>(kind));
}
}
