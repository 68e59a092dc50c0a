"""Pipeline schedules (`torch.distributed.pipelining`): notify optimizers when a `step()` begins and ends.

One `schedule.step()` runs many backward passes and divides `p.grad` by the number of its micro-batches
(`scale_grads=True`). Zero-bubble schedules also write `p.grad` outside any backward pass. So the whole
`step()` is one micro-batch, and a single backward pass is not.

torch has no hook for this, and a parameter has no reference to its schedule, which is often made after the
optimizer. A module hook runs too late to raise an error: `step()` communicates before it runs the first
module. So this file replaces `step` on the two public base classes of all schedules while an optimizer
listens. `torch_private` lists the private names that it uses.

With attached optimizers, which divide gradients as they add them, methods of the stages are replaced too
(`AttachedSchedule`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..accumulators import Slot
from ..kernels import torch_state
from ..kernels.import_hooks import when_imported
from ..kernels.torch_private import ATTRIBUTES, missing
from . import mesh_norm
from .agreement import Setting, agree, extremes
from .data_parallel import IdleReducer
from .fsdp import is_fsdp

_MODULE = "torch.distributed.pipelining.schedules"

#: Objects with `around_step(schedule)`: a context around one `schedule.step()`. Each may reduce, and all
#: ranks must reduce in the same order, so the listeners are kept in the order of their `listen()` calls.
_listeners: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
#: By class: torch's `step`, and the function that replaces it.
_replaced: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}
#: Which of these classes this version of torch lacks, in words.
_lacking = ""


def listen(listener: Any) -> None:
    """Notify this listener of every `schedule.step()` from now on."""
    _listeners[listener] = None
    when_imported(_MODULE, install)


def leave(listener: Any) -> None:
    """Stop notifying this listener. After the last one, restore torch's classes."""
    _listeners.pop(listener, None)
    if _listeners:
        return
    for kind, (former, ours) in list(_replaced.items()):
        if kind.step is ours:  # else other code has replaced it again, and may still call this one
            kind.step = former
            del _replaced[kind]


def install() -> None:
    """Replace `step` if torch's schedules are imported and an optimizer listens."""
    global _lacking
    module = sys.modules.get(_MODULE)
    if _replaced or module is None or not _listeners:
        return
    former = _lacking
    _lacking = missing(_MODULE, module)
    if _lacking:
        if _lacking != former:
            warnings.warn(
                f"{_lacking}: fusedacc cannot see when schedule.step() begins, and sums of counted loops "
                "inside a schedule are wrong",
                stacklevel=2,
            )
        return
    for kind in _kinds(module):
        _replaced[kind] = kind.step, _announcing(kind.step)
        kind.step = _replaced[kind][1]


def unseen_module() -> str | None:
    """Return None: every `step()` is seen, because `install` runs when the schedules are imported."""
    return None


def began_unseen(slots: Iterable[Slot]) -> bool:
    """Return False: every `step()` is seen, because `install` runs when the schedules are imported."""
    return False


def _kinds(module: Any) -> list[Any]:
    """Return the base classes of all schedules that the module has; none if it is None."""
    return [getattr(module, name) for name in ATTRIBUTES[_MODULE] if hasattr(module, name)]


def _announcing(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def announced(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as contexts:
            if _listeners and getattr(schedule, "_has_backward", True):
                for listener in list(_listeners):
                    contexts.enter_context(listener.around_step(schedule))
                if why_left(schedule):
                    contexts.enter_context(_without_python_functions())
            return step(schedule, *args, **kwargs)

    return announced


@contextlib.contextmanager
def _without_python_functions() -> Iterator[None]:
    former = torch_state.no_python_functions
    torch_state.no_python_functions = True
    try:
        yield
    finally:
        torch_state.no_python_functions = former


def splits(schedule: Any) -> bool:
    """Whether the schedule splits the backward passes of this rank's stages into I and W."""
    order = getattr(schedule, "pipeline_order", None) or {}
    actions = order.get(getattr(stages_of(schedule)[0], "group_rank", None), ())
    return any("W" in str(action) for action in actions if action is not None)


def why_left(schedule: Any) -> str:
    """Return why `model=` must leave the stages' modules to PyTorch in this schedule; empty if it need not.

    W of torch 2.10 asks each node of the graph for metadata that a function written in Python does not have.
    A stage with a `dw_builder`, which `attach` sets, does not run this W.
    """
    if missing("pipeline schedule", schedule) or _nodes_have_metadata() or not splits(schedule):
        return ""
    if all(getattr(stage, "dw_builder", None) is not None for stage in stages_of(schedule)):
        return ""
    return (
        f"model= leaves gradients to autograd in a {type(schedule).__name__}: torch {torch.__version__} "
        "cannot split the backward pass of fusedacc's functions; attach(schedule) avoids this"
    )


@functools.cache
def _nodes_have_metadata() -> bool:
    """Whether graph nodes of functions written in Python have the metadata that autograd.grad reads."""

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    with torch.enable_grad():
        node: Any = Probe.apply(torch.ones(1, requires_grad=True)).grad_fn
    try:
        return len(node._input_metadata) == 1
    except (AttributeError, RuntimeError):
        return False


def is_schedule(value: Any) -> bool:
    """Whether the value is one of torch's pipeline schedules."""
    return isinstance(value, tuple(_kinds(sys.modules.get(_MODULE))))


def stages_of(schedule: Any) -> list[Any]:
    """Return the schedule's stages on this rank."""
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def trains(schedule: Any, parameters: set[int]) -> bool:
    """Whether the schedule may train parameters with these ids; True if this torch does not say which."""
    unknown = missing("pipeline schedule", schedule)
    return bool(unknown) or not parameters.isdisjoint(parameters_of(stages_of(schedule)))


def parameters_of(stages: Iterable[Any]) -> set[int]:
    """Return the ids of the stages' parameters."""
    return {id(p) for stage in stages for p in stage.submod.parameters()}


class AttachedSchedule:
    """A pipeline schedule with attached optimizers, on this rank.

    Its members are the optimizers' `PipelineSteps`. settings: by name; they are equal on all ranks.
    """

    def __init__(self, schedule: Any, settings: Mapping[str, object]) -> None:
        #: A weak reference to torch's schedule.
        self.schedule = weakref.ref(schedule)
        self.name = type(schedule).__name__
        self.stages = stages_of(schedule)
        #: The process group of the stages (None: all ranks), and this rank's device.
        self._group = self.stages[0].group
        self._device = self.stages[0].device
        self._settings = settings
        self._members: list[weakref.ref[Any]] = []
        #: The ids of the parameters of each member inside `running()`.
        self._running: dict[Any, set[int]] = {}
        #: Postponed weight gradient GEMMs that W will run, with the `Capture` that runs them.
        self._postponed: list[tuple[Any, list[Any]]] = []
        #: The norm for the current update, and the members that have not requested it yet.
        self._norm: Tensor | None = None
        self._asking: weakref.WeakSet[Any] = weakref.WeakSet()
        #: For each stage, the entries of its `__dict__` that are replaced, and those that replace them.
        self._replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @classmethod
    def join(cls, schedule: Any, member: Any, settings: Mapping[str, object]) -> AttachedSchedule:
        """Attach an optimizer. The first one on a rank compares `settings` with the schedule's other ranks.

        Raises as `AccumulatingOptimizer.attach`.
        """
        what = f"attach({type(schedule).__name__})"
        why = missing("pipeline schedule", schedule)
        stages = [] if why else stages_of(schedule)
        for stage in stages:
            why = why or missing("pipeline stage", stage)
        if why:
            raise TypeError(f"{what}: {why}; allowed: the counted loop without attach()")
        for stage in stages:
            module = stage.submod
            if isinstance(module, DistributedDataParallel) and not isinstance(module.reducer, IdleReducer):
                raise ValueError(
                    f"{what}: stage {stage.stage_index} is a DistributedDataParallel that reduces its "
                    "gradients itself; allowed: an optimizer for each such stage with "
                    "data_parallel=<the DistributedDataParallel>, bare modules with data_parallel=<the "
                    "process group of the data-parallel ranks>, or FSDP2"
                )
        parameters = parameters_of(stages)
        if parameters and member.parameters and parameters.isdisjoint(member.parameters):
            raise ValueError(
                f"{what}: none of the optimizer's parameters is in the stages "
                f"{[stage.stage_index for stage in stages]}; allowed: an optimizer of the stages' parameters"
            )
        settings = {**settings, "scale_grads": schedule.scale_grads}
        attached = _attached.get(schedule)
        if attached is None:
            of_rank = {name: Setting.of(value) for name, value in settings.items()}
            agree(of_rank, stages[0].group, stages[0].device, what)
            attached = cls(schedule, settings)
            _attached[schedule] = attached
            attached._replace_methods()
        for name, value in settings.items():
            if value != attached._settings[name]:
                raise ValueError(
                    f"{what}: the optimizers of this rank differ in {name}: {value!r} and "
                    f"{attached._settings[name]!r}; allowed: the same for all"
                )
        attached._members.append(weakref.ref(member))
        return attached

    def leave(self, member: Any) -> None:
        """Detach an optimizer. After the last one, restore the stages."""
        self._members = [reference for reference in self._members if reference() not in (None, member)]
        if self._members:
            return
        for stage, (former, ours) in zip(self.stages, self._replaced, strict=True):
            for name, entry in ours.items():
                if stage.__dict__.get(name) is entry:  # else other code has replaced it since
                    del stage.__dict__[name]
                    if name in former:
                        stage.__dict__[name] = former[name]
        schedule = self.schedule()
        if schedule is not None and _attached.get(schedule) is self:
            del _attached[schedule]

    @property
    def parameters(self) -> set[int]:
        """Return the ids of the stages' parameters."""
        return parameters_of(self.stages)

    @property
    def divisor(self) -> int:
        """Return the number by which to divide the gradients of a `step()`."""
        schedule = self.schedule()
        return schedule._n_microbatches if schedule is not None and schedule.scale_grads else 1

    @property
    def splits(self) -> bool:
        """Whether the schedule splits the backward passes of this rank's stages into I and W."""
        schedule = self.schedule()
        return schedule is not None and splits(schedule)

    # A step

    @contextlib.contextmanager
    def running(self, member: Any) -> Iterator[None]:
        """Context around a `step()` in which this optimizer accumulates the gradients of its parameters."""
        self._running[member] = member.parameters
        self._asking.clear()
        try:
            yield
            captures = member.captures()
            count = sum(len(products) for capture, products in self._postponed if capture in captures)
            if count:
                raise RuntimeError(
                    f"{self.name}.step() has ended, and {count} weight gradients are missing: the schedule "
                    "has a backward of inputs (I) without its backward of weights (W)"
                )
        finally:
            del self._running[member]
            if not self._running:
                for _, products in self._postponed:
                    products.clear()  # the stages may keep the list
                self._postponed.clear()

    def _replace_methods(self) -> None:
        """Replace the methods of the stages."""
        for stage in self.stages:
            # Since torch 2.15 `perform_reduce_grad` calls it, and some schedules call it directly.
            starts = hasattr(stage, "start_gradient_reduction")
            reduces = "start_gradient_reduction" if starts else "perform_reduce_grad"
            ours = {
                "scale_grads": functools.partial(self._scale_grads, stage),
                "backward_one_chunk": functools.partial(self._backward_one_chunk, stage),
                reduces: functools.partial(self._reduce_grads, stage, reduces),
                "dw_builder": functools.partial(self._build_runner, stage.dw_builder),
            }
            former = {name: stage.__dict__[name] for name in ours if name in stage.__dict__}
            self._replaced.append((former, ours))
            stage.__dict__.update(ours)

    def _scale_grads(self, stage: Any, grad_scale_factor: int) -> None:
        """Replace a stage's `scale_grads`: run torch's for gradients that no attached optimizer divides."""
        accumulated = set().union(*self._running.values())
        hidden = [p for p in stage.submod.parameters() if id(p) in accumulated and p.grad is not None]
        gradients = [p.grad for p in hidden]
        for param in hidden:
            param.grad = None
        type(stage).scale_grads(stage, grad_scale_factor)
        for param, gradient in zip(hidden, gradients, strict=True):
            param.grad = gradient

    def _backward_one_chunk(
        self,
        stage: Any,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Replace a stage's `backward_one_chunk`: a backward of inputs (I), which is a whole backward pass in
        zero-bubble schedules, postpones the weight gradient GEMMs until the backward of weights (W).
        """
        captures = [] if full_backward else self._captures()
        for capture in captures:
            capture.postponed = []
        try:
            type(stage).backward_one_chunk(stage, bwd_chunk_id, loss, full_backward, last_backward)
        finally:
            for capture in captures:
                capture.postponed = None

    def _reduce_grads(self, stage: Any, name: str, *arguments: int) -> None:
        """Replace the method of a stage with this name: FSDP2 reduces nothing in a `step()` inside
        `accumulate(model)` that is not the window's last.
        """
        module = stage.submod
        kind = type(module)
        defers = bool(self._running) and all(member.defers for member in self._running)
        if defers and is_fsdp(module):
            # torch calls set_requires_gradient_sync(True) here, whatever the user has set.
            module.__dict__["set_requires_gradient_sync"] = lambda _: kind.set_requires_gradient_sync(
                module, False
            )
        try:
            getattr(type(stage), name)(stage, *arguments)
        finally:
            module.__dict__.pop("set_requires_gradient_sync", None)

    def _build_runner(self, users: Callable[[], Any] | None) -> Callable[[], None]:
        """Replace a stage's `dw_builder`: run the user's function, then the postponed weight GEMMs."""
        runner = None if users is None else users()
        captures = [capture for capture in self._captures() if capture.postponed is not None]
        postponed = [(capture, capture.postponed) for capture in captures]
        for capture, _ in postponed:
            capture.postponed = None
        self._postponed += postponed

        def run() -> None:
            if runner is not None:
                runner()
            for capture, products in postponed:
                capture.compute_postponed(products)

        return run

    def _captures(self) -> list[Any]:
        """Return the captures of the running optimizers."""
        return [capture for member in self._running for capture in member.captures()]

    # Decisions that the ranks share

    def norm(self, member: Any, norm_type: float) -> Tensor:
        """Return the norm over the stages of all ranks: float64, 0-dim. Every rank calls it for each update.

        The optimizers of a rank update one after another. The first call measures the accumulators of all of
        them, and the calls by the others return the same norm.
        """
        if member in self._asking:
            self._asking.discard(member)
        else:
            members = [reference() for reference in self._members]
            alive = [other for other in members if other is not None]
            norms = torch.stack([other.own_norm().to(self._device) for other in alive])
            self._norm = mesh_norm.over_group(norms, norm_type, self._group)
            self._asking.update(other for other in alive if other is not member)
        assert self._norm is not None
        return self._norm

    def any_rank(self, flag: Tensor) -> Tensor:
        """Return 1 if this 0-dim flag is 1 on any rank, else 0."""
        largest = flag.to(self._device, copy=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return largest.to(flag.device)

    def check_weights(self, weights: Sequence[float | Tensor]) -> None:
        """Raise ValueError on every rank if the weights differ between ranks. Synchronises with a GPU."""
        given = torch.tensor([float(weight) for weight in weights], dtype=torch.float64)
        digest = torch.stack([given[0], (given * torch.arange(1, len(given) + 1)).sum()])
        smallest, largest = extremes(digest.to(self._device), self._group)
        least = smallest.tolist()
        most = largest.tolist()
        if most != least:
            raise ValueError(
                f"{self.name}: the ranks were given different weights in this window: {given[0]:g} in all on "
                f"this rank, {least[0]:g} to {most[0]:g} on all of them. discard() this window; allowed: "
                "accumulate(weight=...) with the same weight on every rank of a pipeline"
            )


#: The `AttachedSchedule` of each schedule that has an attached optimizer.
_attached: weakref.WeakKeyDictionary[Any, AttachedSchedule] = weakref.WeakKeyDictionary()
