// The operators' schemas, and nothing else. csrc/ops/ has them: as the dispatcher calls them, with arguments
// and results that are words on a stack, owned by the callee. Each is registered for every device at once (a
// call with empty lists has none) and chooses by the accumulators' device.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(fusedacc, m) {
  // Accumulators that are not overwritten are multiplied by `keep` (beta), rounded, and added to. seed and
  // streams, one for each accumulator: sums of bfloat16 are rounded stochastically, see
  // csrc/common/functors.h.
  m.def(
      "scale_accumulate_(Tensor(a!)[] accumulators, Tensor[] gradients, Tensor? scale_tensor=None, "
      "float scale=1.0, bool[] overwrite=[], Tensor? keep_tensor=None, float keep=1.0, int seed=0, "
      "int[] streams=[]) -> ()");
  m.def("prepare(Tensor[] accumulators) -> Tensor");
  // The plan stands for the accumulators it points to, which is why it is the argument that changes.
  m.def(
      "accumulate_prepared_(Tensor(a!) plan, Tensor[] gradients, Tensor? scale_tensor=None, float scale=1.0, "
      "bool[] overwrite=[], Tensor? keep_tensor=None, float keep=1.0, int seed=0, int[] streams=[]) -> ()");
  // The same, and after it a partial norm of each of the accumulators' chunks. norm_type is 2 or inf.
  m.def(
      "scale_accumulate_norm_(Tensor(a!)[] accumulators, Tensor[] gradients, Tensor? scale_tensor=None, "
      "float scale=1.0, bool[] overwrite=[], float norm_type=2.0, Tensor? keep_tensor=None, float keep=1.0, "
      "int seed=0, int[] streams=[]) -> Tensor");
  m.def(
      "accumulate_prepared_norm_(Tensor(a!) plan, Tensor[] gradients, Tensor? scale_tensor=None, "
      "float scale=1.0, bool[] overwrite=[], float norm_type=2.0, Tensor? keep_tensor=None, float keep=1.0, "
      "int seed=0, int[] streams=[]) -> Tensor");
  m.def("norm_partials(Tensor[] tensors, float norm_type=2.0) -> Tensor");
  // The norm, float64 if `wide` and else float32, and 1 or 0 in float32: whether an element was not finite.
  m.def(
      "finish_norm(Tensor[] partials, float norm_type=2.0, bool wide=False) -> (Tensor norm, Tensor "
      "found_inf)");
  // accumulator <- keep * accumulator + scale * left^T right on a CPU; where keep is 0, the accumulator is
  // not read. way: see csrc/cpu/gemm.h.
  m.def(
      "gemm_accumulate_(Tensor(a!) accumulator, Tensor left, Tensor right, Tensor? scale_tensor=None, "
      "float scale=1.0, Tensor? keep_tensor=None, float keep=1.0, int way=0, int seed=0, int[] streams=[]) "
      "-> ()");
  // The same for each matrix of the accumulator, and the rows of left and right up to its offset. Experts
  // with rank_k_tokens at most are added by loops of our own, those with rounded_tokens at least as `way` 2
  // has it.
  m.def(
      "grouped_accumulate_(Tensor(a!) accumulator, Tensor left, Tensor right, Tensor offsets, "
      "Tensor? scale_tensor=None, float scale=1.0, Tensor? keep_tensor=None, float keep=1.0, "
      "int rank_k_tokens=0, int rounded_tokens=9223372036854775807, int seed=0, int[] streams=[]) -> ()");
  // For each row that is named and is not `padding` (-1: none): its gradients' sum, or their mean, is added.
  m.def(
      "accumulate_rows_(Tensor(a!) table, Tensor indices, Tensor gradients, Tensor? scale_tensor=None, "
      "float scale=1.0, int padding=-1, bool by_frequency=False, int seed=0, int[] streams=[]) -> ()");
  // The softmax of a slice of the vocabulary, whose first class is `first`. logits [tokens, classes],
  // contiguous; statistics [3 or 4, tokens] and factors [4, tokens] as csrc/common/softmax.h has them.
  m.def(
      "softmax_statistics_(Tensor(a!) statistics, Tensor logits, Tensor target, int first, "
      "Tensor? class_weights=None) -> ()");
  m.def(
      "softmax_gradient_(Tensor(a!) logits, Tensor factors, Tensor target, int first, "
      "Tensor? class_weights=None) -> ()");
  m.def("build_info() -> str");
}
