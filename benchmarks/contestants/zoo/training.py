"""The loops of contestants/loops.py that train the models of this folder, by precision, with clipping."""

import contextlib
import dataclasses
import itertools

import torch
from torch import Tensor, nn

from fusedacc.commands.timing import Run

from .. import loops
from ..experts import Experts
from . import Entry

STEPS = 8
CPU = torch.device("cpu")
#: A micro-batch: the model's arguments and the targets.
MicroBatch = tuple[tuple[Tensor, ...], Tensor]


@dataclasses.dataclass(frozen=True)
class Training(loops.Task):
    entry: Entry
    precision: str
    steps: int = STEPS
    seed: int = 0
    backend: str = "auto"
    device: torch.device = CPU
    max_grad_norm: float = 1.0
    clips_sums: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters and of the model's floating-point arguments."""
        return loops.BF16 if self.precision.startswith("bfloat16") else loops.F32

    # The base class has a field here; this class derives it from the precision.
    @property
    def accumulate_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        return loops.BF16 if self.precision == "bfloat16 sums" else None

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return self.entry.model().to(self.dtype)

    def loss(self, model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        autocast = torch.autocast("cpu", loops.BF16)
        with autocast if self.precision == "autocast" else contextlib.nullcontext():
            outputs = model(*inputs)
        return self.entry.loss(outputs, targets)

    def window(self, number: int) -> list[MicroBatch]:
        """Return the micro-batches of an update, the same for every loop."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + number)
        found = []
        for _ in range(self.steps):
            inputs, targets = self.entry.batch(generator)
            cast = tuple(x.to(self.dtype) if x.is_floating_point() else x for x in inputs)
            found.append((cast, targets))
        return found


class MixedGradient(loops.WithSums):
    """p.grad is float32 from the start, and autograd adds each gradient to it by a mixed `add_`."""

    def prepare(self) -> None:
        super().prepare()
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


class Inside(loops.InsideBackward):
    """Use `model=`, and `grouped_linear` for stacked experts."""

    def build(self, task: Training) -> nn.Module:
        model = super().build(task)
        for module in model.modules():
            if isinstance(module, Experts):
                module.way = "ours"
        return model


class InsideKeptCasts(Inside, loops.KeptCasts):
    """The same, with autocast's casts of the weights made once per window."""


def turn(way: loops.LoopVariant, training: Training) -> Run:
    """Return a function that trains a loop on two windows alternately."""
    loop = way.make(training)
    windows = itertools.cycle([training.window(number) for number in range(2)])
    return lambda: loop.update(next(windows))


PLAIN, MODEL, KEPT = "fusedacc", "fusedacc model=", "fusedacc model=, keep_casts"
OURS = (loops.LoopVariant(PLAIN, loops.Wrapped), loops.LoopVariant(MODEL, Inside, exact=False))
IN_GRAD = (loops.LoopVariant("p.grad", loops.Loop),)
#: Stock's exact loops by precision, all with the fused AdamW. Ours are compared with the fastest.
STOCK_VARIANTS = {
    "float32": IN_GRAD,
    "autocast": IN_GRAD,
    "bfloat16": (
        loops.LoopVariant("grad_dtype", loops.GradDtype),
        loops.LoopVariant("mixed add_ in a hook", loops.MixedAdd),
        loops.LoopVariant("float32 p.grad", MixedGradient),
    ),
    "bfloat16 sums": IN_GRAD,
}
PRECISIONS = tuple(STOCK_VARIANTS)


def ours(precision: str) -> tuple[loops.LoopVariant, ...]:
    return (*OURS, loops.LoopVariant(KEPT, InsideKeptCasts, exact=False)) if precision == "autocast" else OURS
