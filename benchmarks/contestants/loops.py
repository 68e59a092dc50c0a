"""Loops that accumulate gradients, stock and ours, divided into phases. The suites train with them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fusedacc
from examples.demo.loops import Config
from fusedacc.planner.allocations import Look, recorded_peak

#: The phases of an update. The parts of `Loop.step` are one phase.
PHASES = ("forward", "backward", "accumulate", "update")


def phase_of(part: str) -> str:
    return "update" if part == "first touch" else part.partition(":")[0]


#: Takes a phase's name and returns the context that the phase runs in.
Phase = Callable[[str], contextlib.AbstractContextManager]
#: The arguments of `Task.loss` after the model.
MicroBatch = Sequence[Any]
#: The kinds of memory in every loop. The last is all that no look has found.
OTHER = "activations and others"
KINDS = ("weights", "gradients", "optimizer", OTHER)
F32, BF16 = torch.float32, torch.bfloat16


def share_moments(optimizer: torch.optim.Optimizer, moments: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give an AdamW its state at step 0. Several loops may share the moments of each parameter."""
    (group,) = optimizer.param_groups
    for parameter, (mean, square) in zip(group["params"], moments, strict=True):
        step = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
        optimizer.state[parameter] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}


def sum_in(parameters: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Make autograd sum in a p.grad of that dtype from now on. Existing gradients are cast."""
    for parameter in parameters:
        gradient = parameter.grad
        parameter.grad = None
        parameter.grad_dtype = dtype
        if gradient is not None:
            parameter.grad = gradient.to(dtype)


class HookSums:
    """float32 sums to which a hook adds each gradient by a mixed `add_` once autograd has stored it.

    The first gradient of a window is copied, which saves a pass that zeroes the sum.
    """

    def __init__(self, parameters: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.sums = sums
        self.touched = [False] * len(sums)
        self.hooks = [p.register_post_accumulate_grad_hook(self._adder(i)) for i, p in enumerate(parameters)]

    def _adder(self, index: int) -> Callable[[Tensor], None]:
        total = self.sums[index]
        touched = self.touched

        def add(parameter: Tensor) -> None:
            if touched[index]:
                total.add_(parameter.grad)
            else:
                total.copy_(parameter.grad)
                touched[index] = True
            parameter.grad = None

        return add

    def finish(self) -> None:
        """Zero the sums that got no gradient, and begin the next window."""
        for total, touched in zip(self.sums, self.touched, strict=True):
            if not touched:
                total.zero_()
        self.touched[:] = [False] * len(self.touched)


class Handed(torch.autograd.Function):
    """A scalar whose backward calls `make(scale)` for the gradients of its inputs."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[Tensor], Iterable[Tensor]], *inputs: Tensor) -> Tensor:
        ctx.make = make
        return torch.zeros((), device=inputs[0].device)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.make(scale)


def window(optimizer: torch.optim.Optimizer, loss: Callable[[int], Tensor], steps: int) -> Callable[[], None]:
    """Return a window with its update, as users write it. `loss(index)` is that of a micro-batch."""
    counts = isinstance(optimizer, fusedacc.AccumulatingOptimizer)

    def run() -> None:
        for index in range(steps):
            found = loss(index)
            (found if counts else found / steps).backward()
            if counts or index == steps - 1:
                optimizer.step()
                optimizer.zero_grad()

    return run


class Task:
    """What a loop trains. Subclasses have `model()`, `loss(model, *micro_batch)` and a `device`.

    Attributes:
        steps: micro-batches per window.
        clips_sums: whether stock's loop clips the float32 sums before the cast, and not p.grad after it.
        backend, max_grad_norm, accumulate_dtype: arguments of the wrapper.
    """

    steps: int
    device: torch.device
    backend = "auto"
    max_grad_norm: float | None = None
    clips_sums = False
    accumulate_dtype: torch.dtype | None = None

    def optimizer(self, parameters: list[nn.Parameter], fused: bool | None) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, fused=fused)

    def sums(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return float32 sums for the parameters."""
        return [torch.zeros_like(parameter, dtype=F32) for parameter in parameters]


class Demo(Config, Task):
    """The training of `examples/demo`."""

    @property
    def parameters(self) -> int:
        empty = dataclasses.replace(self, device=torch.device("meta"))
        return sum(p.numel() for p in empty.model().parameters())

    @property
    def micro_batches(self) -> str:
        return f"{self.steps} micro-batches of {self.micro_batch_size} x {self.context} bytes"


class Loop:
    """Plain PyTorch: autograd sums in p.grad, in the parameters' dtype. `fused`: use the fused AdamW."""

    #: Whether the loop divides the loss by the number of micro-batches.
    divides = True

    def __init__(self, task: Task, fused: bool = True) -> None:
        self.task = task
        self.model = self.build(task)
        self.parameters = list(self.model.parameters())
        self.inner = self.make_optimizer(fused)
        self.phase: Phase = contextlib.nullcontext
        self.prepare()

    def build(self, task: Task) -> nn.Module:
        return task.model()

    def make_optimizer(self, fused: bool) -> torch.optim.Optimizer:
        return self.task.optimizer(self.parameters, fused or None)

    def prepare(self) -> None:
        """Make hooks, sums and wrappers."""

    @classmethod
    def obstacle(cls) -> str:
        """Return why this loop cannot run here; empty if it can."""
        return ""

    def update(self, micro_batches: Sequence[MicroBatch], phase: Phase = contextlib.nullcontext) -> Tensor:
        """Make one update. Return the mean loss of the micro-batches, float32 []."""
        return torch.stack(self.window(micro_batches, phase)).mean()

    def window(self, micro_batches: Sequence[MicroBatch], phase: Phase = contextlib.nullcontext) -> list:
        """Make one update. Return the losses."""
        self.phase = phase
        losses = self.accumulate_all(micro_batches)
        self.step()
        self.phase = contextlib.nullcontext
        return losses

    def accumulate_all(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run the window without its update. Return the losses."""
        losses = []
        for index, micro_batch in enumerate(micro_batches):
            losses.append(self.micro_batch(micro_batch, index == len(micro_batches) - 1).detach())
            with self.phase("accumulate"):
                self.accumulate()
        return losses

    def micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> Tensor:
        """Run forward and backward. Return the loss."""
        with self.phase("forward"):
            loss = self.task.loss(self.model, *micro_batch)
        with self.phase("backward"):
            (loss / self.task.steps if self.divides else loss).backward()
        return loss

    def accumulate(self) -> None:
        """Do what the loop itself does after each backward."""

    def step(self) -> None:
        clips = self.task.max_grad_norm is not None
        if clips and self.task.clips_sums:
            with self.phase("update: clip"):
                sums = self.sums() or [p.grad for p in self.parameters if p.grad is not None]
                norm = nn.utils.get_total_norm(sums, foreach=True)
                torch._foreach_mul_(sums, torch.clamp(self.task.max_grad_norm / (norm + 1e-6), max=1.0))
        with self.phase("update: cast"):
            self.cast()
        if clips and not self.task.clips_sums:
            with self.phase("update: clip"):
                nn.utils.clip_grad_norm_(self.parameters, self.task.max_grad_norm)
        with self.phase("update: optimizer"):
            self.inner.step()
            self.inner.zero_grad()

    def cast(self) -> None:
        """Put the final gradients into p.grad."""

    def sums(self) -> Sequence[Tensor]:
        """Return the tensors besides p.grad that hold sums of gradients."""
        return ()

    def held(self) -> dict[str, list[Tensor]]:
        """Return the tensors that outlive a phase, by kind."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        state = [t for of_one in self.inner.state.values() for t in of_one.values() if torch.is_tensor(t)]
        return {"weights": self.parameters, "gradients": [*gradients, *self.sums()], "optimizer": state}

    def close(self) -> None:
        """Remove hooks and gradients."""
        for parameter in self.parameters:
            parameter.grad = None


class WithSums(Loop):
    """bfloat16 parameters with float32 sums, which are cast into p.grad one by one at the update."""

    def prepare(self) -> None:
        self.accumulators = self.task.sums(self.parameters)

    def cast(self) -> None:
        for parameter, total in zip(self.parameters, self.accumulators, strict=True):
            parameter.grad = total.to(parameter.dtype)

    def sums(self) -> Sequence[Tensor]:
        return self.accumulators


class ByHand(WithSums):
    """`acc += p.grad.float() / k` after each backward, as in tutorials."""

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
    """A hook adds each gradient by one mixed `add_`, and copies the first of a window."""

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
    """bfloat16 parameters, and float32 sums that autograd keeps in p.grad until the cast at the update."""

    def prepare(self) -> None:
        sum_in(self.parameters, F32)

    def cast(self) -> None:
        sum_in(self.parameters, BF16)

    def step(self) -> None:
        super().step()
        sum_in(self.parameters, F32)


class Wrapped(Loop):
    """fusedacc, which counts micro-batches: the loop does not divide the loss."""

    divides = False

    def prepare(self) -> None:
        steps = None if self.divides else self.task.steps
        self.optimizer = fusedacc.AccumulatingOptimizer(self.inner, steps, **self.options())

    def options(self) -> dict[str, Any]:
        same = ("backend", "max_grad_norm", "accumulate_dtype")
        return {name: getattr(self.task, name) for name in same}

    def accumulate(self) -> None:
        if not self.divides and not self.optimizer.will_update:
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
    """fusedacc without a count: the loop divides the loss and calls step() once."""

    divides = True


class InsideBackward(Wrapped):
    """`model=`: Linear and Embedding layers add to the sums in their backward, without weight gradients."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "model": self.model}


class KeptCasts(InsideBackward):
    """The same, with autocast's casts of the weights made once per window."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "keep_casts": True}


class NothingAccumulated(Loop):
    """Forward and `torch.autograd.grad` without an update: the part that no loop can save."""

    def micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> Tensor:
        with self.phase("forward"):
            loss = self.task.loss(self.model, *micro_batch)
        with self.phase("backward"):
            torch.autograd.grad(loss / self.task.steps, self.parameters)
        return loss

    def step(self) -> None:
        """Do nothing."""


@dataclasses.dataclass(frozen=True)
class LoopVariant:
    """A loop. `competes`: fusedacc is compared with it. `exact`: its sums equal the others' bit for bit."""

    name: str
    kind: type[Loop]
    fused: bool = True
    competes: bool = False
    exact: bool = True

    def make(self, task: Task) -> Loop:
        return self.kind(task, self.fused)

    def peak(self, task: Task, updates: Sequence[Sequence[MicroBatch]]) -> dict[str, int]:
        """Return the bytes of each of KINDS at the peak, from making the loop through these updates.

        The allocator's rounding is not included.
        """

        def train(look: Look) -> None:
            """Train, and record the tensors after every phase and inner update."""
            loop = self.make(task)
            hook = loop.inner.register_step_post_hook(lambda *_: look(loop.held()))

            @contextlib.contextmanager
            def phase(name: str) -> Iterator[None]:
                yield
                look(loop.held())

            look(loop.held())
            for micro_batches in updates:
                loop.update(micro_batches, phase)
            hook.remove()  # it keeps the loop, and so its memory, alive

        found = recorded_peak(train, task.device, OTHER).by_kind
        return {kind: found.get(kind, 0) for kind in KINDS}


STOCK = LoopVariant("stock", Loop, fused=False)
STOCK_FUSED = LoopVariant("stock, fused AdamW", Loop, competes=True)
BASELINE = LoopVariant("no accumulation, no update", NothingAccumulated)
PLAIN, UNFUSED = LoopVariant("fusedacc, fused AdamW", Wrapped), LoopVariant("fusedacc", Wrapped, fused=False)
INSIDE = LoopVariant("fusedacc, model=, fused AdamW", InsideBackward, exact=False)
KEPT = LoopVariant("fusedacc, model= keep_casts, fused AdamW", KeptCasts, exact=False)
OURS = (PLAIN, INSIDE, UNFUSED)
#: By dtype. The first is stock as written in tutorials.
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
