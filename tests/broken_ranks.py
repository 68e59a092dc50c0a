"""Mistakes over ranks."""

from mutant import read_mutants

#: Mistakes that were once made here.
RANK_FIXES = read_mutants(
    r"""
# a bucket holds its views, as if a user did, and gets new memory in every window
fusedacc/distributed: tests/distributed/test_buckets.py
         self.segment = Segment(memory, len(views) + 1)
+        self._kept = views
# no_sync() by hand goes unseen
fusedacc/optimizer: tests/distributed/test_no_sync.py
-self._reducers.check(task.watch, task.stored)
+pass
# a rank without micro-batches does not divide by the loss scale
fusedacc/amp.py: tests/distributed/test_scaled_ranks.py
-optimizer.has_partial_window or optimizer._takes_part
+optimizer.has_partial_window
# the loss scale stays as it is in a flush over ranks
fusedacc/optimizer: tests/distributed/test_scaled_ranks.py
-again if scaling.go_on is None else scaling.go_on()
+again
# an ignored backward is counted by another inside it
fusedacc/optimizer: tests/autograd/test_ignored.py
-task = self._begin_ignored() if self.ignoring else
+task = self._begin_ignored() if self.ignoring and outermost else
# a reducer writes over the gradients that ignore() has put aside
fusedacc/accumulators: tests/distributed/test_one_rank.py
-self._copy = None if owns_memory(gradient) else gradient.clone()
+self._copy = None
# what ignore() has left, moved by a reducer, counts
fusedacc/optimizer: tests/distributed/test_one_rank.py
-torch_state.traces_backward() or torch_state.process_group_up():
+torch_state.traces_backward():
# what was unfrozen is not reduced in its first window
fusedacc/optimizer: tests/distributed/test_changed_training.py
-self._slots if reduces else task.stored
+task.stored
# a bucket goes before the first gradient of what was unfrozen
fusedacc/distributed: tests/distributed/test_changed_training.py
-if trained != self._trained:
+if False:
# gradients that have a graph come after the reduction
fusedacc/optimizer: tests/distributed/test_changed_training.py
-outermost and task.captures and self.ranks
+outermost and self.ranks
# two backwards that failed alike are a rule
fusedacc/distributed: tests/distributed/test_changed_training.py
-self._usual, self._counts, self._launch = {}, {}, None
+self._launch = None
# what was unfrozen in a manual loop takes no float32 sum
fusedacc/autograd: tests/distributed/test_changed_training.py
-if not (self._may_be_reduced_outside(slot) and native_module.any_post_hook([node])):
+if slot.in_bucket or not process_group_up():
# a reducer outside the wrapper goes unseen
fusedacc/autograd: tests/distributed/test_reduced_outside.py
-found = found and native_module.any_post_hook([node for node, _ in self.nodes.values()])
+found = False
# FSDP2 gets an unsharded sum before what waits is added to it
fusedacc/optimizer/unsharded.py: tests/distributed/test_fsdp_unsharded.py
-            self._capture.add_pending(slots)
+            pass
# FSDP2 sends unsharded sums in float32 whatever was asked for
fusedacc/distributed/sharded_sum.py: tests/distributed/test_fsdp_unsharded.py
-return sharded.reduce_dtype or sharded._unsharded_param.dtype
+return torch.float32
# unsharded sums are kept after FSDP2 has reduced them
fusedacc/optimizer/unsharded.py: tests/distributed/test_fsdp_unsharded.py
-        self.accumulators.drop(slots)
# torch's names are not looked at
fusedacc/distributed/torch_names.py: tests/distributed/test_torch_names.py
-if not any(hasattr(value, name) for name in names.split(" or ")):
+if False:
# micro-batches are not synchronised although their gradients are left to FSDP2
fusedacc/distributed/fsdp.py: tests/distributed/test_torch_names.py
-        return bool(self._left)
+        return False
# an exception in the backward pass in which FSDP2 synchronises leaves a window that updates
fusedacc/optimizer/accumulation.py: tests/distributed/test_fsdp_unsharded.py
-task.added = task.added or withheld or window.withheld
+task.added = task.added or withheld
# a shard's gradient is taken from the wrong part of the float32 sum
fusedacc/distributed/sharded_sum.py: tests/distributed/test_fsdp_unsharded.py
-part.stride(), part.storage_offset()))
+part.stride(), 0))
# a partial sum over a mesh is taken for a shard of the gradient
fusedacc/nn/linear.py: tests/distributed/test_tensor_parallel.py
-if not _fits(slot.param, rows, inputs) or shard.shape
+if shard.shape
# the sum of a bfloat16 DTensor is bfloat16, which no product adds to
fusedacc/accumulators/in_place.py: tests/distributed/test_tensor_parallel.py
-torch.empty_like(local(slot.param), dtype=slot.accumulate_dtype)
+torch.empty_like(local(slot.param))
# any process group is a reducer
fusedacc/autograd: tests/distributed/test_reduced_outside.py
-found = found and native_module.any_post_hook([node for node, _ in self.nodes.values()])
+pass
# each backward pass of a pipeline schedule is taken for the last
fusedacc/optimizer/pipeline_steps.py: tests/distributed/test_pipelines.py
-if attached is None and not (concerned and pipelines.trains(schedule, self.parameters)):
+if attached is None:
# a pipeline schedule finds no gradients in p.grad to divide
fusedacc/optimizer/accumulation.py: tests/distributed/test_pipelines.py
-captures = schedule or not (differentiable or reduced or left)
+captures = schedule or not (differentiable or reduced)
# a pipeline schedule divides the gradients of the backward pass before it
fusedacc/optimizer/accumulation.py: tests/distributed/test_pipelines.py
-self.collect(self._slots, refresh)  # else the schedule divides it
+pass
# gradients of 16 bits are None after a pipeline schedule's step
fusedacc/optimizer/accumulation.py: tests/distributed/test_pipelines.py
-slot.widen()  # only autograd adds to p.grad until the accumulator is put there
+pass
# a manual loop reduces after each backward pass of a pipeline schedule
fusedacc/optimizer/pipeline_steps.py: tests/distributed/test_pipelines.py
-accumulation.window.counted or accumulation.ranks.parallel is not None
+accumulation.window.counted
# a pipeline schedule that is imported late goes unseen in its first step
fusedacc/optimizer/accumulation.py: tests/distributed/test_pipelines.py
-if window.counted and pipelines.began_unseen(self._slots):
+if False:
# a manual loop takes the no_sync() of a schedule for the user's, and never reduces DDP stages
fusedacc/distributed/ddp.py: tests/distributed/test_pipelines.py
-self.synchronises = not self._deferring
+pass
# an attached schedule divides the sums too
fusedacc/distributed/attached_schedule.py: tests/distributed/test_attached_pipelines.py::TestOnOneRank
-if id(p) in taken and p.grad is not None
+if False
# gradients of an attached schedule are not divided
fusedacc/optimizer/window.py: tests/distributed/test_attached_pipelines.py::TestOnOneRank
-return 1.0 / (self.divided_by * divisor)
+return 1.0 / self.divided_by
# a weight of an attached schedule's step is not divided
fusedacc/optimizer/window.py: tests/distributed/test_pipelines.py::TestOnOneRank
-return self.micro.weight if divisor == 1 else self.micro.weight / divisor
+return self.micro.weight
# what autograd has stored in an attached manual loop is not divided
fusedacc/optimizer/window.py: tests/distributed/test_attached_pipelines.py::TestOnOneRank
-return self.counted or self.reduction.weighs or self.micro.schedule_divisor is not None
+return self.counted or self.reduction.weighs
# FSDP2 reduces in each step of a pipeline schedule whatever it is told
fusedacc/distributed/attached_schedule.py: tests/distributed/test_attached_pipelines.py -k once_in_a_window
-if owner is not None and owner.defers and is_fsdp(module):
+if False:
# optimizers of a pipeline reduce in no order that ranks share
fusedacc/distributed/pipelines.py: tests/distributed/test_random_pipelines.py
-for listener in list(_listeners):
+for listener in list(_listeners)[:: -1 if __import__("torch").distributed.get_rank() > 1 else 1]:
# products are not put off until W
fusedacc/distributed/attached_schedule.py: tests/distributed/test_attached_pipelines.py::TestOnOneRank
-        capture.undone = []
+        pass
# native code does the products that W is to do
fusedacc/autograd/capture.py: tests/distributed/test_attached_pipelines.py::TestOnOneRank
-alone = len(self.tasks) == 1 and self.undone is None
+alone = len(self.tasks) == 1
# products that W has not done are forgotten
fusedacc/distributed/attached_schedule.py: tests/distributed/test_attached_pipelines.py::TestOnOneRank
-            if count:
+            if False:
# a dw_builder of the user's is not called
fusedacc/distributed/attached_schedule.py: tests/distributed/test_attached_pipelines.py::TestOnOneRank
-        if runner is not None:
+        if False:
# each stage is clipped to its own norm
fusedacc/optimizer/update.py: tests/distributed/test_attached_pipelines.py::TestOnOneRank
-        if pipeline is not None:
+        if False:
             norm, nonfinite
# each optimizer of a rank has its own norm
fusedacc/distributed/attached_schedule.py: tests/distributed/test_attached_pipelines.py::TestOnOneRank
-for each in (reference() for reference in self._members) if each is not None
+for each in [member]
# the norm of the last update is taken for that of this one
fusedacc/distributed/attached_schedule.py: tests/distributed/test_attached_pipelines.py::TestOnOneRank
-        self._asking.clear()
+        pass
# ranks of a pipeline may have other weights
fusedacc/distributed/attached_schedule.py:
tests/distributed/test_attached_pipelines.py::test_ranks_that_differ_are_refused_on_every_rank
-if most != least:
+if False:
# a failed step of an attached schedule goes unnoticed
fusedacc/optimizer/accumulation.py: tests/distributed/test_pipelines.py::TestOnOneRank
-            task.added = task.added or self._added_in_schedule
+            pass
# stages keep what an optimizer has put into them
fusedacc/distributed/attached_schedule.py: tests/distributed/test_attached_pipelines.py::TestOnOneRank
-                    del stage.__dict__[name]
+                    pass
# parameters that no wrapper reduces drift apart
fusedacc/distributed/ddp.py: tests/distributed/test_two_optimizers.py
-        if found:
+        if False:
             names
# ranks that clip to different norms go unseen
fusedacc/distributed/agreement.py: tests/distributed/test_agreement.py
-        **{name: (value, repr(value)) for name, value in others.items()},
# tensor-parallel parameters are sent to the ranks of data_parallel=
fusedacc/distributed/data_parallel.py: tests/distributed/test_data_parallel.py
-        if is_distributed(param):
+        if False:
"""
)

#: Mistakes that are likely.
RANK_BREAKS = read_mutants(
    r"""
# a sum is sent in mid-backward of which some experts only are there
fusedacc/autograd/capture.py: tests/distributed/test_experts_on_ranks.py
-            self._complete(task, slots)
         for slot in slots:
# a reduction that was given up is begun again
fusedacc/distributed: tests/distributed/test_faults.py
-if self._under_way and not self._absent:
+if False:
# sums are taken over by another number of ranks as they are
fusedacc/accumulators/reduction.py: tests/distributed/test_saves.py
-return before / now if self.counts else 1.0
+return 1.0
# a window's micro-batches count on the ranks that it is loaded on only
fusedacc/optimizer: tests/distributed/test_saves.py
-merged["carried"] = done - merged["micro_step"] - merged["ran"]
+merged["carried"] = 0
# gradients of an every-backward reduction are added up, not averaged
fusedacc/distributed/reducer.py: tests/distributed/test_data_parallel.py
-bucket.memory.mul_(1.0 / divisor)
+pass
# one rank's buckets are in another order
fusedacc/distributed/reducer.py: tests/distributed/test_data_parallel.py
-for slot in reversed(wanted):
+for slot in wanted if dist.get_rank(self.group) else reversed(wanted):
# flags of absent gradients are not sent
fusedacc/distributed/reducer.py: tests/distributed/test_data_parallel.py
-            flags[index] = 0.0
+            pass
# a gradient that other ranks have is dropped
fusedacc/distributed/reducer.py: tests/distributed/test_data_parallel.py
-return [index for index in absent if flags[index] > 0]
+return []
# ranks that are out of step go unseen
fusedacc/distributed/reducer.py: tests/distributed/test_agreement.py
-if not torch.equal(digits[2], mine.to(torch.float64)) or
+if False and
# a bucket is sent before its last gradient
fusedacc/distributed/reducer.py: tests/distributed/test_data_parallel.py
-self._counts.get(slot, 0) < self._usual.get(slot, 0)
+self._counts.get(slot, 0) + 1 < self._usual.get(slot, 0)
# a backward of one kind is a rule at once
fusedacc/distributed/reducer.py: tests/distributed/test_data_parallel.py
-self.steady = bool(self._counts) and self._counts == self._usual
+self.steady = bool(self._counts)
# buffers are not broadcast
fusedacc/distributed/ddp.py: tests/distributed/test_data_parallel.py
-self.parallel._sync_buffers()
+pass
# no_sync() is ignored
fusedacc/distributed/ddp.py: tests/distributed/test_one_rank.py
-link.synchronises = not link._deferring
+link.synchronises = True
# a rank keeps its own parameters
fusedacc/distributed/agreement.py: tests/distributed/test_agreement.py
-dist.broadcast(slot.param.detach(), source, group=group)
+pass
# other parameters on another rank go unseen
fusedacc/distributed/agreement.py: tests/distributed/test_faults.py
-if other == lists[0]:
+if True:
# fractions of weights are lost on the way
fusedacc/distributed/wire.py: tests/distributed/test_random_ranks.py
-(numbers - whole) * 2.0**FRACTION
+(numbers - whole) * 0.0
# replicas count in the norm as often as there are
fusedacc/distributed/mesh_norm.py: tests/distributed/test_fsdp_norms.py
-if mesh.size(dim) == 1 or not any(sharded):
+if mesh.size(dim) == 1:
# a ring sends everything twice
fusedacc/distributed/wire.py: tests/distributed/test_wire.py
-2 * (ranks - 1) / ranks * parameters
+2 * parameters
# what was delivered before a layer was thawed is the rule after it
fusedacc/distributed/data_parallel.py: tests/distributed/test_changed_training.py
-            self.deliveries.forget()
+            pass
         elif
# the weight of the window's last micro-batch is not counted
fusedacc/optimizer/accumulation.py: tests/distributed/test_random_ranks.py
-weight = weight + added
+weight = weight + 0.0
# sums are opened again whole
fusedacc/optimizer/accumulation.py: tests/distributed/test_data_parallel.py
-1.0 / self.window.ranks
+1.0
# ranks leave flush() with the first
fusedacc/optimizer/accumulation.py: tests/distributed/test_random_ranks.py
-int(totals.num_flushing) == parallel.world_size
+int(totals.num_flushing) > 0
# a rank uses a backend that has failed its self-test on another rank
fusedacc/distributed/data_parallel.py: tests/distributed/test_agreement.py
-        if failed:
+        if failed and False:
"""
)
