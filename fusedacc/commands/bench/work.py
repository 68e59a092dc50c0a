"""A case of `bench`: the work, the variants that do it, and the check of their results."""

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

#: The arguments of a variant.
Tensors = tuple[Any, ...]

OURS, STOCK, YARDSTICK = "fusedacc", "stock", "yardstick"

#: Elements that are filled or compared at a time: they fit in a cache.
BLOCK = 2**18


@dataclass(frozen=True)
class BenchVariant:
    """One way to do a case's work.

    Attributes:
        make: `make(tensors)` returns a function that does the work once; `Work.check` checks its result.
        role: `OURS`, `STOCK` or `YARDSTICK`.
        scale: factor of the gradients in the expected sums.
        obstacle: why the variant does not apply to this case, or None.
        inexact: why its result is less exact than a sum in the accumulator's dtype. Such a variant is no
            baseline.
    """

    name: str
    role: str
    make: Callable[[Tensors], Run]
    scale: float = 1.0
    obstacle: str | None = None
    inexact: str | None = None


def ours(name: str, backend: str, step: Callable[..., object], scale: float = 1.0) -> BenchVariant:
    """Return one of our variants: `step(*tensors, backend=backend)`."""
    return BenchVariant(label(name, backend), OURS, calling(functools.partial(step, backend=backend)), scale)


def stock(name: str, step: Callable[..., object], *more: Any, **named: Any) -> BenchVariant:
    """Return a PyTorch variant: `step(*tensors)`; `more` and `named` are arguments of `BenchVariant`."""
    return BenchVariant(name, STOCK, calling(step), *more, **named)


def calling(step: Callable[..., object]) -> Callable[[Tensors], Run]:
    return lambda tensors: functools.partial(step, *tensors)


class Work(abc.ABC):
    """One case: a kind of work on tensors of given sizes, dtypes and device.

    Attributes:
        what: the kind ("add", "norm", "product", "rows").
        dtypes: those of gradients, and of the accumulator if there is one.
        sizes: in words.
        set_bytes: bytes of one set of tensors.
        moved: bytes that an ideal pass moves. A copy that moves as many is timed too.
        working_bytes: bytes that variants and checks need beside the sets, at most.
        tensors: tensors per set.
        warm: whether every call uses the same tensors, so that caches may hold them.
        notes: remarks on right results, by the variant's name.
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
        """Return a set of tensors."""

    @abc.abstractmethod
    def variants(self, backends: Sequence[str]) -> list[BenchVariant]:
        """Return our variants for each of these backends ("auto" first), and every PyTorch variant."""

    def chosen(self) -> tuple[str, str]:
        """Return the backend that "auto" selects, and the reason."""
        found = registry.select(self.device, self.accumulator, self.gradient)
        return found.backend.name, found.reason

    @abc.abstractmethod
    def check(self, variant: BenchVariant, run: Run, tensors: Any) -> str | None:
        """Run once, compare with a float64 reference, and return what is wrong, or None."""


def filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random numbers, repeated after each block. Every page is written."""
    flat = torch.empty(math.prod(shape), dtype=dtype, device=device)
    block = torch.randn(min(flat.numel(), BLOCK), device=device).to(dtype)
    for part in flat.split(BLOCK):
        part.copy_(block[: part.numel()])
    return flat.view(tuple(shape))


def label(name: str, backend: str) -> str:
    """Return a name such as "fusedacc, prepared" or "fusedacc eager, prepared"."""
    return f"{OURS if backend == 'auto' else f'{OURS} {backend}'}, {name}"


def off(error: Tensor, allowed: Tensor) -> int:
    """Return how many elements are off by more than is allowed, nan included."""
    return int((~(error <= allowed)).sum())


def wrong(bad: int, elements: int) -> str | None:
    return f"{bad} of {elements} elements are wrong" if bad else None


def grad_dtype_obstacle() -> str | None:
    """Return why a gradient cannot have another dtype than its parameter, or None."""
    return None if hasattr(Tensor, "grad_dtype") else f"torch {torch.__version__} has no Tensor.grad_dtype"


def parameter_with(values: Tensor, accumulator: Tensor) -> torch.nn.Parameter:
    """Return a parameter with these values, whose `.grad` is the accumulator of any dtype."""
    parameter = torch.nn.Parameter(values)
    if values.dtype != accumulator.dtype:
        parameter.grad_dtype = accumulator.dtype
    parameter.grad = accumulator
    return parameter
