"""Mistakes that are likely; those of many ranks are in `broken_ranks.py`."""

from mutant import read_mutants

BREAKS = read_mutants(
    r"""
# a mean over the wrong number
fusedacc/optimizer: tests/optimizer/test_contract.py
-(self.steps if self.reduction.counts else 1)
+(self.steps + 1 if self.reduction.counts else 1)
# a part-filled window is not divided by what it holds
fusedacc/optimizer: tests/optimizer/test_reductions.py tests/optimizer/test_contract.py
-(partial and count < self.steps)
+False
# a weight of 0 is added
fusedacc/optimizer: tests/optimizer/test_reductions.py tests/accumulators/test_deferred_scale.py
-return self.reduction.weighs and _is_zero(self.micro.weight)
+return False
# a late weight of 0 goes unseen
fusedacc/optimizer: tests/optimizer/test_arguments.py
-if late and not on_device and value == 0:
+if False:
# a window whose update has failed goes on
fusedacc/optimizer: tests/optimizer/test_failed_update.py
-self.micro_step >= (self._steps
+self.micro_step > (self._steps
# the deferred scale is applied twice
fusedacc/accumulators/passes.py: tests/accumulators/test_deferred_scale.py
 exposed, beta)
-            self._deferred.discharge(of)
# a prepared list forgets its deferred scale
fusedacc/accumulators: tests/accumulators/test_deferred_scale.py tests/accumulators/test_passes.py
-how = scale, False, beta, self._norms.norm_type, noise
+how = scale, False, 1.0, self._norms.norm_type, noise
# a prepared list is used after its tensors have moved
fusedacc/accumulators: tests/accumulators/test_passes.py
-return self._addresses == [
+return [] != [
# a sum takes the memory of a gradient of another layout
fusedacc/accumulators: tests/optimizer/test_contract.py tests/autograd
-size == 1 or have == want
+True
# accumulators stay private after the window's last backward
fusedacc/optimizer: tests/optimizer/test_contract.py
-if not window.private:
+if False:
# gradients of autograd's are not collected
fusedacc/optimizer: tests/autograd/test_ignored.py
-self._add_stored(foreign)
+pass
# gradients of a frozen parameter are taken
fusedacc/autograd: tests/autograd/test_eligibility.py
-return not slot.param.requires_grad
+return False
# post-accumulate hooks see nothing
fusedacc/autograd: tests/autograd/test_eligibility.py
-return bool(slot.param._post_accumulate_grad_hooks)
+return False
# a shared gradient becomes the sum
fusedacc/autograd: tests/autograd/test_unusual_gradients.py
-sole = python_count(gradient) <= python_limit and tensor_count(gradient) <= tensor_limit
+sole = True
# the norm is left out of clipping
fusedacc/optimizer: tests/optimizer/test_update.py
-.clamp(max=1.0)
+.clamp(min=1.0)
# what is not finite is applied
fusedacc/optimizer: tests/optimizer/test_update.py
-if found is not None and not drops and self._is_set(found):
+if False:
# the loss scale is not divided out
fusedacc/optimizer: tests/optimizer/test_amp.py
-self.multiplier = loss_scale.double().reciprocal()
+self.multiplier = None
# masters lose their low bits
fusedacc/optimizer: tests/optimizer/test_master_weights.py
-_put(slot.param, master)
+_put(slot.param, master.to(slot.param.dtype).float())
# sums are left out of a checkpoint
fusedacc/optimizer: tests/optimizer/test_resume.py
-partial = include_partial and not window.empty
+partial = False
# a deep copy forgets what is deferred
fusedacc/optimizer: tests/optimizer/test_lifetime.py tests/accumulators/test_deferred_scale.py
-PUBLISHED, accumulators.scale_of(slot)
+PUBLISHED, 1.0
# close() leaves the hooks
fusedacc/autograd: tests/optimizer/test_lifetime.py
-handle.remove()
+pass
# a module hides a weight's gradient from its hook
fusedacc/autograd: tests/nn
-or param._backward_hooks
+or False
# the last step of an expert takes rows of the next
fusedacc/kernels/triton: tests/kernels/test_triton_grouped.py
-there = (start + token < end)[:, None]
+there = (start + token < tokens)[:, None]
# a kept cast outlives a change of its weight
fusedacc/nn: tests/nn/test_keep_casts_changes.py
-        weight._version,
# a kept cast is of what the storage held in another shape
fusedacc/nn: tests/nn/test_keep_casts_changes.py
-        weight.shape,
-        weight.stride(),
# kept casts live on in the inner optimizer's step
fusedacc/nn: tests/nn/test_keep_casts_freed.py
-        self.drop()
         try:
# a weight that was written past its version goes on with the former cast
fusedacc/nn: tests/nn/test_keep_casts_changes.py
-and _is_written(*kept.sampled)
+and False
# the gradient of one expert goes to the sum of another
fusedacc/nn: tests/nn/test_experts.py
-accumulator[index],
+accumulator[0],
# an expert's second gradient is written over its first
fusedacc/accumulators/in_place.py: tests/nn/test_expert_parts.py
-1.0 if part in written else 0.0
+0.0
# an expert's first gradient is added to old memory
fusedacc/accumulators/in_place.py: tests/nn/test_expert_parts.py
-1.0 if part in written else 0.0
+1.0
# experts that had no gradient keep old memory
fusedacc/accumulators/in_place.py: tests/nn/test_expert_parts.py
-if gaps:
+if False:
# a sum of experts takes the place of what was put into p.grad
fusedacc/accumulators/in_place.py: tests/nn/test_expert_parts.py
-if present is None:
+if True:
# experts of a failed backward are counted in the next
fusedacc/autograd/capture.py: tests/nn/test_expert_parts.py
             else:
-                self.accumulators.partial.forget()
+                self.accumulators.partial.complete()
# a stand-in outlives the forward that it was made for
fusedacc/nn: tests/nn/test_stand_ins.py
-                    del own[name]
+                    pass
# what sees no subclass differentiates by a stand-in alone
fusedacc/nn: tests/nn/test_stand_ins.py
-as_subclass(plain, StackedWeight)
+as_subclass(plain.detach(), StackedWeight)
# a module's copy accumulates into the original
fusedacc/nn: tests/nn/test_patches.py
-if self._name == "__deepcopy__":
+if False:
# a long row's mean is that of its last run
fusedacc/kernels: tests/kernels/test_rows.py
-length = end - begin
+length = end - begin - _RUN
# a padding row counted from the end takes gradients
fusedacc/kernels: tests/kernels/test_rows.py
-padding_idx % table.shape[0]
+padding_idx
# the norm of a list of two dtypes loses its digits
fusedacc/kernels: tests/kernels/test_norm.py
-wide = any(
+wide = all(
# ties are rounded away from zero
csrc/common/functors.h: tests/kernels/test_host_headers.py
-bits + 0x7fffu + ((bits >> 16) & 1u)
+bits + 0x8000u
# the norm of tiny numbers is nothing
csrc/common/norm_functors.h: tests/kernels/test_host_headers.py
-single ? 0x1p-110 :
+single ? 0.0f :
# long reasons make the summary of info longer than a screen
fusedacc/commands: tests/commands/test_info.py
-_REASON_LENGTHS = (800, 400, 200, 100, 50, 25)
+_REASON_LENGTHS = (800,)
# the GPU waits for each step's loads before it issues the next
csrc/cuda/device/accumulate_block.h:
tests/kernels/test_machine_code.py::test_loads_are_issued_before_the_first_is_used[cuda-accumulate-sm_90]
-kUnroll = 4;
+kUnroll = 1;
# the GPU moves 8 bytes at a time
csrc/cuda/device/accumulate_block.h: tests/kernels/test_machine_code.py -k accumulation_moves_16_bytes
-kPackedBytes<T, count> < kVectorBytes ? 8 : kVectorBytes;
+8;
# the GPU's kernels spill registers
csrc/cuda/launch.h: tests/kernels/test_machine_code.py::test_no_kernel_spills[cuda-accumulate-sm_90]
-kBlocks = 4;
+kBlocks = 8;
# bfloat16 is rounded by hand on a GPU, with more instructions than memory has time for
csrc/common/functors.h:
tests/kernels/test_machine_code.py::test_memory_is_the_first_bound[cuda-accumulate-sm_100]
-  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
+  const uint32_t bits = bits_as<uint32_t>(value), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
+  return {static_cast<uint16_t>((value != value ? bits | 0x400000u : rounded) >> 16)};
"""
)
