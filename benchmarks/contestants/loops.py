"""Loops that accumulate gradients, stock torch's and ours, cut at their phases: what suites train with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fusedacc
from examples.demo.loops import Config
from fusedacc.planner.allocations import Look, recorded_peak

#: Of an update, with the parts of `Loop.step` taken together.
PHASES = ("forward", "backward", "accumulate", "update")


def phase_of(part: str) -> str:
    """Which of PHASES a part is of."""
    return "update" if part == "first touch" else part.partition(":")[0]


#: Called with a phase's name, gives the context that the phase runs in.
Phase = Callable[[str], contextlib.AbstractContextManager]
#: The arguments of `Task.loss` after the model.
MicroBatch = Sequence[Any]
#: The kinds of memory that loops of any sort have. All that no look has found is the last.
OTHER = "activations and others"
KINDS = ("weights", "gradients", "optimizer", OTHER)
F32, BF16 = torch.float32, torch.bfloat16


def share_moments(optimizer: torch.optim.Optimizer, moments: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give an AdamW its state, at step 0: the moments of each parameter, which other loops have too."""
    (group,) = optimizer.param_groups
    for parameter, (mean, square) in zip(group["params"], moments, strict=True):
        step = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
        optimizer.state[parameter] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}


def sum_in(parameters: Iterable[Tensor], dtype: torch.dtype) -> None:
    """From here on autograd sums in p.grad of that dtype; what is there is cast."""
    for parameter in parameters:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        if gradient is not None:
            parameter.grad = gradient.to(dtype)


class HookSums:
    """float32 sums to which a hook adds each gradient by a mixed `add_`, as soon as autograd has stored it.

    The window's first gradient is copied, which spares a pass that zeroes the sum.
    """

    def __init__(self, parameters: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        self.parameters, self.sums = parameters, sums
        self.touched = [False] * len(sums)
        self.hooks = [p.register_post_accumulate_grad_hook(self._adder(i)) for i, p in enumerate(parameters)]

    def _adder(self, index: int) -> Callable[[Tensor], None]:
        total, touched = self.sums[index], self.touched

        def add(parameter: Tensor) -> None:
            if touched[index]:
                total.add_(parameter.grad)
            else:
                total.copy_(parameter.grad)
                touched[index] = True
            parameter.grad = None

        return add

    def finish(self) -> None:
        """Make the sums whole, and begin another window."""
        for total, touched in zip(self.sums, self.touched, strict=True):
            if not touched:
                total.zero_()
        self.touched[:] = [False] * len(self.touched)


def window(optimizer: torch.optim.Optimizer, loss: Callable[[int], Tensor], steps: int) -> Callable[[], None]:
    """A window with its update, as users write it. `loss(index)`: of a micro-batch."""
    if isinstance(optimizer, fusedacc.AccumulatingOptimizer):

        def wrapped() -> None:
            for index in range(steps):
                loss(index).backward()
                optimizer.step()
                optimizer.zero_grad()

        return wrapped

    def stock() -> None:
        for index in range(steps):
            (loss(index) / steps).backward()
        optimizer.step()
        optimizer.zero_grad()

    return stock


class Task:
    """What a loop trains. Subclasses have `model()`, `loss(model, *micro_batch)` and a `device`.

    Attributes:
        steps: micro-batches of a window.
        backend: the wrapper's.
        max_grad_norm: gradients are clipped to this norm.
        clips_sums: whether stock's loop clips each float32 sum in one pass before the cast. Otherwise
            `clip_grad_norm_` clips p.grad.
        accumulate_dtype: the wrapper's.
    """

    steps: int
    device: torch.device
    backend = "auto"
    max_grad_norm: float | None = None
    clips_sums = False
    accumulate_dtype: torch.dtype | None = None

    def model(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, model: nn.Module, *micro_batch: Any) -> Tensor:
        raise NotImplementedError

    def optimizer(self, parameters: list[nn.Parameter], fused: bool | None) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, fused=fused)

    def sums(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """float32 sums beside the parameters."""
        return [torch.zeros_like(parameter, dtype=F32) for parameter in parameters]


class Demo(Config, Task):
    """The training of `examples/demo`."""


class Loop:
    """Plain torch: autograd sums in p.grad, in the parameters' dtype.

    `fused`: one kernel for the whole update; else AdamW as torch makes it.
    """

    #: Whether the loss is divided by the number of micro-batches.
    divides = True

    def __init__(self, task: Task, fused: bool = True) -> None:
        self.task, self.model = task, self.build(task)
        self.parameters = list(self.model.parameters())
        self.inner = self.make_optimizer(fused)
        self.phase: Phase = contextlib.nullcontext
        self.prepare()

    def build(self, task: Task) -> nn.Module:
        return task.model()

    def make_optimizer(self, fused: bool) -> torch.optim.Optimizer:
        return self.task.optimizer(self.parameters, fused or None)

    def prepare(self) -> None:
        """Hooks, sums, wrappers."""

    @classmethod
    def obstacle(cls) -> str:
        """Why this loop cannot run here; empty if it can."""
        return ""

    def update(self, micro_batches: Sequence[MicroBatch], phase: Phase = contextlib.nullcontext) -> Tensor:
        """One update; returns the micro-batches' mean loss, float32 []."""
        return torch.stack(self.window(micro_batches, phase)).mean()

    def window(
        self, micro_batches: Sequence[MicroBatch], phase: Phase = contextlib.nullcontext
    ) -> list[Tensor]:
        """The same; returns the losses."""
        self.phase = phase
        losses = self.accumulate_all(micro_batches)
        self.step()
        self.phase = contextlib.nullcontext
        return losses

    def accumulate_all(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The window but its update; returns the losses."""
        losses = []
        for index, micro_batch in enumerate(micro_batches):
            losses.append(self.micro_batch(micro_batch, index == len(micro_batches) - 1).detach())
            with self.phase("accumulate"):
                self.accumulate()
        return losses

    def micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> Tensor:
        """Forward and backward; returns the loss."""
        with self.phase("forward"):
            loss = self.task.loss(self.model, *micro_batch)
        with self.phase("backward"):
            (loss / self.task.steps if self.divides else loss).backward()
        return loss

    def accumulate(self) -> None:
        """What the loop itself does after each backward."""

    def step(self) -> None:
        clips = self.task.max_grad_norm is not None
        if clips and self.task.clips_sums:
            with self.phase("update: clip"):
                self._clip_by_foreach(self.clipped())
        with self.phase("update: cast"):
            self.cast()
        if clips and not self.task.clips_sums:
            with self.phase("update: clip"):
                nn.utils.clip_grad_norm_(self.parameters, self.task.max_grad_norm)
        with self.phase("update: optimizer"):
            self.inner.step()
            self.inner.zero_grad()

    def _clip_by_foreach(self, sums: list[Tensor]) -> None:
        norm = nn.utils.get_total_norm(sums, foreach=True)
        torch._foreach_mul_(sums, torch.clamp(self.task.max_grad_norm / (norm + 1e-6), max=1.0))

    def clipped(self) -> list[Tensor]:
        """What is clipped before it is cast."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def cast(self) -> None:
        """Put the final gradients into p.grad."""

    def sums(self) -> Sequence[Tensor]:
        """Tensors beside p.grad that gradients are summed in."""
        return ()

    def held(self) -> dict[str, list[Tensor]]:
        """By kind, the tensors that outlive a phase."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        state = [t for of_one in self.inner.state.values() for t in of_one.values() if torch.is_tensor(t)]
        return {"weights": self.parameters, "gradients": [*gradients, *self.sums()], "optimizer": state}

    def close(self) -> None:
        """Let go of hooks and gradients."""
        for parameter in self.parameters:
            parameter.grad = None


class WithSums(Loop):
    """float32 sums beside bfloat16 parameters; at the update they are cast into p.grad, one by one."""

    def prepare(self) -> None:
        self.accumulators = self.task.sums(self.parameters)

    def clipped(self) -> list[Tensor]:
        return self.accumulators

    def cast(self) -> None:
        for parameter, total in zip(self.parameters, self.accumulators, strict=True):
            parameter.grad = total.to(parameter.dtype)

    def sums(self) -> Sequence[Tensor]:
        return self.accumulators


class ByHand(WithSums):
    """`acc += p.grad.float() / k` after each backward, as people write it."""

    divides = False

    def accumulate_all(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        with self.phase("first touch"):
            for total in self.accumulators:
                total.zero_()
        return super().accumulate_all(micro_batches)

    def accumulate(self) -> None:
        for parameter, total in zip(self.parameters, self.accumulators, strict=True):
            total += parameter.grad.float() / self.task.steps
            parameter.grad = None


class MixedAdd(WithSums):
    """Each gradient is added by one mixed `add_` in a hook; the window's first is copied."""

    def prepare(self) -> None:
        super().prepare()
        self.hook_sums = HookSums(self.parameters, self.accumulators)

    def step(self) -> None:
        self.hook_sums.finish()
        super().step()

    def close(self) -> None:
        for hook in self.hook_sums.hooks:
            hook.remove()
        super().close()


class GradDtype(Loop):
    """bfloat16 parameters, and float32 sums that autograd keeps in p.grad; cast at the update."""

    def prepare(self) -> None:
        sum_in(self.parameters, F32)

    def cast(self) -> None:
        sum_in(self.parameters, BF16)

    def step(self) -> None:
        super().step()
        sum_in(self.parameters, F32)


class Wrapped(Loop):
    """fusedacc, counted: the loss is not divided."""

    divides = False

    def prepare(self) -> None:
        self.optimizer = fusedacc.AccumulatingOptimizer(self.inner, self.counted_steps(), **self.options())

    def counted_steps(self) -> int | None:
        return self.task.steps

    def options(self) -> dict[str, Any]:
        same = ("backend", "max_grad_norm", "accumulate_dtype")
        return {name: getattr(self.task, name) for name in same}

    def accumulate(self) -> None:
        if not self.optimizer.will_update:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def step(self) -> None:
        with self.phase("update: optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def sums(self) -> Sequence[Tensor]:
        slots = self.optimizer._slots
        return [t for slot in slots for t in (slot.accumulator, slot.buffer) if t is not None]

    def close(self) -> None:
        self.optimizer.close()
        super().close()


class Manual(Wrapped):
    """fusedacc without a count: the loop divides the loss, and calls step() once."""

    divides = True

    def counted_steps(self) -> None:
        return None

    def accumulate(self) -> None:
        """None."""


class InsideBackward(Wrapped):
    """Linear and Embedding layers add to the sums inside their backward, and write no weight gradient."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "model": self.model}


class KeptCasts(InsideBackward):
    """The same, where autocast's casts of the weights are made once a window."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "keep_casts": True}


class NothingAccumulated(Loop):
    """The same forward and backward through `torch.autograd.grad`, no update: what no loop saves."""

    def micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> Tensor:
        with self.phase("forward"):
            loss = self.task.loss(self.model, *micro_batch)
        with self.phase("backward"):
            torch.autograd.grad(loss / self.task.steps, self.parameters)
        return loss

    def step(self) -> None:
        """None."""


@dataclasses.dataclass(frozen=True)
class LoopVariant:
    """A loop that is compared with others.

    `competes`: among the best that stock has, which fusedacc is held against. `exact`: its sums are those of
    the others bit for bit, and not up to the rounding of products.
    """

    name: str
    kind: type[Loop]
    fused: bool = True
    competes: bool = False
    exact: bool = True

    def make(self, task: Task) -> Loop:
        return self.kind(task, self.fused)

    def peak(self, task: Task, updates: Sequence[Sequence[MicroBatch]]) -> dict[str, int]:
        """Bytes of each of KINDS at the peak, from the making of the loop through these updates.

        Bytes are those asked for, without the allocator's rounding.
        """
        train = functools.partial(self._train, task, updates)
        found = recorded_peak(train, task.device, OTHER).by_kind
        return {kind: found.get(kind, 0) for kind in KINDS}

    def _train(self, task: Task, updates: Sequence[Sequence[MicroBatch]], look: Look) -> None:
        """Train, and look where the tensors lie after every phase and inner update."""
        loop = self.make(task)
        hook = loop.inner.register_step_post_hook(lambda *_: look(loop.held()))

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            yield
            look(loop.held())

        look(loop.held())
        for micro_batches in updates:
            loop.update(micro_batches, phase)
        hook.remove()  # it refers to the loop, whose memory must go with the last name of it


STOCK, STOCK_FUSED = (
    LoopVariant("stock", Loop, fused=False),
    LoopVariant("stock, fused AdamW", Loop, competes=True),
)
BASELINE = LoopVariant("no accumulation, no update", NothingAccumulated)
PLAIN, UNFUSED = LoopVariant("fusedacc, fused AdamW", Wrapped), LoopVariant("fusedacc", Wrapped, fused=False)
INSIDE = LoopVariant("fusedacc, model=, fused AdamW", InsideBackward, exact=False)
KEPT = LoopVariant("fusedacc, model= keep_casts, fused AdamW", KeptCasts, exact=False)
OURS = (PLAIN, INSIDE, UNFUSED)
#: By dtype. The first is stock as people write it.
VARIANTS = {
    "float32": (STOCK, STOCK_FUSED, *OURS),
    "bfloat16": (
        LoopVariant("stock, by hand", ByHand, fused=False),
        LoopVariant("stock, grad_dtype, fused AdamW", GradDtype, competes=True),
        LoopVariant("stock, mixed add_ in a hook, fused AdamW", MixedAdd, competes=True),
        *OURS,
    ),
    "autocast": (STOCK, STOCK_FUSED, *OURS, KEPT),
}
