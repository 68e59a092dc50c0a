"""Mutants with likely mistakes. `broken_ranks.py` has those that need several ranks."""

from mutant import read_mutants

BREAKS = read_mutants(
    r"""
fusedacc/kernels: tests/kernels/test_engine_build.py
# a failed build is tried again in each process
-problem = note.read(began)
+problem = None
# each of several processes tries again what has just failed
-holds = is_new or (
+holds = (
# a compiler that was killed is not tried again
-would_repeat=not was_stopped
+would_repeat=True
# a failed build is not tried again with another compiler
-return problem if holds and compiler == self._compiler else None
+return problem if holds else None
# processes that waited build again
-        if file.exists():
-            return None
# an engine of other sources is used
-        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
+        digest.update(path.name.encode())
# the engine is built although it is switched off
-if os.environ.get(VARIABLE) == "0":
+if False:
# a released engine is used with another version
-{torch_version.partition('+')[0]}-{commit[:12]}
+{torch_version.partition('+')[0][:1]}
fusedacc/optimizer: tests/optimizer/test_contract.py
# a mean over the wrong number
-self.ranks * (self.steps if
+self.ranks * (self.steps + 1 if
# accumulators stay private after the window's last backward
-            self.publish()
+            pass
         elif outermost
fusedacc/optimizer: tests/optimizer/test_reductions.py tests/optimizer/test_contract.py
# a partly filled window is not divided by what it holds
-(partial and 0 < micro_batches < self.steps)
+False
fusedacc/optimizer: tests/optimizer/test_reductions.py tests/accumulators/test_deferred_scale.py
# a weight of 0 is added
-return self.reduction.weighs and not isinstance(weight, Tensor)
+return False
fusedacc/optimizer: tests/optimizer/test_arguments.py
# a late weight of 0 goes unseen
-if not on_device and value == 0:
+if False:
fusedacc/optimizer: tests/optimizer/test_failed_update.py
# a window whose update has failed goes on
-self.micro_step >= (self._steps
+self.micro_step > (self._steps
fusedacc/accumulators: tests/accumulators/test_deferred_scale.py
# the deferred scale is applied twice
             )
-            self.deferred.discharge(group)
# an addition forgets the deferred scale
                 exposed=exposed,
-                beta=beta,
fusedacc/accumulators: tests/optimizer/test_contract.py tests/autograd
# a sum takes the memory of a gradient of another layout
-size == 1 or have == want
+True
fusedacc/optimizer: tests/autograd
# gradients of autograd's are not collected
-self._add_stored(foreign)
+pass
fusedacc/optimizer: tests/optimizer/test_update.py
# the norm is left out of clipping
-.clamp(max=1.0)
+.clamp(min=1.0)
# what is not finite is applied
-if found_inf is not None and not kernel_skips and self._is_set(found_inf):
+if False:
fusedacc/optimizer: tests/optimizer/test_amp.py
# the loss scale is not divided out
-self.multiplier = loss_scale.double().reciprocal()
+self.multiplier = None
fusedacc/optimizer: tests/optimizer/test_master_weights.py
# masters lose their low bits
-_put(slot.param, master)
+_put(slot.param, master.to(slot.param.dtype).float())
fusedacc/optimizer: tests/optimizer/test_resume.py
# sums are left out of a checkpoint
-partial = include_partial and not window.empty
+partial = False
fusedacc/optimizer: tests/optimizer/test_lifetime.py tests/accumulators/test_deferred_scale.py
# a deep copy forgets what is deferred
-PUBLISHED, float(slot.beta)
+PUBLISHED, 1.0
fusedacc/autograd: tests/optimizer/test_lifetime.py
# close() leaves the hooks
-            self._engine.detach(slot)
+            pass
fusedacc/autograd: tests/nn
# Python writes the sum of a module's weight where a hook needs the gradient
-        if not self.engine.may_write(slot, node):
+        if node is None:
fusedacc/accumulators: tests/nn/test_head.py tests/nn/test_autograd.py tests/autograd
# without the engine, a head hides a weight's gradient from its hook
-is_read = acts or
+is_read =
fusedacc/kernels: tests/kernels/test_triton_grouped.py
# the last step of an expert takes rows of the next
-of_expert = (start + token < end)[:, None]
+of_expert = (start + token < tokens)[:, None]
fusedacc/nn: tests/nn/test_keep_casts_changes.py
# a kept cast outlives a change of its weight
-            weight._version,
# a kept cast is of what the storage held in another shape
-            weight.shape,
-            weight.stride(),
# a weight that was written past its version goes on with the former cast
-and _is_written(*kept.sampled)
+and False
fusedacc/nn: tests/nn/test_keep_casts_freed.py
# kept casts live on in the inner optimizer's step
-        self.drop()
         try:
fusedacc/nn: tests/nn/test_experts.py
# the gradient of one expert goes to the sum of another
-[accumulator[index]], [gradient]
+[accumulator[0]], [gradient]
fusedacc/accumulators: tests/nn/test_expert_parts.py
# an expert's second gradient is written over its first
-1.0 if part in written else 0.0
+0.0
# an expert's first gradient is added to old memory
-1.0 if part in written else 0.0
+1.0
# experts that had no gradient keep old memory
-if gaps:
+if False:
# a sum of experts takes the place of what was put into p.grad
-if present is None:
+if True:
fusedacc/autograd: tests/nn/test_expert_parts.py
# experts of a failed backward are counted in the next
-            if all(map(self.engine.has_failed, backwards)):
-                self.accumulators.in_place.forget()
+            if False:
+                pass
fusedacc/nn: tests/nn/test_stand_ins.py
# a stand-in outlives the forward that it was made for
-                    del attributes[name]
+                    pass
# what sees no subclass differentiates by a stand-in alone
-as_subclass(plain, StackedWeight)
+as_subclass(plain.detach(), StackedWeight)
fusedacc/nn: tests/nn/test_patches.py
# a module's copy accumulates into the original
-if self._name == "__deepcopy__":
+if False:
fusedacc/kernels: tests/kernels/test_rows.py
# a long row's mean is that of its last run
-total, end - begin, columns
+total, end - begin - _RUN, columns
# a padding row counted from the end takes gradients
-padding_idx % table.shape[0]
+padding_idx
fusedacc/kernels: tests/kernels/test_norm.py
# the norm of a list of two dtypes loses its digits
-wide = any(
+wide = all(
csrc/common/functors.h: tests/kernels/test_host_headers.py
# ties are rounded away from zero
-bits + 0x7fffu + ((bits >> 16) & 1u)
+bits + 0x8000u
csrc/common/norm_functors.h: tests/kernels/test_host_headers.py
# the norm of tiny numbers is nothing
-single ? 0x1p-110 :
+single ? 0.0f :
csrc/cuda/device/accumulate_block.h:
tests/kernels/test_machine_code.py::test_loads_are_issued_before_the_first_is_used[cuda-accumulate-sm_90]
# the GPU waits for each step's loads before it issues the next
-kUnroll = 4;
+kUnroll = 1;
csrc/cuda/device/accumulate_block.h: tests/kernels/test_machine_code.py -k accumulation_moves_16_bytes
# the GPU moves 8 bytes at a time
-kPackedBytes<T, count> < kVectorBytes ? 8 : kVectorBytes;
+8;
csrc/cuda/launch.h: tests/kernels/test_machine_code.py::test_no_kernel_spills[cuda-accumulate-sm_90]
# the GPU's kernels spill registers
-kBlocks = 4;
+kBlocks = 8;
csrc/common/functors.h:
tests/kernels/test_machine_code.py::test_memory_is_the_first_bound[cuda-accumulate-sm_90]
# bfloat16 is rounded by hand on a GPU, with more instructions than memory has time for
-  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
+  const uint32_t bits = bits_as<uint32_t>(value), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
+  return {static_cast<uint16_t>((value != value ? bits | 0x400000u : rounded) >> 16)};
fusedacc/accumulators: tests/optimizer/test_stochastic_sums.py
# every addition has the same random bits
-max(slot.addition + 1, self._floor)
+0
# the sums of a model that was cast are taken for bfloat16
-if self.seed is None or dtype is not torch.bfloat16:
+if self.seed is None:
fusedacc/nn: tests/nn/test_whole_gradients.py
# modules add products to sums that are rounded stochastically
-takes_products = not self._capture.accumulators.noise.rounds(slot.accumulate_dtype)
+takes_products = True
# explain() does not say that sums take whole gradients
-why = WHOLE_GRADIENTS
+why = ""
fusedacc/optimizer: tests/optimizer/test_stochastic_checkpoints.py
# random bits' numbers depend on when users look
-            if outermost:
-                self._noise.finish_numbering()
+            pass
fusedacc/accumulators: tests/accumulators/test_main_grad.py
# a dummy gradient counts
-return is_flagged and not getattr(param, COUNTS_ANYWAY, False)
+return False
# the gradient of a tied weight is dropped with a module's zeros
-is_flagged and not getattr(param, COUNTS_ANYWAY, False)
+is_flagged
# a flag stays set for gradients that no module has added
-        setattr(param, FLAG, False)
+        pass
# a sum that QuACK returns is added to itself
-gradient is None or is_sum(slot, gradient)
+gradient is None
# the gradient of an empty parameter is taken for its sum
-return is_same and total.numel() > 0
+return is_same
# main_grad is not zeroed at the end of a window
-        self.drop_consumed()
-        self.zero_main_grads()
+        self.drop_consumed()
# main_grad is not zeroed by discard()
             if slot.param.grad is not None:
                 slot.param.grad = None
-        self.zero_main_grads()
# a sum that was taken out of p.grad goes on with old gradients
-if slot.grad_state in (PUBLISHED, DTYPE_COPY):
+if False:
# a gradient put into p.grad before the window is lost
-            total.add_(present)
+            pass
# pickles of a parameter have its main_grad
-    ours = (MAIN_GRAD, FLAG, _GET_STATE)
+    ours = (FLAG, _GET_STATE)
# a frozen parameter keeps main_grad
-            hide(slot)
             if slot.accumulator is None
# what modules add inside ignore() counts
-            setattr(slot.param, MAIN_GRAD, unused)
+            pass
# main_grad stays other memory after ignore()
-                    setattr(slot.param, MAIN_GRAD, slot.main_grad)
+                    pass
# a main_grad of other code is replaced
-if getattr(slot.param, MAIN_GRAD, None) is not None:
+if False:
# a loaded sum of other scale is not unscaled
-                accumulator.mul_(scale)
+                pass
fusedacc/autograd: tests/accumulators/test_main_grad.py
# the engine goes on by itself with sums to which modules add
-"modules add to main_grad", accumulators.main_grads is not None)
+"modules add to main_grad", False)
# what a module has added does not taint a failed window
-        backward.added = True
-        slot.added_by_module = True
+        slot.added_by_module = True
# close() leaves main_grad behind
-                leave(slot)
+                pass
fusedacc/optimizer: tests/accumulators/test_main_grad.py
# with main_grad, gradients are divided as they are added
-return 1 if self.adds_unscaled else self._usual_divisor
+return self._usual_divisor
# with main_grad, the mean of a full window is not divided
- and is_full and not self.adds_unscaled:
+ and is_full:
# with main_grad, sums are scaled before the last backward pass
-window.will_update and not window.adds_unscaled:
+window.will_update:
# with main_grad, sums are divided before a micro-batch's last backward pass
-self.window.adds_unscaled and not self.window.is_last_usual_backward
+False
# modules add to sums that were divided
-elif window.counted and window.is_divided:
+elif False:
# modules add to the sums of a failed update
-        if window.full:
-            reason = "the update of the last
+        if False:
+            reason = "the update of the last
# a weight of 0 is accepted where modules add
-if not (self._allows_zero or isinstance(value, Tensor) or value != 0):
+if False:
# "weighted" is accepted where modules add
-    if window.reduction.scales_by_weight:
+    if False:
# after a cast in a window, step() never updates if only modules add
- or grads.has_main_grads:
+:
# after a cast in a window, zero_grad() leaves the former main_grad
-            if self._accumulators.grads.has_main_grads:
+            if False:
fusedacc/autograd: tests/nn/test_sink_main_grad.py
# a gradient of a sink is taken for one that a module has added
-if of_node and slot.main_grad is not None
+if slot.main_grad is not None
fusedacc/nn: tests/nn/test_sink_main_grad.py
# operands of a sink may share memory with the sum
-self.slot.param.grad if self.slot.main_grad is None else self.slot.main_grad
+None
csrc/autograd: tests/accumulators/test_main_grad.py
# the engine takes a dummy gradient for one
-return PyObject_HasAttrString(parameter.ptr(), "grad_added_to_main_grad") != 0;
+return false;
# a module's addition without a gradient goes unseen
-  if (!gradient.defined()) return true;
-  if (gradient.has_storage()
+  if (!gradient.defined()) return false;
+  if (gradient.has_storage()
# the first gradient of autograd replaces what modules have added
-  if (!sums_->begin_main_grad(*slot)) return false;
+
"""
)
