"""Mutants whose tests need several ranks."""

from mutant import read_mutants

RANK_BREAKS = read_mutants(
    r"""
fusedacc/distributed: tests/distributed/test_buckets.py
# a bucket holds its views, as if a user did, and gets new memory in every window
         self.segment = Segment(memory, len(views) + 1)
+        self._kept = views
fusedacc/optimizer: tests/distributed/test_no_sync.py
# no_sync() by hand goes unseen
-self._synchronisation.check(backward.stored)
+pass
fusedacc/distributed: tests/distributed/test_fsdp_hybrid.py
# sums of shards that are not all-reduced stay in bfloat16
-group._partial_reduce_output = total.float()
+pass
# a parameter without a gradient in this micro-batch leaves the sums of shards
-positions = sorted({*held, *present})
+positions = present
# sums of shards get no room for a parameter that was not used before
-if total is not None and positions != held:
+if False:
# a group without a gradient in the last micro-batch keeps its sums of shards
-if not (present or group.all_reduce_grads):
+if not present:
# close() leaves a replaced post_backward
-                hybrid.restore_post_backward(group)
+                pass
# defer="all_reduce" accepts a module whose mesh has one dimension
-if not hybrid.is_hybrid(group):
+if False:
fusedacc/optimizer: tests/distributed/test_fsdp_hybrid.py
# defer="all_reduce" all-reduces in every micro-batch
-all_reduces=is_last or micro.defer == "none",
+all_reduces=True,
# defer="all_reduce" keeps whole gradients
-reduces=is_last or micro.defer != "all",
+reduces=is_last or micro.defer == "none",
# defer="none" attaches a DistributedDataParallel
-if defer == "none" and is_reduced_here and not self._registry.closed:
+if False:
# a schedule that is not attached has FSDP2 reduce over all ranks inside defer="all_reduce"
-if trains and accumulation.window.micro.defer == "all_reduce":
+if False:
fusedacc/amp.py: tests/distributed/test_scaled_ranks.py
# a rank without micro-batches does not divide by the loss scale
-optimizer.has_partial_window or optimizer._takes_part
+optimizer.has_partial_window
fusedacc/optimizer: tests/distributed/test_scaled_ranks.py
# the loss scale stays as it is in a flush over ranks
-unused_scaling if scaling.go_on is None else scaling.go_on()
+unused_scaling
fusedacc/optimizer: tests/autograd/test_ignored.py
# an ignored backward is counted by another inside it
-backward = self._begin_ignored() if window.ignoring else
+backward = self._begin_ignored() if window.ignoring and outermost else
fusedacc/accumulators: tests/distributed/test_one_rank.py
# a reducer writes over the gradients that ignore() has put aside
-self._copy = None if owns_memory(gradient) else gradient.clone()
+self._copy = None
fusedacc/optimizer: tests/distributed/test_one_rank.py
# what ignore() has left, moved by a reducer, counts
-torch_state.traces_backward() or torch_state.process_group_up():
+torch_state.traces_backward():
fusedacc/optimizer: tests/distributed/test_changed_training.py
# what was unfrozen is not reduced in its first window
-        for slot in self._slots:
-            gradient = slot.param.grad
-            if gradient is not None and not (slot.sharded or gradient.requires_grad):
-                stored.append(slot)
+        for slot in self._slots if self.ranks.parallel is None else ():
+            gradient = slot.param.grad
+            if gradient is not None and not (slot.sharded or gradient.requires_grad):
+                stored.append(slot)
# gradients that have a graph come after the reduction
-outermost and backward.captures and self.ranks
+outermost and self.ranks
fusedacc/distributed: tests/distributed/test_changed_training.py
# a bucket goes before the first gradient of what was unfrozen
-if trained != self._trained:
+if False:
# two backwards that failed alike are a rule
-        self._usual = {}
-        self._counts = {}
         self.disarm()
fusedacc/autograd: tests/distributed/test_reduced_outside.py
# what was unfrozen in a manual loop takes no float32 sum
-if not slot.is_reduced_outside():
+if slot.in_reduce_bucket or not process_group_up():
fusedacc/accumulators: tests/distributed/test_reduced_outside.py
# a reducer outside the wrapper goes unseen
-return may_be and native_module.has_post_hook(self.param)
+return False
# any process group is a reducer
-return may_be and native_module.has_post_hook(self.param)
+return may_be
fusedacc/distributed: tests/distributed/test_reduced_outside.py
# a counted loop enters the no_sync() of FSDP1
-isinstance(model, FullyShardedDataParallel)
+isinstance(model, FullyShardedDataParallel) and False
fusedacc/autograd: tests/distributed/test_reduced_outside.py
# gradients are collected before the reducer has reduced them
-        if backward.reduced_outside and is_awaited and not backward.follows_reducer:
+        if False:
fusedacc/optimizer: tests/distributed/test_fsdp_hybrid.py
# FSDP2 gets an unsharded sum before what waits is added to it
-            self.capture.add_pending(slots)
+            pass
fusedacc/optimizer: tests/distributed/test_fsdp_unsharded.py
# unsharded sums are kept after FSDP2 has reduced them
-        self.accumulators.drop(slots)
# FSDP2 rounds reduced float32 sums to the dtype of the shards
-        group._orig_dtype = torch.float32
+        pass
# an exception in the backward pass in which FSDP2 synchronises leaves a window that updates
-backward.added = backward.added or withheld or window.withheld
+backward.added = backward.added or withheld
fusedacc/distributed: tests/distributed/test_fsdp_unsharded.py
# FSDP2 sends unsharded sums in float32 whatever was asked for
-return sharded.reduce_dtype or sharded._unsharded_param.dtype
+return torch.float32
fusedacc/kernels: tests/distributed/test_missing_names.py
# torch's names are not looked at
-if not any(hasattr(value, name) for name in names.split(" or ")):
+if False:
fusedacc/distributed: tests/distributed/test_missing_names.py
# micro-batches are not synchronised although their gradients are left to FSDP2
-        return bool(self._left)
+        return False
fusedacc/nn: tests/distributed/test_tensor_parallel.py
# a partial sum over a mesh is taken for a shard of the gradient
-if not _fits(self.slot.param, left, right):
+if False:
fusedacc/accumulators: tests/distributed/test_tensor_parallel.py
# the sum of a bfloat16 DTensor is bfloat16, which no product adds to
-torch.empty_like(local(slot.param), dtype=slot.accumulate_dtype)
+torch.empty_like(local(slot.param))
fusedacc/optimizer: tests/distributed/test_pipelines.py
# each backward pass of a pipeline schedule is taken for the last
-if attached is None and not (adds_later and trains):
+if attached is None:
# a pipeline schedule finds no gradients in p.grad to divide
-captures = schedule or not (differentiable or divides)
+captures = schedule or not differentiable
# gradients of 16 bits are None after a pipeline schedule's step
-slot.widen()  # only autograd adds to p.grad until the accumulator is put there
+pass
# a manual loop reduces after each backward pass of a pipeline schedule
-accumulation.window.counted or accumulation.ranks.parallel is not None
+accumulation.window.counted
fusedacc/distributed: tests/distributed/test_pipelines.py
# a pipeline schedule that is imported late goes unseen
-    when_imported(_MODULE, install)
+    install()
# a manual loop takes the no_sync() of a schedule for the user's, and never reduces DDP stages
-self.link.synchronises = not self.link.deferring
+pass
fusedacc/distributed: tests/distributed/test_attached_pipelines.py::TestOnOneRank
# an attached schedule divides the sums too
-if id(p) in accumulated and p.grad is not None
+if False
# products are not put off until W
-        capture.postponed = []
+        pass
# products that W has not done are forgotten
-            if count:
+            if False:
# a dw_builder of the user's is not called
-        if runner is not None:
+        if False:
# each optimizer of a rank has its own norm
-alive = [other for other in members if other is not None]
+alive = [member]
# the norm of the last update is taken for that of this one
-        self._asking.clear()
+        pass
# stages keep what an optimizer has put into them
-                    del stage.__dict__[name]
+                    pass
fusedacc/optimizer: tests/distributed/test_attached_pipelines.py::TestOnOneRank
# gradients of an attached schedule are not divided
-return 1.0 / (self.divided_by * divisor)
+return 1.0 / self.divided_by
# what autograd has stored in an attached manual loop is not divided
-return self.counted or self.reduction.weighs or self.micro.schedule_divisor is not None
+return self.counted or self.reduction.weighs
# each stage is clipped to its own norm
-        if pipeline is not None:
+        if False:
             norm, nonfinite
fusedacc/optimizer: tests/distributed/test_pipelines.py::TestOnOneRank
# a weight of an attached schedule's step is not divided
-return self.micro.weight if divisor == 1 else self.micro.weight / divisor
+return self.micro.weight
# a failed step of an attached schedule goes unnoticed
-        backward.added = backward.added or self._added_in_schedule
+        pass
fusedacc/distributed: tests/distributed/test_attached_pipelines.py -k once_in_a_window
# FSDP2 reduces in each step of a pipeline schedule whatever it is told
-if defers and is_fsdp(module):
+if False:
fusedacc/distributed: tests/distributed/test_random_pipelines.py
# optimizers of a pipeline reduce in no order that ranks share
-for listener in list(_listeners):
+for listener in list(_listeners)[:: -1 if __import__("torch").distributed.get_rank() > 1 else 1]:
fusedacc/autograd: tests/distributed/test_attached_pipelines.py::TestOnOneRank
# native code does the products that W is to do
-        self.engine.set_postpones(postponed is not None)
+        pass
fusedacc/distributed:
tests/distributed/test_attached_pipelines.py::test_ranks_that_differ_are_refused_on_every_rank
# ranks of a pipeline may have other weights
-if most != least:
+if False:
fusedacc/distributed: tests/distributed/test_two_optimizers.py
# parameters that no wrapper reduces drift apart
-        if unreduced:
+        if False:
             names
fusedacc/distributed: tests/distributed/test_agreement.py
# ranks that clip to different norms go unseen
-        **{name: Setting.of(value) for name, value in others.items()},
# ranks that are out of step go unseen
-if numbers != wanted or 0 < reopened < world_size:
+if False:
# ranks whose number is the mean of all ranks' numbers go unseen
-        if numbers != wanted or
+        if numbers[0] != wanted[0] or
# a rank keeps its own parameters
-dist.broadcast(slot.param.detach(), source, group=group)
+pass
# a rank uses a backend that has failed its self-test on another rank
-        if failed:
+        if failed and False:
# ranks that round otherwise go unseen
-"rounding": Setting(seed is None,
+"rounding": Setting(None,
fusedacc/distributed: tests/distributed/test_data_parallel.py
# tensor-parallel parameters are sent to the ranks of data_parallel=
-        if is_distributed(param):
+        if False:
# gradients of an every-backward reduction are added up, not averaged
-self.memory.mul_(1.0 / divisor)
+pass
# one rank's buckets are in another order
-for slot in reversed(members):
+for slot in members if dist.get_rank(self.group) else reversed(members):
# flags of absent gradients are not sent
-            self.flags[index] = 0.0
+            pass
# a gradient that other ranks have is dropped
-return [index for index in self.absent if flags[index] > 0]
+return []
# a bucket is sent before its last gradient
-self._counts.get(slot, 0) < self._usual.get(slot, 0)
+self._counts.get(slot, 0) + 1 < self._usual.get(slot, 0)
# a backward of one kind is a rule at once
-self.steady = bool(self._counts) and self._counts == self._usual
+self.steady = bool(self._counts)
# buffers are not broadcast
-parallel._sync_buffers()
+pass
fusedacc/autograd: tests/distributed/test_experts_on_ranks.py
# a sum is sent in mid-backward of which some experts only are there
-        self._complete(slots)
fusedacc/distributed: tests/distributed/test_faults.py
# a reduction that was given up is begun again
-if self._under_way and self._num_sent == 0:
+if False:
# other parameters on another rank go unseen
-if other == lists[0]:
+if True:
fusedacc/optimizer: tests/distributed/test_saves.py
# a window is loaded on another number of ranks
-if saved != present:
+if False:
# a rank takes over where another one has no gradient
-        if of_row[_HAS_SUM]
fusedacc/integrations: tests/distributed/test_saves.py
# there is room for the windows of other ranks
-path[-1] == RANK_SUM and stored.size[0] != place.count
+False
fusedacc/distributed: tests/distributed/test_one_rank.py
# no_sync() is ignored
-link.synchronises = not link.deferring
+link.synchronises = True
fusedacc/distributed: tests/distributed/test_random_ranks.py
# fractions of weights are lost on the way
-            of_rank.weight,
+            of_rank.weight // 1,
fusedacc/distributed: tests/distributed/test_fsdp_norms.py
# replicas count in the norm as often as there are
-if mesh.size(dim) == 1 or not any(is_sharded):
+if mesh.size(dim) == 1:
fusedacc/distributed: tests/distributed/test_wire.py
# a ring sends everything twice
-2 * (ranks - 1) / ranks * parameters
+2 * parameters
fusedacc/optimizer: tests/distributed/test_random_ranks.py
# the weight of the window's last micro-batch is not counted
-weight = weight + window.micro.weight
+weight = weight + 0.0
# ranks leave flush() with the first
-int(totals.num_flushing) == parallel.world_size
+int(totals.num_flushing) > 0
fusedacc/optimizer: tests/distributed/test_data_parallel.py
# sums are opened again whole
-1.0 / self.window.ranks
+1.0
fusedacc/accumulators: tests/distributed/test_stochastic_ranks.py
# ranks have the same random bits before a reduction
-self._rank * _RANK_STEP
+0
# ranks have different random bits after a reduction
-        self._since = {}
+        self._since = None
# a checkpoint forgets that sums were reduced
-dict.fromkeys(slots, written) if state["reduced"] else None
+None
fusedacc/autograd: tests/distributed/test_main_grad_ranks.py
# a reducer outside the wrapper misses what modules add
-if torch_state.process_group_up() and not self._policy.window.autograd_stores:
+if False:
fusedacc/accumulators: tests/distributed/test_main_grad_ranks.py
# shards get a main_grad
-            if is_distributed(slot.param):
+            if False:
fusedacc/optimizer: tests/distributed/test_main_grad_ranks.py
# with main_grad, "sum" over ranks is their sum
-            return self.scale_left_out
+            return 1.0
# a pipeline schedule is attached although modules add by themselves
-            if self._main_grad:
+            if False:
fusedacc/distributed: tests/distributed/test_main_grad_ranks.py
# modules add beside the buckets that are reduced
-                move(slot, view)
+                pass
"""
)
