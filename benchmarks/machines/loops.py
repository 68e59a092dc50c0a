"""The loops that are compared, by precision: contestants/training_loops.py on the zoo, with clipping."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..contestants.experts import Experts
from ..contestants.training_loops import BF16, F32, GradDtype, InsideBackward, Loop, Way, Wrapped
from .zoo import Entry

MAX_NORM = 1.0
STEPS = 8
CPU = torch.device("cpu")
#: A micro-batch: the model's arguments and the targets.
MicroBatch = tuple[tuple[Tensor, ...], Tensor]


@dataclasses.dataclass(frozen=True)
class Training:
    """A model in a precision: what a loop needs to train it, in place of the demo's `Config`."""

    entry: Entry
    precision: str
    steps: int = STEPS
    seed: int = 0
    backend: str = "auto"
    device: torch.device = CPU

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters, and of what is no integer in a model's arguments."""
        return BF16 if self.precision.startswith("bfloat16") else F32

    @property
    def accumulate_dtype(self) -> torch.dtype | None:
        """The wrapper's argument."""
        return BF16 if self.precision == "bfloat16 sums" else None

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return self.entry.model().to(self.dtype)

    def loss(self, model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        autocast = torch.autocast("cpu", BF16)
        with autocast if self.precision == "autocast" else contextlib.nullcontext():
            outputs = model(*inputs)
        return self.entry.loss(outputs, targets)

    def window(self, number: int) -> list[MicroBatch]:
        """The micro-batches of an update, the same for every loop."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + number)
        found = []
        for _ in range(self.steps):
            inputs, targets = self.entry.batch(generator)
            cast = tuple(x.to(self.dtype) if x.is_floating_point() else x for x in inputs)
            found.append((cast, targets))
        return found


class Clipped(Loop):
    """Stock's sums are clipped before the rest of the step, in their own dtype, as `clip_grad_norm_` does."""

    def step(self) -> None:
        self.clip()
        super().step()

    def clip(self) -> None:
        sums = self.clipped()
        norm = nn.utils.get_total_norm(sums, foreach=True)
        torch._foreach_mul_(sums, torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0))

    def clipped(self) -> list[Tensor]:
        """The sums."""
        return [p.grad for p in self.parameters if p.grad is not None]


class ClippedGradDtype(Clipped, GradDtype):
    """Autograd casts each gradient and adds it to p.grad, which is float32."""


class WithSums(Clipped):
    """float32 sums beside the parameters; at the update they are cast into p.grad, one by one."""

    def __init__(self, config: Training, fused: bool) -> None:
        super().__init__(config, fused)
        self.accumulators = [torch.zeros_like(p, dtype=F32) for p in self.parameters]

    def clip(self) -> None:
        super().clip()
        for parameter, total in zip(self.parameters, self.accumulators, strict=True):
            parameter.grad = total.to(BF16)

    def clipped(self) -> list[Tensor]:
        return self.accumulators

    def sums(self) -> Sequence[Tensor]:
        return self.accumulators


class MixedAdd(WithSums):
    """Each gradient is added by a mixed `add_` in a hook; the window's first is copied."""

    def __init__(self, config: Training, fused: bool) -> None:
        super().__init__(config, fused)
        self.touched = [False] * len(self.parameters)
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(self._adder(index))

    def _adder(self, index: int) -> Callable[[Tensor], None]:
        total, touched = self.accumulators[index], self.touched

        def add(parameter: Tensor) -> None:
            if touched[index]:
                total.add_(parameter.grad)
            else:
                total.copy_(parameter.grad)
                touched[index] = True
            parameter.grad = None

        return add

    def step(self) -> None:
        for total, touched in zip(self.accumulators, self.touched, strict=True):
            if not touched:
                total.zero_()
        self.touched[:] = [False] * len(self.touched)
        super().step()


class MixedGradient(WithSums):
    """p.grad is float32 from the start, and autograd itself adds each gradient to it by a mixed `add_`."""

    def __init__(self, config: Training, fused: bool) -> None:
        super().__init__(config, fused)
        for parameter in self.parameters:
            parameter.grad_dtype = None
        self._show()

    def _show(self) -> None:
        for parameter, total in zip(self.parameters, self.accumulators, strict=True):
            parameter.grad = total

    def step(self) -> None:
        super().step()
        torch._foreach_zero_(self.accumulators)
        self._show()


class Plain(Wrapped):
    """fusedacc with what stock's loops do: clipping, and sums of the precision."""

    def options(self) -> dict[str, Any]:
        same = {"max_grad_norm": MAX_NORM, "accumulate_dtype": self.config.accumulate_dtype}
        return {**super().options(), **same}


class Inside(Plain, InsideBackward):
    """The same with `model=`; stacked experts by `grouped_linear`."""

    def build(self, config: Training) -> nn.Module:
        model = super().build(config)
        for module in model.modules():
            if isinstance(module, Experts):
                module.way = "ours"
        return model


class InsideKeptCasts(Inside):
    """And with autocast's casts made once a window."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "keep_casts": True}


PLAIN, MODEL, KEPT = "fusedacc", "fusedacc model=", "fusedacc model=, keep_casts"
OURS = (Way(PLAIN, Plain), Way(MODEL, Inside, exact=False))
IN_GRAD = (Way("p.grad", Clipped),)
#: Stock's exact ways by precision, all with the fused AdamW; ours are held against the fastest.
STOCK_WAYS = {
    "float32": IN_GRAD,
    "autocast": IN_GRAD,
    "bfloat16": (
        Way("grad_dtype", ClippedGradDtype),
        Way("mixed add_ in a hook", MixedAdd),
        Way("float32 p.grad", MixedGradient),
    ),
    "bfloat16 sums": IN_GRAD,
}
PRECISIONS = tuple(STOCK_WAYS)


def ours(precision: str) -> tuple[Way, ...]:
    """What is measured of fusedacc."""
    return (*OURS, Way(KEPT, InsideKeptCasts, exact=False)) if precision == "autocast" else OURS
