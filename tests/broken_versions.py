"""The deliberately broken versions of the package that `tests/mutants.py` tries, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One broken version.

    Attributes:
        name: what is wrong with it.
        where: a file, or a folder in whose files, from the root. Nothing is built: of csrc only headers that
            tests compile can be broken.
        old, new: the text replaced, which stands there once, and what it becomes.
        tests: paths of which one test at least must fail, apart by blanks.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str


#: Mistakes that were once made here, taken back.
FIXES = (
    Mutant(
        "a bucket holds its views, as if a user did, and gets new memory in every window",
        "fusedacc/distributed",
        "        self.segment = Segment(memory, len(views) + 1)\n",
        "        self.segment = Segment(memory, len(views) + 1)\n        self._kept = views\n",
        "tests/distributed/test_buckets.py",
    ),
    Mutant(
        "an ignored backward adds to what autograd has stored in a manual loop",
        "fusedacc/optimizer",
        "        else:\n            self.collect_stock()\n",
        "",
        "tests/autograd/test_unusual_gradients.py",
    ),
    Mutant(
        "casts of an update beside all sums",
        "fusedacc/accumulators",
        " if is_scaled else []",
        " if False else []",
        "tests/accumulators/test_casts.py",
    ),
    Mutant(
        "a scale is deferred in bfloat16 though it rounds",
        "fusedacc/kernels",
        " and math.frexp(factor)[0] == 0.5",
        "",
        "tests/accumulators/test_deferred_scale.py",
    ),
    Mutant(
        "norms recorded before p.grad was changed are used",
        "fusedacc/optimizer",
        "self._norms.clear()",
        "pass",
        "tests/accumulators/test_partial_norms.py tests/optimizer/test_amp.py",
    ),
    Mutant(
        "an update that failed after scaling is repeated",
        "fusedacc/optimizer",
        "if self.applied:",
        "if False:",
        "tests/optimizer/test_failed_update.py",
    ),
    Mutant(
        "a gradient put by hand in place of what was spent is dropped",
        "fusedacc/accumulators",
        "        if not self.spent:\n            return\n        self.disown_replaced()\n",
        "        if not self.spent:\n            return\n",
        "tests/accumulators/test_p_grad.py tests/optimizer/test_contract.py",
    ),
    Mutant(
        "what an update has consumed counts again in the next window",
        "fusedacc/accumulators",
        "self.spent = not self.visible",
        "self.spent = False",
        "tests/optimizer/test_contract.py",
    ),
    Mutant(
        "what is spent is lost when the parameter moves",
        "fusedacc/accumulators",
        "if gradient is not placed:",
        "if False:",
        "tests/accumulators/test_p_grad.py",
    ),
    Mutant(
        "gradients of enclosing tasks are added after those of inner ones",
        "fusedacc/autograd",
        "if len(self.tasks) == 1:",
        "if True:",
        "tests/accumulators/test_deferred_scale.py tests/autograd",
    ),
    Mutant(
        "no_sync() by hand goes unseen",
        "fusedacc/optimizer",
        "self._reducers.check(task.watch, task.stored)",
        "pass",
        "tests/distributed/test_no_sync.py",
    ),
    Mutant(
        "groups changed by hand go unseen",
        "fusedacc/optimizer",
        "if self.in_step or ",
        "if True or ",
        "tests/optimizer/test_changed_groups.py",
    ),
    Mutant(
        "a parameter's new shape goes unseen",
        "fusedacc/autograd",
        "            if changed:\n",
        "            if False:\n",
        "tests/autograd/test_reshaped_parameters.py",
    ),
    Mutant(
        "a backward that failed is forgotten",
        "fusedacc/optimizer",
        'self.window.taint("an exception has interrupted a backward")',
        "pass",
        "tests/optimizer/test_failed_update.py tests/accumulators/test_deferred_scale.py",
    ),
    Mutant(
        "a copy of the wrapper shares its masters",
        "fusedacc/optimizer",
        '    "_masters",\n',
        "",
        "tests/optimizer/test_lifetime.py tests/optimizer/test_master_weights.py",
    ),
    Mutant(
        "a checkpoint's answers of trials are dropped",
        "fusedacc/optimizer",
        'accumulators.choices.update(choices["ways"])',
        "pass",
        "tests/kernels/test_tuning.py",
    ),
    Mutant(
        "inner state of another shape is loaded",
        "fusedacc/optimizer",
        "checks.check_inner_state(optimizer,",
        "(lambda *_: None)(optimizer,",
        "tests/optimizer/test_checkpoint_damage.py",
    ),
    Mutant(
        "a CUDA graph holds a part of a window",
        "fusedacc/optimizer",
        "inside != self._began_in_graph",
        "False",
        "tests/autograd/test_graph_capture.py",
    ),
    Mutant(
        "hooks keep nodes of the stream outside a CUDA graph",
        "fusedacc/autograd",
        "if torch_state.capturing() != self._made_in_graph:",
        "if False:",
        "tests/autograd/test_graph_capture.py",
    ),
    Mutant(
        "memory that a user still sees as an old p.grad is written",
        "fusedacc/accumulators",
        "return storage_users(self.memory) > self.buffers + 1",
        "return False",
        "tests/optimizer/test_contract.py tests/accumulators",
    ),
    Mutant(
        "two parameters keep one gradient",
        "fusedacc/accumulators",
        "sole and owns_memory(gradient)",
        "sole",
        "tests/autograd/test_native_hooks.py",
    ),
    Mutant(
        "Triton's interpreter truncates bfloat16",
        "fusedacc/kernels",
        "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16",
        "bits >> 16",
        "tests/kernels/test_triton.py tests/kernels/test_functional.py",
    ),
    Mutant(
        "the last step of an expert takes rows of the next",
        "fusedacc/kernels/triton",
        "there = (start + token < end)[:, None]",
        "there = (start + token < tokens)[:, None]",
        "tests/kernels/test_triton_grouped.py",
    ),
    Mutant(
        "a 16-bit product is rounded before it is a 16-bit sum",
        "fusedacc/kernels",
        "product = gradient.to(wide)",
        "product = gradient.to(accumulator.dtype)",
        "tests/kernels/test_functional.py",
    ),
)

#: Mistakes that are likely.
BREAKS = (
    Mutant(
        "a mean over the wrong number",
        "fusedacc/optimizer",
        '(self.steps if self.reduction == "mean" else 1)',
        '(self.steps + 1 if self.reduction == "mean" else 1)',
        "tests/optimizer/test_reductions.py",
    ),
    Mutant(
        "a part-filled window is not divided by what it holds",
        "fusedacc/optimizer",
        "return self.steps / count if count > 0",
        "return 1.0 if count > 0",
        "tests/optimizer/test_reductions.py tests/optimizer/test_contract.py",
    ),
    Mutant(
        "a weight of 0 is added",
        "fusedacc/optimizer",
        "return self.weighs and _is_zero(self.micro.weight)",
        "return False",
        "tests/optimizer/test_reductions.py tests/accumulators/test_deferred_scale.py",
    ),
    Mutant(
        "a late weight of 0 goes unseen",
        "fusedacc/optimizer",
        "if late and not on_device and value == 0:",
        "if False:",
        "tests/optimizer/test_window.py",
    ),
    Mutant(
        "a window whose update has failed goes on",
        "fusedacc/optimizer",
        "self.micro_step >= (self._steps",
        "self.micro_step > (self._steps",
        "tests/optimizer/test_failed_update.py tests/optimizer/test_window.py",
    ),
    Mutant(
        "the deferred scale is applied twice",
        "fusedacc/accumulators/plan_cache.py",
        "            self._deferred.discharge(of)\n",
        "",
        "tests/accumulators/test_deferred_scale.py",
    ),
    Mutant(
        "a prepared list forgets its deferred scale",
        "fusedacc/accumulators",
        "self.run(gradients, scale, False, beta, norm_type)",
        "self.run(gradients, scale, False, 1.0, norm_type)",
        "tests/accumulators/test_deferred_scale.py tests/accumulators/test_plan_cache.py",
    ),
    Mutant(
        "a prepared list is used after its tensors have moved",
        "fusedacc/accumulators",
        "return self._addresses == [",
        "return [] != [",
        "tests/accumulators/test_plan_cache.py",
    ),
    Mutant(
        "a sum takes the memory of a gradient of another layout",
        "fusedacc/accumulators",
        "size == 1 or have == want",
        "True",
        "tests/optimizer/test_contract.py tests/autograd",
    ),
    Mutant(
        "accumulators stay private after the window's last backward",
        "fusedacc/optimizer",
        "if not window.private:",
        "if False:",
        "tests/optimizer/test_contract.py",
    ),
    Mutant(
        "gradients of autograd's are not collected",
        "fusedacc/optimizer",
        "self._add_stored(foreign)",
        "pass",
        "tests/autograd/test_unusual_gradients.py",
    ),
    Mutant(
        "gradients of a frozen parameter are taken",
        "fusedacc/autograd",
        "return not slot.param.requires_grad",
        "return False",
        "tests/autograd/test_eligibility.py",
    ),
    Mutant(
        "post-accumulate hooks see nothing",
        "fusedacc/autograd",
        "return bool(slot.param._post_accumulate_grad_hooks)",
        "return False",
        "tests/autograd/test_eligibility.py",
    ),
    Mutant(
        "a shared gradient becomes the sum",
        "fusedacc/autograd",
        "sole = python_count(gradient) <= python_limit and tensor_count(gradient) <= tensor_limit",
        "sole = True",
        "tests/autograd/test_unusual_gradients.py",
    ),
    Mutant(
        "the norm is left out of clipping",
        "fusedacc/optimizer",
        ".clamp(max=1.0)",
        ".clamp(min=1.0)",
        "tests/optimizer/test_update.py",
    ),
    Mutant(
        "what is not finite is applied",
        "fusedacc/optimizer",
        "if found is not None and not drops and self._is_set(found):",
        "if False:",
        "tests/optimizer/test_update.py",
    ),
    Mutant(
        "the loss scale is not divided out",
        "fusedacc/optimizer",
        "self.multiplier = loss_scale.double().reciprocal()",
        "self.multiplier = None",
        "tests/optimizer/test_amp.py",
    ),
    Mutant(
        "masters lose their low bits",
        "fusedacc/optimizer",
        "_put(slot.param, master)",
        "_put(slot.param, master.to(slot.param.dtype).float())",
        "tests/optimizer/test_master_weights.py",
    ),
    Mutant(
        "sums are left out of a checkpoint",
        "fusedacc/optimizer",
        "partial = include_partial and not window.empty",
        "partial = False",
        "tests/optimizer/test_resume.py",
    ),
    Mutant(
        "a deep copy forgets what is deferred",
        "fusedacc/optimizer",
        "PUBLISHED, accumulators.scale_of(slot)",
        "PUBLISHED, 1.0",
        "tests/optimizer/test_lifetime.py tests/accumulators/test_deferred_scale.py",
    ),
    Mutant(
        "close() leaves the hooks",
        "fusedacc/autograd",
        "handle.remove()",
        "pass",
        "tests/optimizer/test_lifetime.py",
    ),
    Mutant(
        "a module hides a weight's gradient from its hook",
        "fusedacc/autograd",
        "or param._backward_hooks",
        "or False",
        "tests/nn",
    ),
    Mutant(
        "a kept cast outlives a change of its weight",
        "fusedacc/nn",
        "        weight._version,\n",
        "",
        "tests/nn/test_keep_casts.py",
    ),
    Mutant(
        "a kept cast is of what the storage held in another shape",
        "fusedacc/nn",
        "        weight.shape,\n        weight.stride(),\n",
        "",
        "tests/nn/test_keep_casts.py",
    ),
    Mutant(
        "kept casts live on in the inner optimizer's step",
        "fusedacc/optimizer",
        "        self._casts.drop()\n        try:\n",
        "        try:\n",
        "tests/nn/test_keep_casts.py",
    ),
    Mutant(
        "a weight that was written past its version goes on with the former cast",
        "fusedacc/nn",
        "and _is_written(*kept.sampled)",
        "and False",
        "tests/nn/test_keep_casts.py",
    ),
    Mutant(
        "a module's copy accumulates into the original",
        "fusedacc/nn",
        'if self._name == "__deepcopy__":',
        "if False:",
        "tests/nn/test_patches.py",
    ),
    Mutant(
        "a long row's mean is that of its last run",
        "fusedacc/kernels",
        "total, end - begin, columns",
        "total, end - begin - _RUN, columns",
        "tests/kernels/test_rows.py",
    ),
    Mutant(
        "a padding row counted from the end takes gradients",
        "fusedacc/kernels",
        "padding_idx % table.shape[0]",
        "padding_idx",
        "tests/kernels/test_rows.py",
    ),
    Mutant(
        "the norm of a list of two dtypes loses its digits",
        "fusedacc/kernels",
        "wide = any(",
        "wide = all(",
        "tests/kernels/test_norm.py",
    ),
    Mutant(
        "ties are rounded away from zero",
        "csrc/common/functors.h",
        "bits + 0x7fffu + ((bits >> 16) & 1u)",
        "bits + 0x8000u",
        "tests/kernels/test_host_headers.py",
    ),
    Mutant(
        "the norm of tiny numbers is nothing",
        "csrc/common/norm_functors.h",
        "single ? 0x1p-110 :",
        "single ? 0.0f :",
        "tests/kernels/test_host_headers.py",
    ),
    Mutant(
        "a reduction that was given up is begun anew",
        "fusedacc/distributed",
        "if self._under_way and not self._absent:",
        "if False:",
        "tests/distributed/test_faults.py",
    ),
    Mutant(
        "sums are taken over by another number of ranks as they are",
        "fusedacc/optimizer",
        'return own["ranks"] / place.count if own["reduction"] == "mean" else 1.0',
        "return 1.0",
        "tests/distributed/test_saves.py",
    ),
    Mutant(
        "a window's micro-batches count on the ranks that it is loaded on only",
        "fusedacc/optimizer",
        'merged["carried"] = done - merged["micro_step"] - merged["ran"]',
        'merged["carried"] = 0',
        "tests/distributed/test_saves.py",
    ),
)
