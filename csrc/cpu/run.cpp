#include "run.h"

#include <torch/csrc/stable/c/shim.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../chunk_plan.h"
#include "loops.h"

namespace fusedacc::cpu {
namespace {

// A thread's least share: about 30 microseconds of work, some times what waking it costs.
constexpr int64_t kGrain = 131072;

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

const Loops& loops() {
  static const Loops& chosen = choose_loops();
  return chosen;
}

struct Context {
  const Work& work;
  const Loops& loops;
  double scale;
};

void run_part(int64_t begin, int64_t end, void* opaque) {
  const Context& context = *static_cast<const Context*>(opaque);
  visit_part(context.work.tasks, begin, end, [&](const Task& task, int64_t from, int64_t to) {
    if (task.layout < 0) {
      context.loops.flat[task.pair](task.accumulator, task.gradient, from, to, context.scale, task.overwrite);
    } else {
      context.loops.strided[task.pair](task.accumulator, task.gradient, context.work.layouts[task.layout],
                                       from, to, context.scale, task.overwrite);
    }
  });
}

}  // namespace

void run(const Work& work, double scale) {
  if (work.tasks.empty()) return;
  Context context{work, loops(), scale};
  if (work.elements <= kGrain) {
    run_part(0, work.elements, &context);
  } else if (torch_parallel_for(0, work.elements, kGrain, run_part, &context) != 0) {
    throw std::runtime_error("fusedacc: torch's thread pool failed");
  }
}

const char* capability() { return loops().name; }

}  // namespace fusedacc::cpu
