"""Mutants with mistakes that the package once had. `broken_ranks.py` has those that need several ranks."""

from mutant import read_mutants

FIXES = read_mutants(
    r"""
fusedacc/accumulators: tests/autograd/test_ignored.py
# an ignored backward adds to what autograd has stored in a manual loop
-self.counts = is_stored or is_published
+self.counts = is_published
# what an ignored backward has left is clipped with the window's gradient
-if any(slot.param.grad is not None and not slot.is_ignored() for slot in self.slots):
+if False:
fusedacc/optimizer: tests/autograd/test_ignored.py
# what an ignored backward has left begins the sum of a manual window
-        self._grads.clear_ignored()
fusedacc/optimizer: tests/optimizer/test_update.py -k host
# a clipping factor is rounded once
-factor = _single(_single(1.0 / _single(size + _single(EPSILON))) * _single(limit))
+factor = _single(limit / (size + EPSILON))
fusedacc/nn: tests/nn/test_compiled_sums.py -k equal
# equal products of a compiled backward are merged
-        _library.define(f"{form}({first}, {arguments}) -> {returns}", tags=_TAGS)
+        _library.define(f"{form}(Tensor ticket, {arguments}) -> {returns}", tags=_TAGS)
+        torch.fx.node.has_side_effect(getattr(getattr(torch.ops, NAMESPACE), form).default)
fusedacc/nn: tests/nn/test_compiled_sums.py -k other_code
# a cache on disk has a backward of former code
-{hashlib.sha256(b''.join(sources)).hexdigest()[:12]}
+1
fusedacc/nn: tests/nn/test_compiled_sums.py -k another
# a compiled forward adds another parameter's gradient to the sum of the one before
-        and weight is traced.weight
fusedacc/nn: tests/nn/test_compiled_sums.py -k cast
# a node of another graph is one that nothing wants
-            node = end_of_graph(slot.param)
             if node is None or
# a compiled forward casts weights in each micro-batch with keep_casts=True
-traced.ticket, transposed, traced.keeps_cast)
+traced.ticket, transposed, False)
# the cast that a compiled backward needs goes with the update before it
-    held.cast = cast
fusedacc/nn: tests/nn/test_compiled_sums.py -k ignored
# a compiled forward inside ignore() has no gradient by its weights
-        and len(ignoring) == 0
fusedacc/nn: tests/nn/test_compiled_sums.py -k hooked
# a hook on a compiled weight gets no gradient
-        and len(traced.hooks) == 0
fusedacc/nn: tests/nn/test_compiled_sums.py -k comes_after
# a hook that comes after a compiled forward is passed over
-        if param._backward_hooks:  # the engine
+        if False:  # the engine
fusedacc/nn: tests/nn/test_compiled_sums.py -k experts
# a compiled loop over experts makes a gradient of all
-            output = self._select(*args)
+            output = None
# a compiled grouped product takes the transposed matrices for the parameter's
-Transposed(output, weight, not inward)
+Transposed(output, weight, inward)
fusedacc/kernels: tests/nn/test_flops.py -k compiled
# torch's counter raises for operators with effects
-        _see_through_effects(home._FlopCounterMode)
+        pass
fusedacc/optimizer: tests/nn/test_compiled_sums.py -k small
# explain() is silent about weights that are left to the compiler
-    elif slot.left_to_compiler and is_compiler_imported():
+    elif False:
fusedacc/kernels: tests/autograd/test_engine.py
# the end of a backward of compiled autograd is waited for
-return compiled is not None and getattr(compiled, "in_compiled_autograd_region", False)
+return False
fusedacc/autograd: tests/optimizer/test_compiled_training.py
# what an update has consumed stays where a traced backward adds to it
-if torch_state.traces_backward():
-            self.engine.note_bypass()
+pass
fusedacc/autograd: tests/autograd/test_reasons.py tests/distributed/test_reduced_outside.py
# a gradient that a reducer or a hook of the user needs is added by us
-if not backward.captures or reason in LEFT_TO_AUTOGRAD:
+if not backward.captures:
fusedacc/optimizer: tests/optimizer/test_checkpoint_damage.py
# inner state of another shape is loaded
-check_inner_state(optimizer,
+(lambda *_: None)(optimizer,
fusedacc/autograd: tests/accumulators/test_peak_memory.py
# a hook that the user runs after autograd has stored a gradient leaves two copies of it
-            elif backward.captures and self._policy.adds_after_hooks():
+            elif False:
fusedacc/accumulators: tests/optimizer/test_update.py tests/accumulators
# an unscaled sum takes the place of a scaled cast after the update
-grads.place_cast(slot, accumulator if is_one(scale) else None, whole)
+grads.place_cast(slot, accumulator, whole)
fusedacc/kernels: tests/accumulators/test_deferred_scale.py
# a scale is deferred in bfloat16 though it rounds
- and math.frexp(factor)[0] == 0.5
+
fusedacc/optimizer: tests/optimizer/test_failed_update.py
# an update that failed after scaling is repeated
-if self.has_scaled_sums:
+if False:
fusedacc/accumulators: tests/accumulators/test_p_grad.py tests/optimizer/test_contract.py
# a gradient put by hand in place of what was consumed is dropped
         if not self.consumed:
             return
-        self.mark_user_gradients()
fusedacc/accumulators: tests/optimizer/test_contract.py tests/optimizer/test_update.py
# what an update has consumed counts again in the next window
-self.consumed = not self.always_exposed
+self.consumed = False
fusedacc/autograd: tests/autograd/test_new_nodes.py
# gradients that were added to what ignore() has left are lost after a cast
-if self._accumulators.grads.holds_uncounted:
+if self._accumulators.grads.consumed:
fusedacc/optimizer: tests/autograd/test_new_nodes.py
# they are lost after a cast in mid-window and in a manual loop
-if self._registry.reshaped or grads.holds_uncounted or grads.has_main_grads:
+if self._registry.reshaped or grads.has_main_grads:
fusedacc/autograd: tests/autograd/test_reshaped_parameters.py
# a parameter's new shape goes unseen
-if slot.seen is not None and (changed or has_former_node):
+if False:
fusedacc/autograd: tests/autograd/test_new_nodes.py
# a new node goes unseen while memory, dtype and shape stay
-has_former_node = has_node and accumulate_grad_node(param) is not self.nodes[slot]
+has_former_node = False
fusedacc/optimizer: tests/autograd/test_new_nodes.py
# what autograd has stored in mid-window stays in p.grad until step()
-if outermost and backward.captures and self.collects_after(backward):
+if outermost and self.publishes_after(backward):
fusedacc/optimizer: tests/optimizer/test_inner_zero_grad.py
# the inner optimizer's own zero_grad is not called
-return getattr(self.inner.zero_grad, "__func__", None) is Optimizer.zero_grad
+return True
fusedacc/optimizer: tests/optimizer/test_differentiated_gradients.py
# p.grad of a window's only micro-batch loses its graph
-if gradient.requires_grad and self._may_keep_graph(slot, gradient):
+if False:
# an update that differentiates a sum fails with no reason
-            if not self._window.dropped_graph:
+            if True:
fusedacc/kernels: tests/optimizer/test_inference_mode.py
# tensors of inference mode are kept
-    with torch.inference_mode(False), torch.no_grad():
+    with torch.no_grad():
fusedacc/optimizer: tests/optimizer/test_failed_update.py tests/accumulators/test_deferred_scale.py
# a backward that failed is forgotten
-        elif backward.added or any(slot.param.grad is not None for slot in backward.stored):
-            self.note_interruption()
fusedacc/optimizer: tests/optimizer/test_lifetime.py tests/optimizer/test_master_weights.py
# a copy of the wrapper shares its masters
-"_accumulate_dtype", "_main_grad", *of_subclass}
+"_accumulate_dtype", "_main_grad", "_masters", *of_subclass}
fusedacc/optimizer: tests/autograd/test_graph_capture.py
# a CUDA graph holds a part of a window
-in_graph != self._began_in_graph
+False
fusedacc/autograd: tests/autograd/test_graph_capture.py
# hooks keep nodes of the stream outside a CUDA graph
-if torch_state.capturing() != self._made_in_graph:
+if False:
fusedacc/accumulators: tests/optimizer/test_contract.py tests/accumulators
# memory that a user still sees as an old p.grad is written
-return storage_users(self.memory) > self.buffers + 1
+return False
fusedacc/kernels: tests/kernels/test_triton.py tests/kernels/test_functional.py
# Triton's interpreter truncates bfloat16
-(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
+bits >> 16
fusedacc/kernels: tests/kernels/test_functional.py
# a 16-bit product is rounded before it is a 16-bit sum
-product = gradient.to(wide)
+product = gradient.to(accumulator.dtype)
fusedacc/nn/linear.py: tests/nn/test_attributes_as_the_module_reads_them.py -k linear
# a bias that is no parameter is left out
-bias = patched.read(module, "bias")
+bias = module._parameters.get("bias")
fusedacc/nn/linear.py: tests/nn/test_attributes_as_the_module_reads_them.py -k spectral_norm
# a weight that is computed is read twice
-return patched.plain(module, input, weight, bias) if
+return type(module).forward(module, input) if
fusedacc/nn/stacked.py: tests/nn/test_attributes_as_the_module_reads_them.py -k experts
# a stand-in hides what a module's own __getattr__ gives
-reads_parameter(module, name, target.slot.param)
+module._parameters.get(name) is target.slot.param
fusedacc/nn: tests/nn/test_compiled.py
# torch.compile skips the forward of an experts module
-calls_too=not cls.compiled_by_itself
+calls_too=True
# stand-ins are there while an experts module is compiled
-if is_compiling() or frame_compiler() is not None:
+if is_compiling():
fusedacc/nn: tests/nn/test_stand_ins.py
# a stand-in is copied as what it is
-return copy.deepcopy(self.plain, memo)
+return super().__deepcopy__(memo)
# a copy of an experts module that is made in its forward holds stand-ins
-self._entries = self._entries | stand_ins
+pass
fusedacc/kernels: tests/nn/test_flops.py
# FLOPs of a product that is added to a sum in place are not counted
-    "aten::addmm_": into_sum,
# formulas of FLOPs are not registered when torch's counter is imported later
-        sys.meta_path.insert(0, waiting)
+        pass
# torch's formula for addmm raises for a sum of a wider dtype
-            del registry[packet]
+            pass
fusedacc/kernels/triton/backend.py: tests/nn/test_flops.py
# FLOPs of a launch outside of the dispatcher are not counted
-    flops.show_launch(left, right)
fusedacc/optimizer: tests/optimizer/test_arguments.py
# a parameter of a lazy module is not refused
-if is_lazy(param):
+if False:
fusedacc/accumulators: tests/accumulators/test_sparse.py
# the sum of sparse gradients takes over the user's tokens and gradient of the output
-is_unshared and part.is_contiguous() and storage_users(part) == 2
+is_unshared and part.is_contiguous()
# a first sparse gradient is multiplied in a separate pass
-not is_one(scale) and self._may_defer(slot, scale) and not slot.in_reduce_bucket
+False
# rows are written behind those of a sum that users may keep
-None if grads.exposed else slot.num_rows
+slot.num_rows
fusedacc/autograd: tests/nn/test_head.py
# a weight's gradient is made where nothing differentiates by the weight
-if node is not None and not will_run(node):
-                return True
+pass
fusedacc/kernels: tests/kernels/test_cpu_rules.py
# the rule of a processor holds although oneDNN is limited
-return min(of_processor, _ONEDNN_LIMITS
+return max(of_processor, _ONEDNN_LIMITS
# MKL's product is chosen although torch has no MKL
-    if has_mkl:
+    if True:
# all numbers of tokens have the method of the fewest
-return self.methods[class_of(tokens)]
+return self.methods[0]
fusedacc/kernels: tests/kernels/test_selection.py
# a driver that is too old for the library is found out by the first launch
-        if problem is not None:
+        if False:
             toolkit =
# a choice takes a candidate in spite of its obstacle
-        if problem is None:
+        if problem is None or len(passed) == 1:
             first = f"first
fusedacc/optimizer: tests/optimizer/test_middle_of_window.py
# the engine runs step() after a loss was scaled
-        self._loop.leave_to_python("a loss is scaled", is_scaled)
+        pass
# a loss that was scaled once keeps native code from the middle of all windows
-            if self._window.num_updates > updates:
-                self.set_scaled(False)
# in mid-window step() passes by torch's scaler
- and "grad_scale" not in self.__dict__
+
fusedacc/amp.py: tests/optimizer/test_middle_of_window.py
# step() takes scaled losses after a window without any
-            link.set_scaled(True)
+            pass
fusedacc/kernels: tests/kernels/test_norm.py
# Triton takes any norm but 2 for inf
-"infinity": norm_kind(norm_type) is INFINITY
+"infinity": norm_type != 2.0
# ranks take the maximum for a norm that they do not know
-if isinstance(norm_type, int | float) and norm_type == kind.norm_type:
+if norm_type == kind.norm_type or kind is INFINITY:
fusedacc/optimizer: tests/autograd/test_reasons.py
# explain() shows a path that it does not know as an empty row
-sorted(map(Path, slot.paths), reverse=True)
+sorted(slot.paths, reverse=True) or (Path.GEMM,)
fusedacc/optimizer: tests/packaging/test_layers.py
# files import each other
 from ..kernels import grouped, lists, matmul, selftest
+from . import wrapper
fusedacc/kernels: tests/kernels/test_constants.py
# the table of dtypes is not that of csrc
-DTYPES = (torch.float32, torch.bfloat16,
+DTYPES = (torch.bfloat16, torch.float32,
fusedacc/nn: tests/nn/test_patches.py
# a module with a forward of its user is patched
-if not is_stock(module):
+if False:
fusedacc/kernels: tests/kernels/test_selftest.py
# a self-test does not look at what is around its tensors
+        allowed.memories[0].fill_(torch.inf)
         most.copy_(total.abs() * of_sum.eps
# processes that begin at the same time all run the self-test
-            fcntl.flock(lock, fcntl.LOCK_EX)
+            lock.flush()
# a self-test that was deferred never runs
-        key = (select, *arguments)
-        deferred[key] = None
# each process runs the self-test again
-        cache_folder.write(FILE, results)
+        pass
# no warning where an earlier process has found a backend wrong
-            selftest.warn_once(passed, device,
+            selection.reason and (lambda *_: None)(passed, device,
fusedacc/optimizer: tests/kernels/test_selftest.py
# a backend that was used before its self-test failed stays in use
-            capture.registry.choose_again()
fusedacc/kernels: tests/nn/test_head.py -k loss_and_gradients
# a head's later slices forget the input's gradient of the slices before
-part.weight, 1.0, 1.0 if first else 0.0)
+part.weight, 1.0, 0.0)
# a head's sum of e^logit keeps the scale of an earlier slice's largest logit
-    statistics[1] *= (statistics[0] - base).exp()
fusedacc/kernels: tests/nn/test_head.py -k blocks_of_tokens
# a second block of a head's tokens overwrites the sum of the first
-1.0 if start else beta
+beta
fusedacc/kernels: tests/nn/test_head.py -k unusual_class_weights
# a head's smoothed loss is infinite where PyTorch's is nan, because no target has a weight
-            terms = [term.sum() / factors.divisor for term in terms]
+            terms = [sum(terms[1:], terms[0]).sum() / factors.divisor]
# an infinite class weight without a target makes a head's gradients nan
-        if not spread:
+        if False:
fusedacc/nn: tests/nn/test_head.py -k temporary_memory
# the gradient of a head's weight is a tensor though a wrapper has the weight
-weight_like = None if was_added else owner.slot.param
+weight_like = owner.slot.param
fusedacc/nn: tests/nn/test_head.py -k compiled
# a compiled head gives its weight a gradient though a wrapper has the weight
-traced.ticket if compiled.accumulates(traced, linear_weight) else None
+None
fusedacc/planner: tests/nn/test_head.py -k names_the_logits
# a plan takes all that is alive for logits
- if block.columns in classes)
+)
fusedacc/accumulators: tests/optimizer/test_same_bits.py -k has_the_bits
# p.grad has the parameter's dtype at an update, whatever grad_dtype the user has set
-return self.param.dtype if wanted is None or wanted == self.lane[1] else wanted
+return self.param.dtype
fusedacc/nn: tests/nn/test_head.py -k does_not_mix
# a head's bias of another dtype is cast in silence
-or (len(operand_dtypes) > 1 and not autocasts)
+or (input.dtype != dtype and not autocasts)
fusedacc/kernels: tests/optimizer/test_lifetime.py -k follow
# after close(), gradients keep the dtype that the model had then
-        module.restore_grad_dtype(leaf, dtype)
+        leaf.grad_dtype = dtype
"""
)
