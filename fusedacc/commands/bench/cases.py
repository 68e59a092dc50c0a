"""The cases of `bench`: the work, the variants that do it, and the check of their results.

The work: `accumulator += scale * gradient` over a list of tensors, and the norm of a list.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...functional import prepare, scale_accumulate_, total_norm
from ...kernels import registry
from ...kernels.dtypes import computation_dtype, dtype_name
from ..timing import Run

#: The arguments of a variant; the dtypes of gradients (or operands) and accumulator.
Tensors = tuple[Any, ...]
Pair = tuple[torch.dtype, torch.dtype]

OURS = "fusedacc"
STOCK = "stock"
YARDSTICK = "yardstick"

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
    """One case: a kind of work (`what`) on tensors of given sizes, dtypes and device.

    Attributes:
        set_bytes, tensors: the bytes and number of tensors of one set.
        moved: bytes that an ideal pass moves. A copy that moves as many is timed too.
        working_bytes: bytes that variants and checks need beside the sets, at most.
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
        self.name = name
        self.device = device
        self.gradient = dtypes[0]
        self.accumulator = dtypes[-1]
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
        selection = registry.select(self.device, self.accumulator, self.gradient)
        return selection.backend.name, selection.reason

    def grad_dtype_obstacle(self) -> str | None:
        """Return why a parameter's gradient cannot have the accumulator's dtype, or None."""
        if self.gradient == self.accumulator or hasattr(Tensor, "grad_dtype"):
            return None
        return f"torch {torch.__version__} has no Tensor.grad_dtype"

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


def parameter_with(values: Tensor, accumulator: Tensor) -> torch.nn.Parameter:
    """Return a parameter with these values, whose `.grad` is the accumulator of any dtype."""
    parameter = torch.nn.Parameter(values)
    if values.dtype != accumulator.dtype:
        parameter.grad_dtype = accumulator.dtype
    parameter.grad = accumulator
    return parameter


SCALE = 0.125

#: Accumulators and gradients.
Lists = tuple[list[Tensor], list[Tensor]]
Shapes = Sequence[tuple[int, ...]]

#: Compiling takes about 0.04 s per tensor.
_MOST_COMPILED = 200
#: Relative errors allowed for PyTorch norms, and to those that are no baseline.
_STOCK_ERROR = 0.01
_INEXACT_ERROR = 0.1


class ListWork(Work):
    """Work on a list of tensors of these shapes."""

    def __init__(self, name: str, shapes: Shapes, device: torch.device, *dtypes: torch.dtype) -> None:
        super().__init__(name, device, *dtypes)
        self.shapes = shapes
        self.tensors = len(shapes)
        self.elements = sum(map(math.prod, shapes))
        self.sizes = f"{self.tensors} tensor{'s' if self.tensors != 1 else ''}, {self.elements} elements"

    def filled(self, dtype: torch.dtype) -> list[Tensor]:
        return [filled(shape, dtype, self.device) for shape in self.shapes]


class Additions(ListWork):
    """`accumulator += SCALE * gradient` for tensors of these shapes. compiled: also measure torch.compile."""

    what = "add"

    def __init__(
        self,
        name: str,
        shapes: Shapes,
        dtypes: Pair,
        device: torch.device,
        *,
        warm: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__(name, shapes, device, *dtypes)
        self.warm = warm
        self.compiled = compiled
        gradients, sums = (self.elements * dtype.itemsize for dtype in dtypes)
        self.set_bytes = gradients + sums
        self.moved = gradients + 2 * sums
        # A clone, kept casts, and autograd's casts of all gradients at once; blocks in float64.
        self.working_bytes = 3 * sums + 48 * min(self.elements, BLOCK)

    def make(self) -> Lists:
        return self.filled(self.accumulator), self.filled(self.gradient)

    def variants(self, backends: Sequence[str]) -> list[BenchVariant]:
        def fresh(accumulators: list[Tensor], gradients: list[Tensor], backend: str) -> None:
            scale_accumulate_(list(accumulators), list(gradients), SCALE, backend=backend)

        of_ours = []
        for backend in backends:
            of_ours += [
                BenchVariant(label("prepared", backend), OURS, functools.partial(_prepared, backend), SCALE),
                ours("fresh lists", backend, fresh, SCALE),
            ]
        same = "the dtypes are equal: nothing to cast" if self.gradient == self.accumulator else None
        wide = computation_dtype(self.accumulator)
        cast_add = pair_by_pair(lambda a, g: a.add_(g.to(a.dtype), alpha=SCALE))
        return [
            *of_ours,
            stock("acc.add_(g)", pair_by_pair(Tensor.add_)),
            stock("acc.add_(g, alpha=s)", pair_by_pair(lambda a, g: a.add_(g, alpha=SCALE)), SCALE),
            stock("torch._foreach_add_(accs, gs)", torch._foreach_add_),
            stock("torch._foreach_add_(accs, gs, alpha=s)", _foreach_alpha, SCALE),
            stock("acc.add_(g.to(acc.dtype), alpha=s)", cast_add, SCALE, same),
            stock("torch._foreach_copy_ to casts, _foreach_add_", self._foreach_cast, SCALE, same),
            stock(
                f"acc += g.to({dtype_name(wide)}) * s",
                pair_by_pair(lambda a, g: a.add_(g.to(wide) * SCALE)),
                SCALE,
            ),
            BenchVariant("autograd into .grad", STOCK, _autograd, obstacle=self.grad_dtype_obstacle()),
            BenchVariant("torch.compile of _foreach_add_", STOCK, _compiled, SCALE, self._not_compiled()),
        ]

    def _not_compiled(self) -> str | None:
        if not self.compiled:
            return "compiling takes too long for this case"
        too_long = f"lists of more than {_MOST_COMPILED} tensors take too long to compile"
        return too_long if self.tensors > _MOST_COMPILED else None

    @functools.cached_property
    def _casts(self) -> list[Tensor]:
        return [torch.empty(shape, dtype=self.accumulator, device=self.device) for shape in self.shapes]

    def _foreach_cast(self, accumulators: list[Tensor], gradients: list[Tensor]) -> None:
        torch._foreach_copy_(self._casts, gradients)
        _foreach_alpha(accumulators, self._casts)

    def check(self, variant: BenchVariant, run: Run, tensors: Lists) -> str | None:
        """Allow one unit in the last place of the larger term: some variants round the product first."""
        accumulators, gradients = tensors
        before = [accumulator.clone() for accumulator in accumulators]
        run()
        eps = torch.finfo(self.accumulator).eps
        share = 2 * eps + torch.finfo(computation_dtype(self.accumulator)).eps
        bad = 0
        for old, gradient, result in zip(*map(_blocks, (before, gradients, accumulators)), strict=True):
            product = gradient.double().mul_(variant.scale)
            expected = old.double()
            allowed = torch.maximum(expected.abs(), product.abs()).mul_(share)
            bad += off(expected.add_(product).sub_(result).abs_(), allowed)
        return wrong(bad, self.elements)


class Norms(ListWork):
    """The 2-norm over tensors of these shapes, as for clipping."""

    what = "norm"

    def __init__(self, name: str, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(name, shapes, device, dtype)
        self.set_bytes = self.elements * dtype.itemsize
        self.moved = self.set_bytes
        # One flat copy, and float32 copies of all tensors.
        self.working_bytes = self.elements * (dtype.itemsize + 4) + 16 * min(self.elements, BLOCK)

    def make(self) -> tuple[list[Tensor]]:
        return (self.filled(self.gradient),)

    def variants(self, backends: Sequence[str]) -> list[BenchVariant]:
        narrow = f"norms rounded to {self.dtypes}" if self.gradient.itemsize < 4 else None
        norm = torch.linalg.vector_norm
        f32 = torch.float32
        return [
            *(ours("total_norm", backend, total_norm) for backend in backends),
            stock(
                "torch._foreach_norm, stack, norm",
                lambda tensors: norm(torch.stack(torch._foreach_norm(tensors))),
                inexact=narrow,
            ),
            stock(
                "torch._foreach_norm(dtype=float32), stack, norm",
                lambda tensors: norm(torch.stack(torch._foreach_norm(tensors, dtype=f32))),
                obstacle=None if narrow else "the dtype is wide already",
            ),
            stock("torch.nn.utils.get_total_norm", torch.nn.utils.get_total_norm, inexact=narrow),
            stock(
                "vector_norm of each, stack, norm",
                lambda tensors: norm(torch.stack([norm(tensor, dtype=f32) for tensor in tensors])),
            ),
            stock(
                "square root of the sum of g.square().sum()",
                lambda tensors: torch.stack([t.float().square().sum() for t in tensors]).sum().sqrt(),
            ),
            stock(
                "torch.cat, norm",
                lambda tensors: norm(torch.cat([tensor.view(-1) for tensor in tensors]), dtype=f32),
                inexact="one sum in float32 over all elements",
            ),
            BenchVariant(
                "g.sum() of each: a read, no norm",
                YARDSTICK,
                calling(lambda tensors: [tensor.sum() for tensor in tensors]),
            ),
        ]

    def check(self, variant: BenchVariant, run: Run, tensors: tuple[list[Tensor]]) -> str | None:
        """Allow ours a few roundings.

        Stock sums squares in float32 in another order, which is off by a thousandth for tens of millions of
        elements in one tensor. That is noted, not wrong.
        """
        result = run()
        assert isinstance(result, Tensor)
        expected = math.sqrt(sum(float(part.double().square_().sum()) for part in _blocks(*tensors)))
        value = float(result)
        roundings = 16 * torch.finfo(torch.float32).eps
        error = abs(value - expected)
        of_stock = _INEXACT_ERROR if variant.inexact else _STOCK_ERROR
        allowed = roundings if variant.role == OURS else of_stock
        if not error <= allowed * expected:
            return f"the norm is {value!r} instead of {expected!r}"
        if error > roundings * expected:
            self.notes[variant.name] = f"off by {error / expected:.1g}"
        return None


def _blocks(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [block for tensor in tensors for block in tensor.view(-1).split(BLOCK)]


def _prepared(backend: str, tensors: Lists) -> Run:
    return functools.partial(prepare(tensors[0], backend=backend), tensors[1], SCALE)


def pair_by_pair(step: Callable[[Tensor, Tensor], object]) -> Callable[[list[Tensor], list[Tensor]], None]:
    """Return a function that calls `step` for each pair of tensors."""

    def run(accumulators: list[Tensor], gradients: list[Tensor]) -> None:
        for accumulator, gradient in zip(accumulators, gradients, strict=True):
            step(accumulator, gradient)

    return run


def _foreach_alpha(accumulators: list[Tensor], gradients: list[Tensor]) -> None:
    torch._foreach_add_(accumulators, gradients, alpha=SCALE)


def _autograd(tensors: Lists) -> Run:
    """Parameters whose `.grad` is the accumulator, each in a separate graph."""
    accumulators, gradients = tensors
    # The gradients serve as the parameters' values, which are never read.
    parameters = [parameter_with(g, a) for a, g in zip(accumulators, gradients, strict=True)]
    return lambda: torch.autograd.backward(parameters, gradients)


def _compiled(tensors: Lists) -> Run:
    torch.compiler.reset()  # forget what other cases have compiled
    return calling(torch.compile(_foreach_alpha, dynamic=False))(tensors)


# The cases: sizes and dtypes, by how much is to be measured

_F32 = torch.float32
_BF16 = torch.bfloat16
_F16 = torch.float16
_MI = 2**20

#: Gradient and accumulator.
PAIRS: tuple[Pair, ...] = ((_F32, _F32), (_BF16, _F32))
OTHER_PAIRS: tuple[Pair, ...] = ((_F16, _F32), (_BF16, _BF16))

_SINGLE_TENSORS: dict[str, Shapes] = {"64 Ki elements": ((2**16,),), "16 Mi elements": ((16 * _MI,),)}
_LARGE_TENSORS: dict[str, Shapes] = {"64 Mi elements": ((64 * _MI,),)}
_SMALL_TENSORS: dict[str, Shapes] = {"1000 tensors of 1000": ((1000,),) * 1000}
_TINY_TENSORS: dict[str, Shapes] = {"300 tensors of 16 x 16": ((16, 16),) * 300}


def cases_of(effort: str, device: torch.device) -> Iterator[Work]:
    """Yield the cases of a "short" or "full" run."""
    full = effort == "full"
    listed = _SINGLE_TENSORS | _SMALL_TENSORS
    if full or device.type == "cuda":
        listed |= _LARGE_TENSORS
    if full:
        listed |= _TINY_TENSORS
    for name, shapes in listed.items():
        for pair in (*PAIRS, *(OTHER_PAIRS if full else ())):
            yield Additions(name, shapes, pair, device, compiled=full and pair in PAIRS)
            if full and pair in PAIRS and name in (_SMALL_TENSORS | _TINY_TENSORS):
                yield Additions(name, shapes, pair, device, warm=True)
    for name in ("16 Mi elements", "1000 tensors of 1000"):
        for dtype in (_F32, _BF16) if full else (_F32,):
            yield Norms(name, listed[name], dtype, device)
