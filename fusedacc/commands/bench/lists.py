"""Ways to do `accumulator += scale * gradient` over a list of tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...functional import prepare, scale_accumulate_
from ...kernels import registry
from ...kernels.dtypes import computation_dtype
from .work import (
    BLOCK,
    OURS,
    STOCK,
    Run,
    Way,
    Work,
    counted,
    filled,
    grad_dtype_obstacle,
    label,
    name_of,
    parameter_with,
    wrong,
)

SCALE = 0.125

#: Accumulators and gradients.
Lists = tuple[list[Tensor], list[Tensor]]
Shapes = Sequence[tuple[int, ...]]

#: Compiling takes about 0.04 s per tensor.
_MOST_COMPILED = 200


class Additions(Work):
    """`accumulator += SCALE * gradient` for tensors of those shapes.

    Args:
        compiled: whether a compiled form is measured too.
    """

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
        super().__init__()
        self.name, self.shapes, self.device, self.warm = name, shapes, device, warm
        self.gradient, self.accumulator, self.compiled = gradient, accumulator, compiled
        self.dtypes = f"{name_of(gradient)} into {name_of(accumulator)}"
        self.elements = sum(map(math.prod, shapes))
        self.sizes = counted(shapes)
        self._casts: list[Tensor] = []

    @property
    def set_bytes(self) -> int:
        return self.elements * (self.gradient.itemsize + self.accumulator.itemsize)

    @property
    def moved(self) -> int:
        return self.elements * (self.gradient.itemsize + 2 * self.accumulator.itemsize)

    @property
    def working_bytes(self) -> int:
        # A clone, casts that are kept, and autograd's casts of all gradients at once; blocks in float64.
        return 3 * self.elements * self.accumulator.itemsize + 48 * min(self.elements, BLOCK)

    def make(self) -> Lists:
        return (
            [filled(shape, self.accumulator, self.device) for shape in self.shapes],
            [filled(shape, self.gradient, self.device) for shape in self.shapes],
        )

    def chosen(self) -> tuple[str, str]:
        found = registry.select(self.device, self.accumulator, self.gradient)
        return found.backend.name, found.reason

    def ways(self, backends: Sequence[str]) -> list[Way]:
        ours = []
        for backend in backends:
            plan = functools.partial(_prepared, backend)
            fresh = functools.partial(_fresh_lists, backend)
            ours += [
                Way(label("prepared", backend), OURS, plan, SCALE),
                Way(label("fresh lists", backend), OURS, fresh, SCALE),
            ]
        same = "the dtypes are equal: nothing to cast" if self.gradient == self.accumulator else None
        wide = computation_dtype(self.accumulator)
        return [
            *ours,
            Way("acc.add_(g)", STOCK, _each(lambda a, g: a.add_(g))),
            Way("acc.add_(g, alpha=s)", STOCK, _each(lambda a, g: a.add_(g, alpha=SCALE)), SCALE),
            Way("torch._foreach_add_(accs, gs)", STOCK, _foreach),
            Way("torch._foreach_add_(accs, gs, alpha=s)", STOCK, _foreach_alpha, SCALE),
            Way(
                "acc.add_(g.to(acc.dtype), alpha=s)",
                STOCK,
                _each(lambda a, g: a.add_(g.to(a.dtype), alpha=SCALE)),
                SCALE,
                same,
            ),
            Way("torch._foreach_copy_ to casts, _foreach_add_", STOCK, self._foreach_cast, SCALE, same),
            Way(
                f"acc += g.to({name_of(wide)}) * s",
                STOCK,
                _each(lambda a, g: a.add_(g.to(wide) * SCALE)),
                SCALE,
            ),
            Way("autograd into .grad", STOCK, _autograd, obstacle=None if same else grad_dtype_obstacle()),
            Way("torch.compile of _foreach_add_", STOCK, _compiled, SCALE, self._not_compiled()),
        ]

    def _not_compiled(self) -> str | None:
        if not self.compiled:
            return "compiling takes too long for this case"
        if len(self.shapes) > _MOST_COMPILED:
            return f"lists of more than {_MOST_COMPILED} tensors take too long to compile"
        return None

    def _foreach_cast(self, tensors: Lists) -> Run:
        accumulators, gradients = tensors
        if not self._casts:
            self._casts = [torch.empty_like(accumulator) for accumulator in accumulators]

        def run() -> None:
            torch._foreach_copy_(self._casts, gradients)
            torch._foreach_add_(accumulators, self._casts, alpha=SCALE)

        return run

    def check(self, way: Way, run: Run, tensors: Lists) -> str | None:
        """An element may be off by one unit in the last place of the larger term: some forms round the
        product before they add it."""
        accumulators, gradients = tensors
        before = [accumulator.clone() for accumulator in accumulators]
        run()
        eps = torch.finfo(self.accumulator).eps
        share = 2 * eps + torch.finfo(computation_dtype(self.accumulator)).eps
        bad = 0
        for blocks in zip(*(map(_blocks, each) for each in (before, gradients, accumulators)), strict=True):
            for old, gradient, found in zip(*blocks, strict=True):
                product = gradient.double().mul_(way.scale)
                expected = old.double()
                allowed = torch.maximum(expected.abs(), product.abs()).mul_(share)
                error = expected.add_(product).sub_(found).abs_()
                bad += int((~(error <= allowed)).sum())
        return wrong(bad, self.elements)


def _blocks(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.view(-1).split(BLOCK)


def _prepared(backend: str, tensors: Lists) -> Run:
    accumulators, gradients = tensors
    plan = prepare(accumulators, backend=backend)
    return lambda: plan(gradients, SCALE)


def _fresh_lists(backend: str, tensors: Lists) -> Run:
    accumulators, gradients = tensors
    return lambda: scale_accumulate_(list(accumulators), list(gradients), SCALE, backend=backend)


def _each(step: Callable[[Tensor, Tensor], object]) -> Callable[[Lists], Run]:
    """A step for each pair of tensors."""

    def make(tensors: Lists) -> Run:
        accumulators, gradients = tensors

        def run() -> None:
            for accumulator, gradient in zip(accumulators, gradients, strict=True):
                step(accumulator, gradient)

        return run

    return make


def _foreach(tensors: Lists) -> Run:
    accumulators, gradients = tensors
    return lambda: torch._foreach_add_(accumulators, gradients)


def _foreach_alpha(tensors: Lists) -> Run:
    accumulators, gradients = tensors
    return lambda: torch._foreach_add_(accumulators, gradients, alpha=SCALE)


def _autograd(tensors: Lists) -> Run:
    """Parameters whose `.grad` is the accumulator, each a whole graph by itself."""
    accumulators, gradients = tensors
    # The parameters' values, which are never read, are the gradients.
    parameters = [parameter_with(g, a) for a, g in zip(accumulators, gradients, strict=True)]
    return lambda: torch.autograd.backward(parameters, gradients)


def _add_all(accumulators: list[Tensor], gradients: list[Tensor]) -> None:
    torch._foreach_add_(accumulators, gradients, alpha=SCALE)


def _compiled(tensors: Lists) -> Run:
    accumulators, gradients = tensors
    torch._dynamo.reset()  # what other cases have compiled counts for no recompilation
    step = torch.compile(_add_all, dynamic=False)
    return lambda: step(accumulators, gradients)
