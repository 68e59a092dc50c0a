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
  const Work& work;
  const Loops& loops;
  Multipliers by;
};

void run_part(int64_t begin, int64_t end, void* opaque) {
  const Context& context = *static_cast<const Context*>(opaque);
  visit_part(context.work.tasks, begin, end, [&](const Task& task, int64_t from, int64_t to) {
    if (task.layout < 0) {
      context.loops.flat[task.pair](task.accumulator, task.gradient, from, to, context.by, task.overwrite);
    } else {
      context.loops.strided[task.pair](task.accumulator, task.gradient, context.work.layouts[task.layout],
                                       from, to, context.by, task.overwrite);
    }
  });
}

struct NormContext {
  const Work& work;
  const Loops& loops;
  Multipliers by;
  NormRequest norm;
};

void run_norm_part(int64_t begin, int64_t end, void* opaque) {
  const NormContext& context = *static_cast<const NormContext*>(opaque);
  const int32_t kind = static_cast<int32_t>(context.norm.kind);
  visit_chunks(context.work.tasks, begin, end,
               [&](const Task& task, int64_t from, int64_t to, int64_t chunk) {
                 const StridedLayout* layout = task.layout < 0 ? nullptr : &context.work.layouts[task.layout];
                 double& partial = context.norm.partials[chunk];
                 if (context.norm.reads) {
                   partial = context.loops.norm[kind][task.pair](task.accumulator, layout, from, to);
                   return;
                 }
                 const bool stream = task.numel * element_size(kPairs[task.pair].accumulator) >= kStreamBytes;
                 partial = context.loops.add_norm[kind][task.pair](
                     task.accumulator, task.gradient, layout, from, to, context.by, task.overwrite, stream);
               });
}

}  // namespace

const Loops& loops() {
  static const Loops& chosen = choose_loops();
  return chosen;
}

void run(const Work& work, Multipliers by) {
  if (work.tasks.empty()) return;
  Context context{work, loops(), by};
  share_out(work.elements, kGrain, run_part, context);
}

void run_norm(const Work& work, Multipliers by, const NormRequest& norm) {
  if (work.tasks.empty()) return;
  NormContext context{work, loops(), by, norm};
  share_out(work.chunks, kGrain / kChunkElements, run_norm_part, context);
}

void finish_norm(const FinishRequest& finish) {
  std::vector<double> all;
  for (const Partials& partials : finish.partials) {
    all.insert(all.end(), partials.data, partials.data + partials.count);
  }
  const int32_t pair = find_pair(Dtype::kFloat64, Dtype::kFloat64);
  const double norm = loops().norm[static_cast<int32_t>(finish.kind)][pair](all.data(), nullptr, 0,
                                                                            static_cast<int64_t>(all.size()));
  if (finish.wide) {
    *static_cast<double*>(finish.norm) = norm;
  } else {
    *static_cast<float*>(finish.norm) = static_cast<float>(norm);
  }
  *finish.found = std::isfinite(norm) ? 0.0f : 1.0f;
}

const char* capability() { return loops().name; }

}  // namespace fusedacc::cpu
