"""Variants that do `accumulator += scale * gradient` over a list of tensors, or take its norm."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...functional import prepare, scale_accumulate_, total_norm
from ...kernels.dtypes import computation_dtype, dtype_name
from ..measuring.timing import Run
from .work import (
    BLOCK,
    OURS,
    STOCK,
    YARDSTICK,
    BenchVariant,
    Work,
    calling,
    filled,
    grad_dtype_obstacle,
    label,
    off,
    ours,
    parameter_with,
    stock,
    wrong,
)

SCALE = 0.125

#: Accumulators and gradients.
Lists = tuple[list[Tensor], list[Tensor]]
Shapes = Sequence[tuple[int, ...]]

#: Compiling takes about 0.04 s per tensor.
_MOST_COMPILED = 200
#: Relative errors allowed for PyTorch norms, and to those that are no baseline.
_STOCK_ERROR, _INEXACT_ERROR = 0.01, 0.1


class Additions(Work):
    """`accumulator += SCALE * gradient` for tensors of these shapes. compiled: also measure torch.compile."""

    what = "add"

    def __init__(
        self,
        name: str,
        shapes: Shapes,
        gradient: torch.dtype,
        accumulator: torch.dtype,
        device: torch.device,
        *,
        warm: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__(name, device, gradient, accumulator)
        self.shapes, self.warm, self.compiled = shapes, warm, compiled
        self.tensors, self.elements, self.sizes = _counted(shapes)
        self.set_bytes = self.elements * (gradient.itemsize + accumulator.itemsize)
        self.moved = self.set_bytes + self.elements * accumulator.itemsize
        # A clone, kept casts, and autograd's casts of all gradients at once; blocks in float64.
        self.working_bytes = 3 * self.elements * accumulator.itemsize + 48 * min(self.elements, BLOCK)

    def make(self) -> Lists:
        return (
            [filled(shape, self.accumulator, self.device) for shape in self.shapes],
            [filled(shape, self.gradient, self.device) for shape in self.shapes],
        )

    def variants(self, backends: Sequence[str]) -> list[BenchVariant]:
        of_ours = []
        for backend in backends:
            of_ours += [
                BenchVariant(label("prepared", backend), OURS, functools.partial(_prepared, backend), SCALE),
                ours("fresh lists", backend, _fresh_lists, SCALE),
            ]
        same = "the dtypes are equal: nothing to cast" if self.gradient == self.accumulator else None
        wide = computation_dtype(self.accumulator)
        cast_add = _each(lambda a, g: a.add_(g.to(a.dtype), alpha=SCALE))
        return [
            *of_ours,
            stock("acc.add_(g)", _each(Tensor.add_)),
            stock("acc.add_(g, alpha=s)", _each(lambda a, g: a.add_(g, alpha=SCALE)), SCALE),
            stock("torch._foreach_add_(accs, gs)", torch._foreach_add_),
            stock("torch._foreach_add_(accs, gs, alpha=s)", _foreach_alpha, SCALE),
            stock("acc.add_(g.to(acc.dtype), alpha=s)", cast_add, SCALE, same),
            stock("torch._foreach_copy_ to casts, _foreach_add_", self._foreach_cast, SCALE, same),
            stock(
                f"acc += g.to({dtype_name(wide)}) * s", _each(lambda a, g: a.add_(g.to(wide) * SCALE)), SCALE
            ),
            BenchVariant(
                "autograd into .grad", STOCK, _autograd, obstacle=None if same else grad_dtype_obstacle()
            ),
            BenchVariant("torch.compile of _foreach_add_", STOCK, _compiled, SCALE, self._not_compiled()),
        ]

    def _not_compiled(self) -> str | None:
        if not self.compiled:
            return "compiling takes too long for this case"
        if len(self.shapes) > _MOST_COMPILED:
            return f"lists of more than {_MOST_COMPILED} tensors take too long to compile"
        return None

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
        for old, gradient, found in zip(*map(_blocks, (before, gradients, accumulators)), strict=True):
            product = gradient.double().mul_(variant.scale)
            expected = old.double()
            allowed = torch.maximum(expected.abs(), product.abs()).mul_(share)
            bad += off(expected.add_(product).sub_(found).abs_(), allowed)
        return wrong(bad, self.elements)


class Norms(Work):
    """The 2-norm over tensors of these shapes, as for clipping."""

    what = "norm"

    def __init__(self, name: str, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(name, device, dtype)
        self.shapes = shapes
        self.tensors, elements, self.sizes = _counted(shapes)
        self.set_bytes = self.moved = elements * dtype.itemsize
        # One flat copy, and float32 copies of all tensors.
        self.working_bytes = elements * (dtype.itemsize + 4) + 16 * min(elements, BLOCK)

    def make(self) -> tuple[list[Tensor]]:
        return ([filled(shape, self.gradient, self.device) for shape in self.shapes],)

    def variants(self, backends: Sequence[str]) -> list[BenchVariant]:
        narrow = f"norms rounded to {self.dtypes}" if self.gradient.itemsize < 4 else None
        norm, f32 = torch.linalg.vector_norm, torch.float32
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
        found = run()
        assert isinstance(found, Tensor)
        expected = math.sqrt(sum(float(part.double().square_().sum()) for part in _blocks(*tensors)))
        value, roundings = float(found), 16 * torch.finfo(torch.float32).eps
        error = abs(value - expected)
        of_stock = _INEXACT_ERROR if variant.inexact else _STOCK_ERROR
        allowed = roundings if variant.role == OURS else of_stock
        if not error <= allowed * expected:
            return f"the norm is {value!r} instead of {expected!r}"
        if error > roundings * expected:
            self.notes[variant.name] = f"off by {error / expected:.1g}"
        return None


def _counted(shapes: Shapes) -> tuple[int, int, str]:
    """Return the numbers of tensors and elements, and both in words."""
    tensors, elements = len(shapes), sum(map(math.prod, shapes))
    return tensors, elements, f"{tensors} tensor{'s' if tensors != 1 else ''}, {elements} elements"


def _blocks(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [block for tensor in tensors for block in tensor.view(-1).split(BLOCK)]


def _prepared(backend: str, tensors: Lists) -> Run:
    accumulators, gradients = tensors
    plan = prepare(accumulators, backend=backend)
    return lambda: plan(gradients, SCALE)


def _fresh_lists(accumulators: list[Tensor], gradients: list[Tensor], backend: str) -> None:
    scale_accumulate_(list(accumulators), list(gradients), SCALE, backend=backend)


def _each(step: Callable[[Tensor, Tensor], object]) -> Callable[[list[Tensor], list[Tensor]], None]:
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
    torch._dynamo.reset()  # forget what other cases have compiled
    return calling(torch.compile(_foreach_alpha, dynamic=False))(tensors)
