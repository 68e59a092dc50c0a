// The operators' schemas, and nothing else. They are registered for every device at once (a call with empty
// lists has none) and choose by the accumulators' device.
#include "ops/ops.h"

STABLE_TORCH_LIBRARY(fusedacc, m) {
  // Sums that are not overwritten are multiplied by `keep`, rounded, and added to.
  m.def(
      "scale_accumulate_(Tensor(a!)[] accumulators, Tensor[] gradients, Tensor? scale_tensor=None, "
      "float scale=1.0, bool[] overwrite=[], Tensor? keep_tensor=None, float keep=1.0) -> ()");
  m.def("prepare(Tensor[] accumulators) -> Tensor");
  // The plan stands for the accumulators it points to, which is why it is the argument that changes.
  m.def(
      "accumulate_prepared_(Tensor(a!) plan, Tensor[] gradients, Tensor? scale_tensor=None, float scale=1.0, "
      "bool[] overwrite=[], Tensor? keep_tensor=None, float keep=1.0) -> ()");
  // The same, and a partial norm of the new sums for each of their chunks. norm_type is 2 or inf.
  m.def(
      "scale_accumulate_norm_(Tensor(a!)[] accumulators, Tensor[] gradients, Tensor? scale_tensor=None, "
      "float scale=1.0, bool[] overwrite=[], float norm_type=2.0, Tensor? keep_tensor=None, float keep=1.0) "
      "-> Tensor");
  m.def(
      "accumulate_prepared_norm_(Tensor(a!) plan, Tensor[] gradients, Tensor? scale_tensor=None, "
      "float scale=1.0, bool[] overwrite=[], float norm_type=2.0, Tensor? keep_tensor=None, float keep=1.0) "
      "-> Tensor");
  m.def("norm_partials(Tensor[] tensors, float norm_type=2.0) -> Tensor");
  // The norm, float64 if `wide` and else float32, and 1 or 0 in float32: whether an element was not finite.
  m.def(
      "finish_norm(Tensor[] partials, float norm_type=2.0, bool wide=False) -> (Tensor norm, Tensor "
      "found_inf)");
  // accumulator <- keep * accumulator + scale * left^T right; where keep is 0, the accumulator is not read.
  // way: on a CPU, see csrc/cpu/gemm_ways.h.
  m.def(
      "gemm_accumulate_(Tensor(a!) accumulator, Tensor left, Tensor right, Tensor? scale_tensor=None, "
      "float scale=1.0, Tensor? keep_tensor=None, float keep=1.0, int way=0) -> ()");
  // Why that cannot run on CUDA tensors; empty where it can.
  m.def("gemm_problem() -> str");
  // For each row that is named and is not `padding` (-1: none): its gradients' sum, or their mean, is added.
  m.def(
      "accumulate_rows_(Tensor(a!) table, Tensor indices, Tensor gradients, Tensor? scale_tensor=None, "
      "float scale=1.0, int padding=-1, bool by_frequency=False) -> ()");
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(fusedacc, CompositeExplicitAutograd, m) {
  m.impl("scale_accumulate_", &fusedacc::scale_accumulate_);
  m.impl("prepare", &fusedacc::prepare);
  m.impl("accumulate_prepared_", &fusedacc::accumulate_prepared_);
  m.impl("scale_accumulate_norm_", &fusedacc::scale_accumulate_norm_);
  m.impl("accumulate_prepared_norm_", &fusedacc::accumulate_prepared_norm_);
  m.impl("norm_partials", &fusedacc::norm_partials);
  m.impl("finish_norm", &fusedacc::finish_norm);
  m.impl("gemm_accumulate_", &fusedacc::gemm_accumulate_);
  m.impl("gemm_problem", &fusedacc::gemm_problem);
  m.impl("accumulate_rows_", &fusedacc::accumulate_rows_);
  m.impl("build_info", &fusedacc::build_info);
}
