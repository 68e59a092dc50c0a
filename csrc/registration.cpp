// The operators' schemas. csrc/ops/ implements them: arguments and results are words on the dispatcher's
// stack, owned by the callee. Each operator is registered for every device at once (a call with empty lists
// has none) and selects by the accumulators' device.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(fusedacc, m) {
  // Accumulators that are not overwritten are multiplied by `beta`, rounded, and added to. seed, and
  // streams (one per accumulator), round sums of bfloat16 stochastically; see csrc/common/functors.h.
  m.def(
      "scale_accumulate_(Tensor(a!)[] accumulators, Tensor[] gradients, Tensor? scale_tensor=None, "
      "float scale=1.0, bool[] overwrite=[], Tensor? beta_tensor=None, float beta=1.0, int seed=0, "
      "int[] streams=[]) -> ()");
  m.def("prepare(Tensor[] accumulators) -> Tensor");
  // The plan refers to the accumulators, so it is marked as the argument that changes.
  m.def(
      "accumulate_prepared_(Tensor(a!) plan, Tensor[] gradients, Tensor? scale_tensor=None, float scale=1.0, "
      "bool[] overwrite=[], Tensor? beta_tensor=None, float beta=1.0, int seed=0, int[] streams=[]) -> ()");
  // A partial norm of each chunk of the tensors. norm_type: of kNormTypes in csrc/common/norm_functors.h.
  m.def("norm_partials(Tensor[] tensors, float norm_type=2.0) -> Tensor");
  // The norm, float64 if `wide`, else float32; and in float32 1 if an element was not finite, else 0.
  m.def(
      "finish_norm(Tensor[] partials, float norm_type=2.0, bool wide=False) -> (Tensor norm, Tensor "
      "found_inf)");
  // accumulator <- beta * accumulator + scale * left^T right on a CPU. If beta is 0, the accumulator is not
  // read. method: a GemmMethod of csrc/cpu/gemm.h.
  m.def(
      "gemm_accumulate_(Tensor(a!) accumulator, Tensor left, Tensor right, Tensor? scale_tensor=None, "
      "float scale=1.0, Tensor? beta_tensor=None, float beta=1.0, int method=0) -> ()");
  // The same for each matrix of the accumulator and the rows of left and right up to its offset.
  // GemmMethod kRankK adds experts with at most rank_k_tokens, and `method` the others.
  m.def(
      "grouped_accumulate_(Tensor(a!) accumulator, Tensor left, Tensor right, Tensor offsets, "
      "Tensor? scale_tensor=None, float scale=1.0, Tensor? beta_tensor=None, float beta=1.0, "
      "int rank_k_tokens=0, int method=0) -> ()");
  // Adds the sum, or the mean, of its gradients to each named row except `padding` (-1: none).
  m.def(
      "accumulate_rows_(Tensor(a!) table, Tensor indices, Tensor gradients, Tensor? scale_tensor=None, "
      "float scale=1.0, int padding=-1, bool by_frequency=False) -> ()");
  // The softmax of a slice of the vocabulary that begins with class `first`. logits [tokens, classes],
  // contiguous; statistics [3 or 4, tokens] and factors [4, tokens] as in csrc/common/softmax.h.
  m.def(
      "softmax_statistics_(Tensor(a!) statistics, Tensor logits, Tensor target, int first, "
      "Tensor? class_weights=None) -> ()");
  m.def(
      "softmax_gradient_(Tensor(a!) logits, Tensor factors, Tensor target, int first, "
      "Tensor? class_weights=None) -> ()");
  m.def("build_info() -> str");
}
