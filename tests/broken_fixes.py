"""Mistakes that were once made here, taken back; those of many ranks are in `broken_ranks.py`."""

from mutant import read_mutants

FIXES = read_mutants(
    r"""
# an ignored backward adds to what autograd has stored in a manual loop
fusedacc/accumulators: tests/autograd/test_ignored.py
-self.counts = is_stored or is_published
+self.counts = is_published
# what an ignored backward has left begins the sum of a manual window
fusedacc/optimizer: tests/autograd/test_ignored.py
         window.reduced = False
-        self._grads.clear_ignored()
# what an ignored backward has left is clipped with the window's gradient
fusedacc/accumulators: tests/autograd/test_ignored.py
-if any(slot.param.grad is not None and not slot.is_ignored() for slot in self.slots):
+if False:
# Python begins the last backward of every window that is clipped
fusedacc/optimizer: tests/optimizer/test_middle_of_window.py -k begin
-leaves_norms = window.private and self.accumulators.norms.wanted
+leaves_norms = self.accumulators.norms.wanted
# a clipping factor is rounded once
fusedacc/optimizer: tests/optimizer/test_update.py -k host
-factor = _single(_single(1.0 / _single(size + _single(EPSILON))) * _single(limit))
+factor = _single(limit / (size + EPSILON))
# the sum of a backward in another thread is what ignore() has left
fusedacc/accumulators: tests/autograd/test_ignored.py
-        self._aside.pop(slot, None)
# equal products of a compiled backward are merged
fusedacc/nn/compiled.py: tests/nn/test_compiled_sums.py -k equal
-        _library.define(f"{form}({first}, {arguments}) -> {returns}", tags=_TAGS)
+        _library.define(f"{form}(Tensor ticket, {arguments}) -> {returns}", tags=_TAGS)
+        torch.fx.node.has_side_effect(getattr(getattr(torch.ops, NAMESPACE), form).default)
# a cache on disk has a backward of former code
fusedacc/nn/compiled.py: tests/nn/test_compiled_sums.py -k other_code
-{hashlib.sha256(b''.join(_SOURCES)).hexdigest()[:12]}
+1
# a compiled forward adds another parameter's gradient to the sum of the one before
fusedacc/nn/compiled.py: tests/nn/test_compiled_sums.py -k another
-        and weight is traced.weight
# a node of another graph is one that nothing wants
fusedacc/nn/compiled.py: tests/nn/test_compiled_sums.py -k cast
-            node = _end_of_graph(slot.param)
             if node is None or
# a compiled forward inside ignore() has no gradient by its weights
fusedacc/nn/compiled.py: tests/nn/test_compiled_sums.py -k ignored
-        and len(ignoring) == 0
# a compiled forward casts weights in each micro-batch with keep_casts=True
fusedacc/nn/compiled.py: tests/nn/test_compiled_sums.py -k cast
-_KeptLinear if keeps_cast and
+_KeptLinear if False and
# the cast that a compiled backward needs goes with the update before it
fusedacc/nn/compiled.py: tests/nn/test_compiled_sums.py -k cast
-    held.cast = cast
# a hook on a compiled weight gets no gradient
fusedacc/nn/compiled.py: tests/nn/test_compiled_sums.py -k hooked
-        and len(traced.hooks) == 0
# a hook that comes after a compiled forward is passed over
fusedacc/nn/patched_forward.py: tests/nn/test_compiled_sums.py -k comes_after
-        if param._backward_hooks:  # the engine
+        if False:  # the engine
# a compiled loop over experts makes a gradient of all
fusedacc/nn/stacked.py: tests/nn/test_compiled_sums.py -k experts
-            output = self._select(*args)
+            output = None
# a compiled grouped product takes the transposed matrices for the parameter's
fusedacc/nn/stacked.py: tests/nn/test_compiled_sums.py -k experts
-self._turned.append((output, weight, not inward))
+self._turned.append((output, weight, inward))
# torch's counter raises for operators with effects
fusedacc/kernels/flops.py: tests/nn/test_flops.py -k compiled
-        _see_through_effects(home._FlopCounterMode)
+        pass
# the answer of a trial that had fewer candidates holds
fusedacc/kernels/choices.py: tests/kernels/test_tuning.py
-        return None  # of a release that had fewer candidates
+        pass
# explain() is silent about weights that are left to the compiler
fusedacc/optimizer/explain.py: tests/nn/test_compiled_sums.py -k small
-    elif slot.left_to_compiler and "torch._dynamo" in sys.modules:
+    elif False:
# hooks are traced inside a compiled function
fusedacc/autograd: tests/nn/test_compiled.py
-        @runs_as_written
         def hook
# the end of a backward of compiled autograd is waited for
fusedacc/kernels: tests/accumulators/test_p_grad.py
-return compiled is not None and getattr(compiled, "in_compiled_autograd_region", False)
+return False
# what an update has consumed stays where a traced backward adds to it
fusedacc/autograd: tests/optimizer/test_compiled_training.py
-self.bypassed = self.bypassed or torch_state.traces_backward()
+pass
# a case that autograd takes is added by us
fusedacc/autograd: tests/autograd/test_eligibility.py
-if not task.captures or taker is Taker.AUTOGRAD:
+if not task.captures or case is eligibility.POST_ACCUMULATE_HOOK:
# the micro-batches of former ranks are taken from a checkpoint as they are
fusedacc/optimizer: tests/optimizer/test_checkpoint_damage.py
-    _check_entries(left_out | saved, {"carried": (lambda v: v >= least, f"an int >= {least}")})
# casts of an update beside all sums
fusedacc/accumulators: tests/accumulators/test_casts.py
- if is_scaled else []
+ if False else []
# a scale is deferred in bfloat16 though it rounds
fusedacc/kernels: tests/accumulators/test_deferred_scale.py
- and math.frexp(factor)[0] == 0.5
+
# norms recorded before p.grad was changed are used
fusedacc/optimizer: tests/accumulators/test_partial_norms.py tests/optimizer/test_amp.py
-self._norms.clear()
+pass
# an update that failed after scaling is repeated
fusedacc/optimizer: tests/optimizer/test_failed_update.py
-if self.applied:
+if False:
# a gradient put by hand in place of what was consumed is dropped
fusedacc/accumulators: tests/accumulators/test_p_grad.py tests/optimizer/test_contract.py
         if not self.consumed:
             return
-        self.mark_user_gradients()
# what an update has consumed counts again in the next window
fusedacc/accumulators: tests/optimizer/test_contract.py
-self.consumed = not self.visible
+self.consumed = False
# what is consumed is lost when the parameter moves
fusedacc/accumulators: tests/accumulators/test_p_grad.py
-if gradient is not placed:
+if False:
# gradients of enclosing tasks are added after those of inner ones
fusedacc/autograd: tests/accumulators/test_deferred_scale.py tests/autograd
-if len(self.tasks) == 1:
+if True:
# groups changed by hand go unseen
fusedacc/optimizer: tests/optimizer/test_changed_groups.py
-if self.in_step or capture.tasks:
+if True or capture.tasks:
# a parameter's new shape goes unseen
fusedacc/autograd: tests/autograd/test_reshaped_parameters.py
-            if changed:
+            if False:
# a backward that failed is forgotten
fusedacc/optimizer: tests/optimizer/test_failed_update.py tests/accumulators/test_deferred_scale.py
-self.window.taint("an exception has interrupted a backward")
+pass
# a copy of the wrapper shares its masters
fusedacc/optimizer: tests/optimizer/test_lifetime.py tests/optimizer/test_master_weights.py
-    "_masters",
# a checkpoint's answers of trials are dropped
fusedacc/optimizer: tests/kernels/test_tuning.py
-accumulators.choices.update(choices["ways"])
+pass
# inner state of another shape is loaded
fusedacc/optimizer: tests/optimizer/test_checkpoint_damage.py
-checks.check_inner_state(optimizer,
+(lambda *_: None)(optimizer,
# a CUDA graph holds a part of a window
fusedacc/optimizer: tests/autograd/test_graph_capture.py
-inside != self._began_in_graph
+False
# hooks keep nodes of the stream outside a CUDA graph
fusedacc/autograd: tests/autograd/test_graph_capture.py
-if torch_state.capturing() != self._made_in_graph:
+if False:
# memory that a user still sees as an old p.grad is written
fusedacc/accumulators: tests/optimizer/test_contract.py tests/accumulators
-return storage_users(self.memory) > self.buffers + 1
+return False
# two parameters keep one gradient
fusedacc/accumulators: tests/autograd/test_native_hooks.py
-sole and owns_memory(gradient)
+sole
# Triton's interpreter truncates bfloat16
fusedacc/kernels: tests/kernels/test_triton.py tests/kernels/test_functional.py
-(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
+bits >> 16
# a 16-bit product is rounded before it is a 16-bit sum
fusedacc/kernels: tests/kernels/test_functional.py
-product = gradient.to(wide)
+product = gradient.to(accumulator.dtype)
# the output of a Linear is a view that may not be written in place
fusedacc/nn/linear.py: tests/nn/test_native_functions.py
-torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output
+output
# torch.compile skips the forward of an experts module
fusedacc/nn/patched_forward.py: tests/nn/test_compiled.py
-calls_too=not cls.compiled_by_itself
+calls_too=True
# stand-ins are there while an experts module is compiled
fusedacc/nn/stacked.py: tests/nn/test_compiled.py
-if is_compiling() or frame_compiler() is not None:
+if is_compiling():
# a stand-in is copied as what it is
fusedacc/nn/stacked.py: tests/nn/test_stand_ins.py
-return copy.deepcopy(self.plain, memo)
+return super().__deepcopy__(memo)
# a copy of an experts module that is made in its forward holds stand-ins
fusedacc/nn/stacked.py: tests/nn/test_stand_ins.py
-self._entries = self._entries | shadows
+pass
# FLOPs of a product that is added to a sum in place are not counted
fusedacc/kernels/flops.py: tests/nn/test_flops.py
-    "aten::addmm_": into_sum,
# formulas of FLOPs are not registered when torch's counter is imported later
fusedacc/kernels/flops.py: tests/nn/test_flops.py
-        sys.meta_path.insert(0, _Registering())
+        pass
# FLOPs of a launch outside of the dispatcher are not counted
fusedacc/kernels/triton/backend.py: tests/nn/test_flops.py
-    flops.show_launch(left, right)
# torch's formula for addmm raises for a sum of a wider dtype
fusedacc/kernels/flops.py: tests/nn/test_flops.py
-            del registry[packet]
+            pass
# a parameter of a lazy module is not refused
fusedacc/optimizer/parameters.py: tests/optimizer/test_arguments.py
-if is_lazy(param):
+if False:
# a way is hopeless after one sample
fusedacc/kernels/tuning_trial.py: tests/kernels/test_tuning_trial.py
-MAX_SLOWDOWN, MIN_ROUNDS = 3.0, 3
+MAX_SLOWDOWN, MIN_ROUNDS = 3.0, 1
# one late sample makes a way hopeless
fusedacc/kernels/tuning_trial.py: tests/kernels/test_tuning_trial.py
-min(times[name]) <= longest
+max(times[name]) <= longest
# the default of a question is dropped as hopeless
fusedacc/kernels/tuning_trial.py: tests/kernels/test_tuning_trial.py
-name == default or min(times[name])
+min(times[name])
# a trial that was cut short changes the default
fusedacc/kernels/tuning_trial.py: tests/kernels/test_tuning_trial.py
-        if self.complete:
+        if True:
# rounds of a trial that disagree are an answer
fusedacc/kernels/tuning_trial.py: tests/kernels/test_tuning_trial.py
-if not _is_not_faster(own)]
+if False]
# interrupted rounds of a trial count
fusedacc/kernels/tuning_trial.py: tests/kernels/test_tuning_trial.py
-discarded if interruptions.since_mark() else times
+times
# time that a virtual machine's host took is not noticed
fusedacc/kernels/tuning_trial.py: tests/kernels/test_tuning_trial.py
-if self.stolen > MAX_STOLEN:
+if False:
# waiting for a core is no interruption
fusedacc/kernels/tuning_trial.py: tests/kernels/test_tuning_trial.py
-return preemptions > 0 or waited > WAKE_UP_SECONDS * max(1, runs)
+return False
# an inconclusive trial is never repeated
fusedacc/kernels/choices.py: tests/kernels/test_tuning.py
-return not self.conclusive and not
+return False and not
# an inconclusive trial is repeated without a pause
fusedacc/kernels/choices.py: tests/kernels/test_tuning.py
-< self.tried_at + pause
+< self.tried_at
# an inconclusive answer replaces a conclusive one
fusedacc/kernels/choices.py: tests/kernels/test_tuning.py
- if later and not first.conclusive else
+ if later else
# disturbed answers of earlier releases are final
fusedacc/kernels/choices.py: tests/kernels/test_tuning.py
-else "disturbed the trial" not in reason
+else True
# a large norm asks nothing
fusedacc/kernels/norms.py: tests/kernels/test_norm_prefetch.py
-    loop_settings.tune_prefetch_once(tensors)
# a wrapper's large norm asks nothing
fusedacc/optimizer/update.py: tests/kernels/test_norm_prefetch.py
-        loop_settings.tune_prefetch_once(sums.tensors)
# the sum of sparse gradients takes over the user's tokens and gradient of the output
fusedacc/accumulators: tests/accumulators/test_sparse.py
-part.is_contiguous() and storage_users(part) == 2 else part.clone()
+part.is_contiguous() else part.clone()
# a first sparse gradient is multiplied in a separate pass
fusedacc/accumulators: tests/accumulators/test_sparse.py
-stays = is_one(scale) or (self._may_defer(slot, scale) and not slot.in_bucket)
+stays = is_one(scale)
# a backward that is recorded copies the weight
fusedacc/nn/linear.py: tests/nn/test_native_functions.py
-used = CastFunction.apply(weight, used)
+used = used + (weight - weight.detach())
# a weight's gradient is made where nothing differentiates by the weight
fusedacc/autograd: tests/nn/test_native_functions.py
-if node is not None and not torch._C._will_engine_execute_node(node):
-                return True
+pass
# without a trial a product of few tokens is rounded in parts, which costs two passes
fusedacc/kernels: tests/kernels/test_matmul.py
-default = GemmMethod.RANK_K if number == 0 else GemmMethod.ROUNDED
+default = GemmMethod.ROUNDED
# without a trial own loops do not multiply bfloat16, though the processor has the instructions
fusedacc/kernels/matmul.py: tests/kernels/test_matmul.py
-if has_pairs and accumulator == torch.float32:
+if False:
# a trial's candidates add to one sum, which stays in the cache
fusedacc/kernels/matmul.py: tests/kernels/test_matmul.py
-    multiply = torch.ops
+    sums = itertools.repeat(next(sums))
+    multiply = torch.ops
# a driver that is too old for the library is found out by the first launch
fusedacc/kernels/native.py: tests/kernels/test_selection.py
-        if problem is not None:
+        if False:
             toolkit =
# in mid-window step() passes by a scaler of ours
fusedacc/optimizer/loops.py: tests/optimizer/test_middle_of_window.py
-[(self, "_scaling"), (self, "_is_scaled")]
+[(self, "_scaling")]
# a loss that was scaled once keeps native code from the middle of all windows
fusedacc/optimizer/loops.py: tests/optimizer/test_middle_of_window.py
-            if self._window.num_updates > updates:
-                self.set_scaled(False)
# step() takes scaled losses after a window without any
fusedacc/amp.py: tests/optimizer/test_middle_of_window.py
-            link.set_scaled(True)
+            pass
# Python begins a window's first backward
fusedacc/optimizer/loops.py: tests/optimizer/test_middle_of_window.py
-            self._capture.await_first()
+            pass
# an exception at the end of a window's first backward leaves half of it in the sums
fusedacc/autograd/capture.py: tests/optimizer/test_middle_of_window.py
-            self._policy.forget_backward(self._ordinary, failed=True)
# a product is written over memory that the user still holds
fusedacc/accumulators/in_place.py: tests/optimizer/test_middle_of_window.py
-made = buffers([slots[index] for index in indices], [True] * len(indices))
+made = [slots[index].buffer for index in indices]
# what waits in the buckets of a backward that Python takes over is lost
fusedacc/autograd/native_hooks.py: tests/optimizer/test_middle_of_window.py
-        task.buckets.update(buckets)
# hooks stay on memory that a parameter no longer has
fusedacc/autograd/registration.py: tests/autograd tests/optimizer/test_changed_groups.py
-self._seen is None or not self._seen.hold(self._params):
+self._seen is None:
# a parameter that loses its hook never gets it back
fusedacc/autograd/registration.py: tests/autograd tests/optimizer/test_changed_groups.py
tests/optimizer/test_middle_of_window.py
-        self._seen = None
         self._shards.disarm(slot)
# in mid-window step() passes by torch's scaler
fusedacc/optimizer/wrapper.py: tests/optimizer/test_middle_of_window.py
- and "grad_scale" not in self.__dict__
+
# a deferred scale that native code has paid is paid once more
fusedacc/autograd/native_hooks.py: tests/optimizer/test_middle_of_window.py
-        owner.note_added(added)  # a deferred scale is applied once
+        owner._note_known()
# a deferred scale is applied while native code adds with it
fusedacc/autograd/registration.py: tests/optimizer/test_middle_of_window.py
-            owner.stop_adding()  # a deferred scale may be applied here
+            pass
# native code begins a window's last backward though the sums have another unit at its end
fusedacc/optimizer/accumulation.py: tests/optimizer/test_middle_of_window.py
-not (window.extra_micro_batches or leaves_norms)
+not leaves_norms
# native code begins a window's last backward though it leaves no norms behind
fusedacc/optimizer/accumulation.py: tests/optimizer/test_middle_of_window.py
-not (window.extra_micro_batches or leaves_norms)
+not window.extra_micro_batches
# Triton takes any norm but 2 for inf
fusedacc/kernels: tests/kernels/test_norm.py
-"infinity": norm_kind(norm_type) is INFINITY
+"infinity": norm_type != 2.0
# ranks take the maximum for a norm that they do not know
fusedacc/kernels/constants.py: tests/kernels/test_norm.py
-if isinstance(norm_type, int | float) and norm_type == kind.norm_type:
+if norm_type == kind.norm_type or kind is INFINITY:
# explain() shows a path that it does not know as an empty row
fusedacc/optimizer/explain.py: tests/autograd/test_eligibility.py
-sorted(map(Path, slot.paths), reverse=True)
+sorted(slot.paths, reverse=True) or (Path.GEMM,)
# files import each other
fusedacc/optimizer/parameters.py: tests/packaging/test_layers.py
 from ..kernels import grouped, matmul, selftest, tuning
+from . import wrapper
# the table of dtypes is not that of csrc
fusedacc/kernels/dtypes.py: tests/kernels/test_constants.py
-DTYPES = (torch.float32, torch.bfloat16,
+DTYPES = (torch.bfloat16, torch.float32,
# a choice takes a candidate in spite of its obstacle
fusedacc/kernels/choices.py: tests/kernels/test_selection.py
-            if problem is None:
+            if problem is None or len(passed) == 1:
                 first = f"first
# a module with a forward of its user is patched
fusedacc/nn/patches.py: tests/nn/test_patches.py
-kind is not None and not is_stock(module)
+False
# rows are written behind those of a sum that users may keep
fusedacc/accumulators/add.py: tests/accumulators/test_sparse.py
-None if grads.exposed else slot.num_rows
+slot.num_rows
# a self-test does not look at what is around its tensors
fusedacc/kernels/selftest_checks.py: tests/kernels/test_selftest.py
+        allowed.memories[0].fill_(torch.inf)
         most.copy_(total.abs() * of_sum.eps
# processes that begin at the same time all run the self-test
fusedacc/kernels/tuning_cache.py: tests/kernels/test_selftest.py
-            fcntl.flock(lock, fcntl.LOCK_EX)
+            lock.flush()
# a self-test that was deferred never runs
fusedacc/kernels/selftest.py: tests/kernels/test_selftest.py
-        key = (select, *arguments)
-        deferred[key] = None
# a backend that was used before its self-test failed stays in use
fusedacc/optimizer/parameters.py: tests/kernels/test_selftest.py
-            passes.clear()
# each process runs the self-test again
fusedacc/kernels/selftest.py: tests/kernels/test_selftest.py
-    _write(here, subject, problem)
# no warning where an earlier process has found a backend wrong
fusedacc/kernels/registry.py: tests/kernels/test_selftest.py
-            selftest.warn_once(passed, device,
+            found.reason and (lambda *_: None)(passed, device,
# a head's later slices forget the input's gradient of the slices before
fusedacc/kernels/softmax.py: tests/nn/test_head.py -k loss_and_gradients
-keep = 1.0 if first else 0.0
+keep = 0.0
# a second block of a head's tokens overwrites the sum of the first
fusedacc/kernels/softmax.py: tests/nn/test_head.py -k blocks_of_tokens
-multiply(rows, gradient, input, scale, keep if fresh else 1.0, None)
+multiply(rows, gradient, input, scale, keep, None)
# the gradient of a head's weight is a tensor though a wrapper has the weight
fusedacc/nn/head.py: tests/nn/test_head.py -k temporary_memory
-if wants_weight and (owner is None or not
+if wants_weight and (True or not
# a head of few classes has no room for many tokens, and divides by zero
fusedacc/kernels/softmax.py: tests/nn/test_head.py -k many_tokens
-if of_token and of_token * tokens > most:
+if of_token * tokens > most:
# a compiled head gives its weight a gradient though a wrapper has the weight
fusedacc/nn/cross_entropy.py: tests/nn/test_head.py -k compiled
-traced.ticket if compiled.accumulates(traced, linear_weight) else None
+None
# a plan takes all that is alive for logits
fusedacc/planner/allocations.py: tests/nn/test_head.py -k names_the_logits
- if block.columns in classes)
+)
# p.grad has the parameter's dtype at an update, whatever grad_dtype the user has set
fusedacc/accumulators/param.py: tests/optimizer/test_same_bits.py -k has_the_bits
-return self.param.dtype if wanted is None or wanted == self.lane[1] else wanted
+return self.param.dtype
# a head's sum of e^logit keeps the scale of an earlier slice's largest logit
fusedacc/kernels/softmax.py: tests/nn/test_head.py -k loss_and_gradients
-    found[1] *= (found[0] - base).exp()
# a head's bias of another dtype is cast in silence
fusedacc/nn/cross_entropy.py: tests/nn/test_head.py -k does_not_mix
-or (len(operand_dtypes) > 1 and not autocasts)
+or (input.dtype != dtype and not autocasts)
"""
)
