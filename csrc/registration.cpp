// The operators' schemas, and nothing else. They are registered for every device at once (a call with empty
// lists has none) and choose by the accumulators' device.
#include "operations.h"

STABLE_TORCH_LIBRARY(fusedacc, m) {
  m.def(
      "scale_accumulate_(Tensor(a!)[] accumulators, Tensor[] gradients, Tensor? scale_tensor=None, "
      "float scale=1.0, bool[] overwrite=[]) -> ()");
  m.def("prepare(Tensor[] accumulators) -> Tensor");
  // The plan stands for the accumulators it points to, which is why it is the argument that changes.
  m.def(
      "accumulate_prepared_(Tensor(a!) plan, Tensor[] gradients, Tensor? scale_tensor=None, float scale=1.0, "
      "bool[] overwrite=[]) -> ()");
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(fusedacc, CompositeExplicitAutograd, m) {
  m.impl("scale_accumulate_", &fusedacc::scale_accumulate_);
  m.impl("prepare", &fusedacc::prepare);
  m.impl("accumulate_prepared_", &fusedacc::accumulate_prepared_);
  m.impl("build_info", &fusedacc::build_info);
}
