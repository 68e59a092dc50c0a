"""Updates: the gradients that an optimizer is about to use, and what they may consist of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from .call_sites import call_site
from .guard import guarded
from .kept_gradients import look_at_kept, note_used
from .leaves import grad_state, is_distributed, local_part
from .optimizers import OptimizerRecord, parameters_of
from .records import BackwardPass, Equations, ListedOptimizer, Update
from .repetitions import find_repetitions
from .shards import first_row
from .sketch_sets import SketchSet, mask_of
from .substitutes import Substitutes
from .watch_state import WatchState
from .wording import format_names

CHANGED_INSIDE = (
    "an optimizer changes the gradients inside its step(): the weights are those of the gradients that "
    "step() was given"
)


@dataclass(eq=False)
class OpenUpdate:
    """An update whose `step()` runs.

    Attributes:
        update: what is recorded so far.
        record: its optimizer.
        params: the parameters.
        leaves: numbers of the leaves whose gradients they get.
        sketches: of the gradients that the optimizer uses.
        unclip: by parameter: the factor that undoes what torch's clipping has shrunk alone.
        cleared: numbers of leaves that have nothing of the last update's gradient.
        decay: sketches of the parameters, if other code has changed gradients, maybe by weight decay.
        is_outer: whether the optimizer has called another one, which has made the update.
    """

    update: Update
    record: OptimizerRecord
    params: list[Tensor]
    leaves: list[int]
    sketches: list[Tensor]
    unclip: list[float]
    cleared: set[int] = field(default_factory=set)
    decay: list[Tensor] = field(default_factory=list)
    is_outer: bool = False


@dataclass(eq=False)
class OpenStep:
    """A call of `step()` that runs.

    Attributes:
        optimizer: whose step it is.
        update: what is recorded; None: there is no gradient, or nothing is recorded yet.
        handle: of the hook before `step()` that records the update; None: an optimizer without such hooks.
    """

    optimizer: Any
    update: OpenUpdate | None = None
    handle: RemovableHandle | None = None

    def remove_hook(self) -> None:
        if self.handle is not None:
            self.handle.remove()


class Updates:
    """Records updates.

    Args:
        watch: the state of the watch.
        on_update: called with each update, the optimizer's last update, and passes with inf or nan.
        on_end_of_step: called after each update, outside of the audit's guard, with the optimizer's number.

    Attributes:
        open_steps: the calls of `step()` that run.
        steps_without_gradients: calls of `step()` of optimizers without any gradient.
    """

    def __init__(
        self,
        watch: WatchState,
        on_update: Callable[[Update, Update | None, list[BackwardPass]], None],
        on_end_of_step: Callable[[int], None],
    ) -> None:
        self.watch = watch
        self.open_steps: list[OpenStep] = []
        self.steps_without_gradients = 0
        self._on_update, self._on_end_of_step = on_update, on_end_of_step
        self._substitutes = Substitutes(watch)

    def record_step(self, optimizer: Any) -> OpenUpdate | None:
        params = parameters_of(optimizer)
        return self.record(optimizer, params, used_gradients(optimizer, params))

    @guarded
    def record(
        self, optimizer: Any, params: list[Tensor], gradients: Sequence[Tensor | None]
    ) -> OpenUpdate | None:
        """Sketch the gradients that an optimizer is about to use. None: it makes no update."""
        record = self.watch.optimizers.record_of(optimizer)
        params, gradients = self._visible(params, gradients)
        self._substitutes.find(record, params, gradients)
        leaves = [self.watch.own(record, param) for param in params]
        found_inf = getattr(optimizer, "found_inf", None)  # of a GradScaler, for a fused optimizer
        if found_inf is not None and float(found_inf):
            self.skip_window(optimizer)
            return None
        passes = self.watch.history.window(record.number)
        if self.watch.current is not None:  # an optimizer that steps inside backward
            passes = [*passes, self.watch.current]
        mask = mask_of(leaves)
        passes = [each for each in passes if each.sketches.mask & mask]
        if all(each is None for each in gradients) and not record.is_cleared:
            self.steps_without_gradients += 1
            return None
        update = Update(record.number, passes, call_site())
        # Nothing tells when Keras or fastai loads an optimizer.
        is_first_of_others = record.last_update is None and not isinstance(optimizer, Optimizer)
        update.is_restored = record.is_restored or is_first_of_others
        open_update = OpenUpdate(update, record, params, leaves, [], [])
        self._note_kept(open_update, gradients)
        if _only_makes_state(optimizer, gradients):
            return None
        scale = getattr(optimizer, "grad_scale", None)  # by which a fused optimizer divides
        for param, gradient in zip(params, gradients, strict=True):
            sketch = self._sketch_used(update, param, gradient)
            open_update.sketches.append(sketch if scale is None else sketch / float(scale))
        update.is_touched |= scale is not None
        self._note_clipping(open_update)
        if update.is_touched and not update.is_sharded:
            open_update.decay = [self.watch.sketch(param, param.shape) for param in params]
        for step in self.open_steps:
            if step.optimizer is not optimizer and step.update is not None:
                self._take_given(open_update, step.update)
        return open_update

    def _note_kept(self, open_update: OpenUpdate, gradients: Sequence[Tensor | None]) -> None:
        """Note which gradients of the last update were cleared: only where autograd's own sums are used."""
        record, watched = open_update.record, self.watch.leaves
        look_at_kept(record, watched)
        numbers = zip(open_update.params, gradients, open_update.leaves, strict=True)
        open_update.cleared = {
            number
            for param, gradient, number in numbers
            if number in record.cleared
            and gradient is not None
            and gradient is param.grad
            and not watched.is_changed(param, gradient)
        }
        open_update.update.is_kept = bool(record.kept)

    @staticmethod
    def _take_given(open_update: OpenUpdate, outer: OpenUpdate) -> None:
        """Judge by the gradients that the `step()` around this one was given, if it has changed them itself.

        OrthoGrad projects them, for example. A common factor is left to the verdicts.
        """
        if [*map(id, open_update.params)] != [*map(id, outer.params)] or not outer.params:
            return
        used, given = torch.cat(open_update.sketches), torch.cat(outer.sketches)
        if used.shape != given.shape or not bool(given.isfinite().all() & used.isfinite().all()):
            return
        times = float(used @ given / given.square().sum().clamp(min=1e-300))
        eps = torch.finfo(open_update.update.dtype).eps
        if float((used - times * given).norm()) <= max(1e-3, 4 * eps) * float(used.norm()):
            return
        open_update.sketches, open_update.unclip = outer.sketches, outer.unclip
        open_update.decay = outer.decay
        open_update.update.clipped = outer.update.clipped
        open_update.update.is_touched = outer.update.is_touched
        open_update.update.notes.append(CHANGED_INSIDE)

    def _visible(
        self, params: list[Tensor], gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """Leave out parameters whose gradients modules add to main_grad by themselves."""
        hidden = [getattr(param, "grad_added_to_main_grad", False) for param in params]
        if not any(hidden):
            return params, gradients
        self.watch.history.add_note(
            f"{sum(hidden)} of {len(params)} parameters were not checked: modules add their gradients to "
            "main_grad by themselves, so autograd delivers none (in Megatron-Core: "
            "gradient_accumulation_fusion)"
        )
        return (
            [param for param, is_hidden in zip(params, hidden, strict=True) if not is_hidden],
            [gradient for gradient, is_hidden in zip(gradients, hidden, strict=True) if not is_hidden],
        )

    def _sketch_used(self, update: Update, param: Tensor, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            return self.watch.sketch(torch.zeros(0, device=param.device), param.shape)
        if is_distributed(gradient):
            update.is_sharded = True
            return self.watch.sketch(local_part(gradient), gradient.shape, first_row(gradient))
        update.dtype = gradient.dtype
        update.is_touched |= self.watch.leaves.is_changed(param, gradient)
        unclipped, state = self.watch.unclipped.get(id(param), (None, None))
        if unclipped is not None and state == grad_state(gradient):
            return unclipped
        return self.watch.sketch(gradient, param.shape)

    def _note_clipping(self, open_update: OpenUpdate) -> None:
        """Note the factor of the clipping. Parameters that torch's clipping shrank alone get a note."""
        factors = [self.watch.leaves.clip_factor(param) for param in open_update.params]
        usual = statistics.median_low(factors or [1.0])
        open_update.update.clipped = usual or 1.0  # a clipping to 0 leaves nothing to judge
        open_update.unclip = [usual / factor if factor and usual else 1.0 for factor in factors]

    @guarded
    def skip_window(self, optimizer: Any) -> None:
        """Note that an update does not take place, because gradients have inf or nan."""
        number = self.watch.optimizers.record_of(optimizer).number
        self.watch.leaves.forget_clip_factors(parameters_of(optimizer))
        for each in self.watch.history.window(number):
            each.excused = "nonfinite"
        self.watch.history.window_starts[number] = self.watch.history.num_passes

    def finish(self, optimizer: Any, open_update: OpenUpdate | None) -> None:
        """Keep an update that has taken place."""
        if open_update is None or open_update.is_outer or self.watch.is_closed:
            return
        params = {*map(id, open_update.params)}
        for step in self.open_steps:  # optimizers that call this one
            if step.optimizer is not optimizer:
                number = self.watch.optimizers.record_of(step.optimizer).number
                self.watch.history.window_starts[number] = self.watch.history.num_passes
            outer = step.update
            if outer is not None and outer is not open_update and params & {*map(id, outer.params)}:
                outer.is_outer = True
        self._keep(optimizer, open_update)
        self._on_end_of_step(open_update.record.number)

    @guarded
    def _keep(self, optimizer: Any, open_update: OpenUpdate) -> None:
        history, record, update = self.watch.history, open_update.record, open_update.update
        number = record.number
        update.misses_passes = record.misses_passes
        record.is_cleared = record.misses_passes = False
        self.watch.num_waiting = 0
        if number not in history.optimizers:
            listed = ListedOptimizer(len(history.optimizers), type(optimizer).__name__, record.made)
            history.optimizers[number] = listed
            if dist.is_available() and dist.is_initialized():
                history.rank, history.num_ranks = dist.get_rank(), dist.get_world_size()
        history.update_counts[number] += 1
        update.num_passes = history.num_passes
        record.used_at = history.num_updates
        history.window_starts[number] = history.num_passes + (self.watch.current is not None)
        self.watch.optimizers.name_parameters(record, open_update.params)
        update.number, update.names, update.shapes = (
            history.update_counts[number],
            record.names,
            record.shapes,
        )
        self._note_lone_clipping(open_update)
        # A backward pass forgets only those of leaves: not those of FSDP2's shards and of float32 copies.
        self.watch.leaves.forget_clip_factors(open_update.params)
        for each in update.passes:
            each.scale = float(each.scale)
        originals = find_repetitions(update)
        evaluating = frozenset(each.number for each in update.passes if number in each.evaluating)
        update.evaluating = evaluating if len(evaluating) < len(update.passes) else frozenset()
        versions = [each.versions.get(number) for each in update.passes]
        update.moved = frozenset(
            each.number
            for each, version in zip(update.passes, versions, strict=True)
            if version != versions[-1]
        )
        dtypes = [update.dtype, *(each.dtype for each in update.passes)]
        update.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        infinite = [each for each in update.passes if not each.is_finite]
        update.passes = [
            each
            for each in update.passes
            if each.is_finite
            and originals[each.number] is each
            and not (each.cleared and each.excused == "nonfinite")
        ]
        update.equations = make_equations(open_update)
        record.last_sketches = SketchSet(self.watch.pages)
        for leaf, sketch in zip(open_update.leaves, open_update.sketches, strict=True):
            if leaf not in record.last_sketches:
                record.last_sketches.add(leaf, sketch)
        note_used(record, open_update.params, self.watch.leaves)
        former, record.last_update, record.is_restored = record.last_update, update, False
        self._on_update(update, former, infinite)
        self.watch.optimizers.free_sketches()

    def _note_lone_clipping(self, open_update: OpenUpdate) -> None:
        names = open_update.update.names
        alone = [
            names[i]
            for i, factor in enumerate(open_update.unclip)
            if not math.isclose(factor, 1, rel_tol=0.02)
        ]
        if alone:
            self.watch.history.add_note(
                f"{format_names(alone)}: clip_grad_norm_ shrinks them by another factor than the rest"
            )


def used_gradients(optimizer: Any, params: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradients that an optimizer uses.

    torch's own optimizers use p.grad. Others may use `main_grad`, in which Megatron-Core and Primus add the
    gradients of all micro-batches.
    """
    step = getattr(type(optimizer), "step", None)
    is_of_torch = getattr(step, "__module__", "").startswith("torch.")
    return [param.grad if is_of_torch else _main_grad(param) for param in params]


def _only_makes_state(optimizer: Any, gradients: Sequence[Tensor | None]) -> bool:
    """Return whether a step changes nothing, as `torch.distributed.checkpoint` makes it before it loads."""
    rates = [group.get("lr", 1.0) for group in getattr(optimizer, "param_groups", ())]
    if not rates or any(rates):
        return False
    given = [gradient for gradient in gradients if gradient is not None]
    return bool(given) and not any(map(torch.any, given))


def _main_grad(param: Tensor) -> Tensor | None:
    """Return `main_grad` if there is one and other code has added to it, else p.grad."""
    main_grad = getattr(param, "main_grad", None)
    if isinstance(main_grad, Tensor) and (param.grad is None or bool(main_grad.any())):
        return main_grad
    return param.grad


def make_equations(open_update: OpenUpdate) -> Equations:
    """Put the sketches of an update into columns."""
    sketches, leaves = open_update.sketches, open_update.leaves

    def column(known: SketchSet | None, without: Container[int] = ()) -> Tensor:
        parts = [
            torch.zeros_like(sketch) if known is None or leaf not in known or leaf in without else known[leaf]
            for leaf, sketch in zip(leaves, sketches, strict=True)
        ]
        return torch.cat(parts).cpu()

    used = torch.cat([each * factor for each, factor in zip(sketches, open_update.unclip, strict=True)]).cpu()
    columns = [column(each.sketches) for each in open_update.update.passes]
    passes = torch.stack(columns, 1) if columns else used.new_zeros(len(used), 0)
    owners = torch.repeat_interleave(torch.tensor([len(sketch) for sketch in sketches], device="cpu"))
    decay = torch.cat(open_update.decay).cpu() if open_update.decay else None
    stale = column(open_update.record.last_sketches, open_update.cleared)
    return Equations(passes, used, stale, owners, decay)
