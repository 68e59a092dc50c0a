// The memory that each kernel's arguments point to: for_each_access(arguments, note) calls
// note(data, is_written). build.py includes this file at the end of each source of csrc/cuda/.
#pragma once

namespace fusedacc {

template <typename Note>
void note_factors(const Factors& factors, Note&& note) {
  note(factors.scale.tensor, false);
  note(factors.beta.tensor, false);
}

// In passes that only read, such as those of a norm, the gradient and the accumulator are the same memory.
template <int32_t capacity, typename Note>
void for_each_access(const FlatBatch<capacity>& batch, Note&& note) {
  for (int32_t i = 0; i < batch.count; ++i) {
    note(batch.gradients[i], false);
    if (batch.accumulators[i] != batch.gradients[i]) note(batch.accumulators[i], true);
  }
  note_factors(batch.factors, note);
}

template <typename Batch, typename Note>
void for_each_access(const WithPartials<Batch>& batch, Note&& note) {
  for_each_access(static_cast<const Batch&>(batch), note);
  note(batch.partials, true);
}

#ifdef EMULATED_NORM
namespace cuda {
template <int32_t bytes, typename Note>
void for_each_access(const PartialLists<bytes>& lists, Note&& note) {
  for (int32_t i = 0; i < lists.count; ++i) {
    if (lists.sizes[i] > 0) note(lists.partials[i], false);
  }
  note(lists.norm, true);
  note(lists.nonfinite, true);
}
}  // namespace cuda
#endif

#ifdef EMULATED_ROWS
namespace cuda {
template <typename Note>
void for_each_access(const RowArguments& arguments, Note&& note) {
  const RowWork& work = arguments.work;
  note(work.gradients, false);
  note(work.numbers.data, false);
  note(work.numbers.order, false);
  note(arguments.scale.tensor, false);
  note(work.table.data, true);
  note(arguments.sums, true);
}
}  // namespace cuda
#endif

#ifdef EMULATED_SOFTMAX
template <typename Note>
void for_each_access(const SoftmaxSlice& slice, Note&& note) {
  note(slice.logits, slice.is_gradient);
  note(slice.numbers, !slice.is_gradient);
  note(slice.target, false);
  note(slice.class_weights, false);
}
#endif

}  // namespace fusedacc
