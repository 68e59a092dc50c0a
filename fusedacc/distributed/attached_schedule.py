"""A pipeline schedule with attached optimizers: its stages, and the decisions that its ranks share.

While `schedule.step()` runs, each stage behaves differently in three ways:

- It does not scale gradients that an attached optimizer accumulates. The optimizer divides them as it adds.
- In zero-bubble schedules, the backward of inputs (I) is a whole backward pass. It postpones the weight
  gradient GEMMs until the stage's backward of weights (W).
- FSDP2 does not reduce gradients in a `step()` inside `accumulate(model)` that is not the window's last.

For this, `scale_grads`, `backward_one_chunk`, `perform_reduce_grad` and the public `dw_builder` are replaced
on each stage. The other private names that are used are in `torch_names`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from . import mesh_norm, pipelines
from .agreement import agree
from .ddp import IdleReducer
from .fsdp import is_fsdp
from .torch_names import missing

#: The replaced attributes of a stage.
_REPLACED = ("scale_grads", "backward_one_chunk", "perform_reduce_grad", "dw_builder")


class Capture(Protocol):
    """Receives the gradients of backward passes."""

    #: Weight gradient GEMMs that the backward pass postpones are appended here; None: postpone none.
    undone: list[Any] | None

    def do_products(self, undone: list[Any]) -> None: ...


class Member(Protocol):
    """One attached optimizer."""

    @property
    def parameters(self) -> set[int]: ...

    @property
    def defers(self) -> bool: ...

    def captures(self) -> Sequence[Any]: ...

    def own_norm(self) -> Tensor: ...


class AttachedSchedule:
    """One schedule, on this rank.

    Args:
        schedule: torch's pipeline schedule.
        settings: the settings, by name, that are equal on all of its ranks.
    """

    def __init__(self, schedule: Any, settings: Mapping[str, object]) -> None:
        self._schedule = weakref.ref(schedule)
        self.name = type(schedule).__name__
        self.stages = pipelines.stages_of(schedule)
        self._settings = settings
        self._members: list[weakref.ref[Any]] = []
        #: The ids of the parameters of each member inside `running()`.
        self._running: dict[Member, set[int]] = {}
        #: Postponed weight gradient GEMMs that W will run, with the capture that runs them.
        self._undone: list[tuple[Capture, list[Any]]] = []
        #: The norm for the current update, and the members that have not requested it yet.
        self._norm: Tensor | None = None
        self._asking: weakref.WeakSet[Member] = weakref.WeakSet()
        #: The replaced entries of each stage's `__dict__`, and the entries that replace them.
        self._former: list[dict[str, Any]] = []
        self._ours: list[dict[str, Any]] = []

    @classmethod
    def join(cls, schedule: Any, member: Member, settings: Mapping[str, object]) -> AttachedSchedule:
        """Attach an optimizer. The first one on a rank compares `settings` with the schedule's other ranks.

        Args:
            schedule: torch's pipeline schedule.
            member: the optimizer.
            settings: by name; they must be equal on all ranks.

        Raises:
            TypeError: this version of torch has schedules or stages without an attribute that is needed.
            ValueError: a stage is a DistributedDataParallel that no optimizer was given as `data_parallel=`,
                none of the optimizer's parameters is in a stage, or ranks or optimizers differ in a setting.
        """
        why = missing("pipeline schedule", schedule)
        for stage in () if why else pipelines.stages_of(schedule):
            why = why or missing("pipeline stage", stage)
        if why:
            raise TypeError(
                f"attach({type(schedule).__name__}): {why}; allowed: the counted loop without attach()"
            )
        stages, parameters = pipelines.stages_of(schedule), pipelines.parameters_of(schedule)
        for stage in stages:
            module = stage.submod
            if isinstance(module, DistributedDataParallel) and not isinstance(module.reducer, IdleReducer):
                raise ValueError(
                    f"attach({type(schedule).__name__}): stage {stage.stage_index} is a "
                    "DistributedDataParallel that reduces its gradients itself; allowed: an optimizer for "
                    "each such stage with data_parallel=<the DistributedDataParallel>, bare modules with "
                    "data_parallel=<the process group of the data-parallel ranks>, or FSDP2"
                )
        if parameters and member.parameters and parameters.isdisjoint(member.parameters):
            raise ValueError(
                f"attach({type(schedule).__name__}): none of the optimizer's parameters is in the stages "
                f"{[stage.stage_index for stage in stages]}; allowed: an optimizer of the stages' parameters"
            )
        settings = {**settings, "scale_grads": schedule.scale_grads}
        attached, what = _attached.get(schedule), f"attach({type(schedule).__name__})"
        if attached is None:
            said = {name: (value, repr(value)) for name, value in settings.items()}
            agree(said, stages[0].group, stages[0].device, what)
            attached = _attached[schedule] = cls(schedule, settings)
            attached._replace()
        else:
            for name, value in settings.items():
                if value != attached._settings[name]:
                    raise ValueError(
                        f"{what}: the optimizers of this rank differ in {name}: {value!r} and "
                        f"{attached._settings[name]!r}; allowed: the same for all"
                    )
        attached._members.append(weakref.ref(member))
        return attached

    def leave(self, member: Member) -> None:
        """Detach an optimizer. After the last one, restore the stages."""
        self._members = [each for each in self._members if each() not in (None, member)]
        if self._members:
            return
        for stage, former, ours in zip(self.stages, self._former, self._ours, strict=True):
            for name in _REPLACED:
                if stage.__dict__.get(name) is ours[name]:  # else other code has replaced it since
                    del stage.__dict__[name]
                    if name in former:
                        stage.__dict__[name] = former[name]
        schedule = self._schedule()
        if schedule is not None and _attached.get(schedule) is self:
            del _attached[schedule]

    @property
    def is_alive(self) -> bool:
        return self._schedule() is not None

    def is_of(self, schedule: Any) -> bool:
        """Whether this object belongs to that schedule."""
        return self._schedule() is schedule

    @property
    def parameters(self) -> set[int]:
        """Return the ids of the stages' parameters."""
        return {id(p) for stage in self.stages for p in stage.submod.parameters()}

    @property
    def divisor(self) -> int:
        """Return the number by which to divide the gradients of a `step()`."""
        schedule = self._schedule()
        return schedule._n_microbatches if schedule is not None and schedule.scale_grads else 1

    @property
    def splits(self) -> bool:
        """Whether the schedule splits the backward passes of this rank's stages into I and W."""
        schedule = self._schedule()
        order = getattr(schedule, "pipeline_order", None) or {}
        own = order.get(self.stages[0].group_rank, ())
        return any("W" in str(each) for each in own if each is not None)

    # A step

    @contextlib.contextmanager
    def running(self, member: Member) -> Iterator[None]:
        """Context around a `step()` in which this optimizer accumulates the gradients of its parameters.

        Raises:
            RuntimeError: the schedule has not run all postponed weight gradient GEMMs.
        """
        self._running[member] = member.parameters
        self._asking.clear()
        try:
            yield
            own = member.captures()
            count = sum(len(undone) for capture, undone in self._undone if capture in own)
            if count:
                raise RuntimeError(
                    f"{self.name}.step() has ended, and {count} weight gradients are missing: the schedule "
                    "has a backward of inputs (I) without its backward of weights (W)"
                )
        finally:
            del self._running[member]
            if not self._running:
                for _, undone in self._undone:
                    undone.clear()  # the stages may keep the list
                self._undone.clear()

    def _replace(self) -> None:
        """Replace the attributes of the stages."""
        own = weakref.ref(self)
        for stage in self.stages:
            self._former.append({name: stage.__dict__[name] for name in _REPLACED if name in stage.__dict__})
            reference = weakref.ref(stage)
            self._ours.append(
                {
                    "scale_grads": functools.partial(_scale_grads, own, reference),
                    "backward_one_chunk": functools.partial(_backward_one_chunk, own, reference),
                    "perform_reduce_grad": functools.partial(_perform_reduce_grad, own, reference),
                    "dw_builder": functools.partial(_build_runner, own, stage.dw_builder),
                }
            )
            stage.__dict__.update(self._ours[-1])

    def hidden_while_scaled(self, stage: Any) -> list[Any]:
        """Return the stage's parameters whose gradients the running optimizers divide."""
        taken = set().union(*self._running.values())
        return [p for p in stage.submod.parameters() if id(p) in taken and p.grad is not None]

    @property
    def defers(self) -> bool:
        """Whether FSDP2 postpones its reduction in the current `step()`."""
        return bool(self._running) and all(member.defers for member in self._running)

    def running_captures(self) -> list[Capture]:
        return [capture for member in self._running for capture in member.captures()]

    def take_undone(self) -> list[tuple[Capture, list[Any]]]:
        """Take the weight gradient GEMMs that the last backward pass postponed."""
        found = [
            (capture, capture.undone) for capture in self.running_captures() if capture.undone is not None
        ]
        for capture, _ in found:
            capture.undone = None
        self._undone += found
        return found

    # Decisions that the ranks share

    @property
    def group(self) -> Any:
        """Return the process group of the stages; None means all ranks."""
        return self.stages[0].group

    def norm(self, member: Member, norm_type: float) -> Tensor:
        """Return the norm over the stages of all ranks: float64, 0-dim. Every rank calls it for each update.

        The optimizers of a rank update one after another. The first call measures the accumulators of all of
        them, and the calls by the others return the same norm.
        """
        if member in self._asking:
            self._asking.discard(member)
        else:
            members = [each for each in (reference() for reference in self._members) if each is not None]
            device = self.stages[0].device
            own = torch.stack([each.own_norm().to(device) for each in members])
            self._norm = mesh_norm.over_group(own, norm_type, self.group)
            self._asking.update(each for each in members if each is not member)
        assert self._norm is not None
        return self._norm

    def any_rank(self, flag: Tensor) -> Tensor:
        """Return 1 if this 0-dim flag is 1 on any rank, else 0."""
        found = flag.to(self.stages[0].device, copy=True)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.to(flag.device)

    def check_weights(self, weights: Sequence[float | Tensor]) -> None:
        """Raise ValueError on every rank if the weights differ between ranks. Synchronises with a GPU."""
        own = torch.tensor([float(weight) for weight in weights], dtype=torch.float64)
        digest = torch.stack([own[0], (own * torch.arange(1, len(own) + 1)).sum()])
        extremes = torch.cat([digest, -digest]).to(self.stages[0].device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        most, least = extremes[:2].tolist(), (-extremes[2:]).tolist()
        if most != least:
            raise ValueError(
                f"{self.name}: the ranks were given different weights in this window: {own[0]:g} in all on "
                f"this rank, {least[0]:g} to {most[0]:g} on all of them. discard() this window; allowed: "
                "accumulate(weight=...) with the same weight on every rank of a pipeline"
            )


#: The `AttachedSchedule` of each schedule that has an attached optimizer.
_attached: weakref.WeakKeyDictionary[Any, AttachedSchedule] = weakref.WeakKeyDictionary()


def _scale_grads(attached: Callable[[], Any], stage: Callable[[], Any], grad_scale_factor: int) -> None:
    """Replace a stage's `scale_grads`: run torch's for gradients that no attached optimizer divides."""
    owner, own = attached(), stage()
    hidden = [] if owner is None else [(p, p.grad) for p in owner.hidden_while_scaled(own)]
    for param, _ in hidden:
        param.grad = None
    type(own).scale_grads(own, grad_scale_factor)
    for param, gradient in hidden:
        param.grad = gradient


def _backward_one_chunk(
    attached: Callable[[], Any],
    stage: Callable[[], Any],
    bwd_chunk_id: int,
    loss: Any = None,
    full_backward: bool = True,
    last_backward: bool = False,
) -> None:
    """Replace a stage's `backward_one_chunk`: a backward of inputs (I) postpones weight gradient GEMMs."""
    owner, own = attached(), stage()
    captures = [] if full_backward or owner is None else owner.running_captures()
    for capture in captures:
        capture.undone = []
    try:
        type(own).backward_one_chunk(own, bwd_chunk_id, loss, full_backward, last_backward)
    finally:
        for capture in captures:
            capture.undone = None


def _perform_reduce_grad(
    attached: Callable[[], Any], stage: Callable[[], Any], grad_scale_factor: int
) -> None:
    """Replace a stage's `perform_reduce_grad`: FSDP2 reduces nothing in a `step()` that postpones it."""
    owner, own = attached(), stage()
    module, kind = own.submod, type(own.submod)
    if owner is not None and owner.defers and is_fsdp(module):
        # torch calls set_requires_gradient_sync(True) here, whatever the user has set.
        module.__dict__["set_requires_gradient_sync"] = lambda _: kind.set_requires_gradient_sync(
            module, False
        )
    try:
        type(own).perform_reduce_grad(own, grad_scale_factor)
    finally:
        module.__dict__.pop("set_requires_gradient_sync", None)


def _build_runner(attached: Callable[[], Any], users: Callable[[], Any] | None) -> Callable[..., None]:
    """Replace a stage's `dw_builder`: run the user's function, then the postponed weight gradient GEMMs."""
    runner, owner = None if users is None else users(), attached()
    found = [] if owner is None else owner.take_undone()

    def run() -> None:
        if runner is not None:
            runner()
        for capture, undone in found:
            capture.do_products(undone)

    return run
