"""Ways to take the norm of all elements of a list of tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...functional import total_norm
from ...kernels import registry
from .work import BLOCK, OURS, STOCK, YARDSTICK, Run, Way, Work, counted, filled, label, name_of

#: What a norm of stock may be off by, relatively, and one that is no baseline.
_STOCK_ERROR, _INEXACT_ERROR = 0.01, 0.1


class Norms(Work):
    """The 2-norm over tensors of those shapes: what clipping needs."""

    what = "norm"

    def __init__(
        self,
        name: str,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.name, self.shapes, self.dtype, self.device = name, shapes, dtype, device
        self.dtypes = name_of(dtype)
        self.elements = sum(map(math.prod, shapes))
        self.sizes = counted(shapes)

    @property
    def set_bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def moved(self) -> int:
        return self.set_bytes

    @property
    def working_bytes(self) -> int:
        # One flat copy, and float32 copies of all tensors.
        return self.elements * (self.dtype.itemsize + 4) + 16 * min(self.elements, BLOCK)

    def make(self) -> list[Tensor]:
        return [filled(shape, self.dtype, self.device) for shape in self.shapes]

    def chosen(self) -> tuple[str, str]:
        found = registry.select(self.device, self.dtype, self.dtype)
        return found.backend.name, found.reason

    def ways(self, backends: Sequence[str]) -> list[Way]:
        narrow = f"norms rounded to {self.dtypes}" if self.dtype.itemsize < 4 else None
        wide = None if narrow else "the dtype is wide already"
        norm = torch.linalg.vector_norm
        return [
            *(Way(label("total_norm", name), OURS, functools.partial(_ours, name)) for name in backends),
            Way(
                "torch._foreach_norm, stack, norm",
                STOCK,
                _of(lambda tensors: norm(torch.stack(torch._foreach_norm(tensors)))),
                inexact=narrow,
            ),
            Way(
                "torch._foreach_norm(dtype=float32), stack, norm",
                STOCK,
                _of(lambda tensors: norm(torch.stack(_foreach_wide(tensors)))),
                obstacle=wide,
            ),
            Way(
                "torch.nn.utils.get_total_norm",
                STOCK,
                _of(torch.nn.utils.get_total_norm),
                inexact=narrow,
            ),
            Way(
                "vector_norm of each, stack, norm",
                STOCK,
                _of(lambda tensors: norm(torch.stack([norm(t, dtype=torch.float32) for t in tensors]))),
            ),
            Way(
                "square root of the sum of g.square().sum()",
                STOCK,
                _of(lambda tensors: torch.stack([t.float().square().sum() for t in tensors]).sum().sqrt()),
            ),
            Way(
                "torch.cat, norm",
                STOCK,
                _of(lambda tensors: norm(torch.cat([t.view(-1) for t in tensors]), dtype=torch.float32)),
                inexact="one sum in float32 over all elements",
            ),
            Way("g.sum() of each: a read, no norm", YARDSTICK, _of(lambda ts: [t.sum() for t in ts])),
        ]

    def check(self, way: Way, run: Run, tensors: list[Tensor]) -> str | None:
        """Ours is held to a few roundings. Stock adds squares up in float32, in its own order, which puts it
        off by a thousandth for tens of millions of elements in one tensor: that is noted, and not wrong."""
        found = run()
        if way.role == YARDSTICK:
            return None
        assert isinstance(found, Tensor)
        blocks = [part for tensor in tensors for part in tensor.view(-1).split(BLOCK)]
        expected = math.sqrt(sum(float(part.double().square_().sum()) for part in blocks))
        value, roundings = float(found), 16 * torch.finfo(torch.float32).eps
        error = abs(value - expected)
        stock = _INEXACT_ERROR if way.inexact else _STOCK_ERROR
        allowed = roundings if way.role == OURS else stock
        if not error <= allowed * expected:
            return f"the norm is {value!r} instead of {expected!r}"
        if error > roundings * expected:
            self.notes[way.name] = f"off by {error / expected:.1g}"
        return None


def _ours(backend: str, tensors: list[Tensor]) -> Run:
    return lambda: total_norm(tensors, backend=backend)


def _foreach_wide(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(tensors, dtype=torch.float32))


def _of(norm: Callable[[list[Tensor]], object]) -> Callable[[list[Tensor]], Run]:
    return lambda tensors: lambda: norm(tensors)
