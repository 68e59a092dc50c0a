"""What a case is made of: the work, the variants that do it, and whether a result is right."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels import registry
from ...kernels.dtypes import dtype_name
from ..measuring.timing import Run

#: A set of tensors: the arguments of what works on them.
Tensors = tuple[Any, ...]

OURS, STOCK, YARDSTICK = "fusedacc", "stock", "yardstick"

#: Elements that are filled, or compared with the reference, at a time: few enough for a cache.
BLOCK = 2**18


@dataclass(frozen=True)
class BenchVariant:
    """One way to do a case's work.

    `make(tensors)` returns a function that does it once with one set of tensors; its result is checked by
    `Work.check`. `role`: `OURS`, `STOCK` or `YARDSTICK`. `scale`: of the gradients, in the sums that are to
    come out. `obstacle`: why it does not apply to this case, or None. `inexact`: what makes its result less
    exact than a sum in the accumulator's dtype; this variant is no baseline.
    """

    name: str
    role: str
    make: Callable[[Tensors], Run]
    scale: float = 1.0
    obstacle: str | None = None
    inexact: str | None = None


def ours(way: str, backend: str, step: Callable[..., object], scale: float = 1.0) -> BenchVariant:
    """One of our variants: `step(*tensors, backend=backend)`."""
    return BenchVariant(label(way, backend), OURS, calling(functools.partial(step, backend=backend)), scale)


def stock(name: str, step: Callable[..., object], *more: Any, **named: Any) -> BenchVariant:
    """A form of stock torch: `step(*tensors)`; `more` and `named` are as `BenchVariant` has them."""
    return BenchVariant(name, STOCK, calling(step), *more, **named)


def calling(step: Callable[..., object]) -> Callable[[Tensors], Run]:
    """What makes calls of `step` with a set of tensors."""
    return lambda tensors: functools.partial(step, *tensors)


class Work(abc.ABC):
    """One case: a kind of work on tensors of given sizes, dtypes and device.

    `what`: the kind ("add", "norm", "product", "rows"). `dtypes`: of gradients, and of the accumulator where
    there is one. `sizes`: in words that a reader can check. `set_bytes`: of one set of tensors. `moved`: what
    an ideal pass reads and writes: a copy that moves as much is timed beside them. `working_bytes`: what
    variants and checks need at the most beside the sets. `tensors`: how many a set has. `warm`: whether every
    call takes the same tensors, so that caches hold what fits there. `notes`: what `check` has found worth
    telling of a result that is not wrong, by the variant's name.
    """

    what: str
    sizes: str
    set_bytes: int
    moved: int
    working_bytes: int
    tensors = 1
    warm = False

    def __init__(self, name: str, device: torch.device, *dtypes: torch.dtype) -> None:
        self.name, self.device, self.gradient, self.accumulator = name, device, dtypes[0], dtypes[-1]
        self.dtypes = " into ".join(map(dtype_name, dtypes))
        self.notes: dict[str, str] = {}

    @property
    def title(self) -> str:
        return ", ".join([self.name, self.dtypes, *(["warm"] if self.warm else [])])

    @abc.abstractmethod
    def make(self) -> Tensors:
        """A set of tensors."""

    @abc.abstractmethod
    def variants(self, backends: Sequence[str]) -> list[BenchVariant]:
        """Ours by each of those backends ("auto" first), and every form of stock torch."""

    def chosen(self) -> tuple[str, str]:
        """The backend that "auto" takes, with how it works, and why it was chosen."""
        found = registry.select(self.device, self.accumulator, self.gradient)
        return found.backend.name, found.reason

    @abc.abstractmethod
    def check(self, variant: BenchVariant, run: Run, tensors: Any) -> str | None:
        """Runs once; returns what is wrong with the result, by a reference in float64, if anything is."""


def filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers, those beyond a block repeated; every page is written."""
    flat = torch.empty(math.prod(shape), dtype=dtype, device=device)
    block = torch.randn(min(flat.numel(), BLOCK), device=device).to(dtype)
    for part in flat.split(BLOCK):
        part.copy_(block[: part.numel()])
    return flat.view(tuple(shape))


def label(way: str, backend: str) -> str:
    """The name of one of our variants: "fusedacc, prepared", "fusedacc eager, prepared"."""
    return f"{OURS if backend == 'auto' else f'{OURS} {backend}'}, {way}"


def off(error: Tensor, allowed: Tensor) -> int:
    """How many elements are off by more than is allowed; nan is."""
    return int((~(error <= allowed)).sum())


def wrong(bad: int, elements: int) -> str | None:
    return f"{bad} of {elements} elements are wrong" if bad else None


def grad_dtype_obstacle() -> str | None:
    """Why a parameter's gradient cannot be of another dtype than the parameter."""
    return None if hasattr(Tensor, "grad_dtype") else f"torch {torch.__version__} has no Tensor.grad_dtype"


def parameter_with(values: Tensor, accumulator: Tensor) -> torch.nn.Parameter:
    """A parameter of those values whose `.grad` is the accumulator, whatever its dtype."""
    parameter = torch.nn.Parameter(values)
    if values.dtype != accumulator.dtype:
        parameter.grad_dtype = accumulator.dtype
    parameter.grad = accumulator
    return parameter
