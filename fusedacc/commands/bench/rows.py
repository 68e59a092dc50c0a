"""Ways to add an Embedding's weight gradient, the rows that were looked up, into its sum."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...kernels import rows
from .work import (
    OURS,
    STOCK,
    Run,
    Way,
    Work,
    filled,
    grad_dtype_obstacle,
    label,
    name_of,
    parameter_with,
    wrong,
)

#: The table of sums, the tokens, and the gradients of their rows.
Lookup = tuple[Tensor, Tensor, Tensor]


class Rows(Work):
    """`table[token] += gradient` for each of `tokens` tokens, distributed as in text."""

    what = "rows"

    def __init__(
        self,
        height: int,
        columns: int,
        tokens: int,
        gradient: torch.dtype,
        accumulator: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.shape, self.device = (height, columns, tokens), device
        self.gradient, self.accumulator = gradient, accumulator
        self.name = f"Embedding {height} x {columns}, {tokens} tokens"
        self.dtypes = f"{name_of(gradient)} into {name_of(accumulator)}"
        self.sizes = f"table {height} x {columns}, gradients {tokens} x {columns}"
        self._sums: Tensor | None = None
        self._weight: Tensor | None = None

    @property
    def _table(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def _looked_up(self) -> int:
        return self.shape[1] * self.shape[2]

    @property
    def set_bytes(self) -> int:
        return self.shape[2] * 8 + self._looked_up * self.gradient.itemsize

    @property
    def moved(self) -> int:
        return self._looked_up * (self.gradient.itemsize + 2 * self.accumulator.itemsize)

    @property
    def working_bytes(self) -> int:
        # The table, a clone, a dense gradient, its cast and autograd's parameter; rows in float64.
        return 5 * self._table * self.accumulator.itemsize + 6 * 8 * self._looked_up

    def make(self) -> Lookup:
        """Tokens and gradients of their own, and the table that all sets share."""
        height, columns, tokens = self.shape
        if self._sums is None:
            self._sums = filled((height, columns), self.accumulator, self.device)
        # The k-th most frequent token has a share of about 1/k.
        ranks = torch.exp(torch.rand(tokens, device=self.device) * math.log(height + 1)).long() - 1
        return (
            self._sums,
            ranks.clamp_(max=height - 1),
            filled((tokens, columns), self.gradient, self.device),
        )

    def chosen(self) -> tuple[str, str]:
        found = rows.select(torch.empty(1, 1, dtype=self.accumulator, device=self.device), self.gradient)
        return found.backend.name, found.reason

    def ways(self, backends: Sequence[str]) -> list[Way]:
        height = self.shape[0]
        dense = torch.ops.aten.embedding_dense_backward.default
        narrow = f"sums of rows in {name_of(self.gradient)}" if self.gradient.itemsize < 4 else None
        wide = self.accumulator
        return [
            *(Way(label("rows", name), OURS, functools.partial(_ours, name)) for name in backends),
            Way(
                "acc.index_add_(0, tokens, g)",
                STOCK,
                _from(lambda acc, tokens, g: acc.index_add_(0, tokens, g.to(wide))),
            ),
            Way(
                "acc.index_put_((tokens,), g, accumulate=True)",
                STOCK,
                _from(lambda acc, tokens, g: acc.index_put_((tokens,), g.to(wide), accumulate=True)),
            ),
            Way(
                "acc.add_(sparse gradient)",
                STOCK,
                _from(lambda acc, tokens, g: acc.add_(_sparse(tokens, g.to(wide), acc.shape))),
            ),
            Way(
                "acc.add_(dense gradient)",
                STOCK,
                _from(lambda acc, tokens, g: acc.add_(dense(g.to(wide), tokens, height, -1, False))),
            ),
            Way(
                "autograd of F.embedding into .grad",
                STOCK,
                self._autograd,
                obstacle=grad_dtype_obstacle() if narrow else None,
                inexact=narrow,
            ),
        ]

    def _autograd(self, lookup: Lookup) -> Run:
        accumulator, tokens, gradients = lookup
        if self._weight is None:
            self._weight = torch.zeros_like(accumulator, dtype=gradients.dtype)
        output = torch.nn.functional.embedding(tokens, parameter_with(self._weight, accumulator))
        return lambda: torch.autograd.backward(output, gradients, retain_graph=True)

    def check(self, way: Way, run: Run, lookup: Lookup) -> str | None:
        """Held to a rounding of each term of a row's sum; rows that were not looked up keep their bits."""
        accumulator, tokens, gradients = lookup
        named, place, count = torch.unique(tokens, return_inverse=True, return_counts=True)
        before = accumulator.clone()
        run()
        fresh = gradients.double()
        old = before[named].double()
        sums = torch.zeros_like(old).index_add_(0, place, fresh)
        magnitude = torch.zeros_like(old).index_add_(0, place, fresh.abs_()).add_(old.abs())
        inner = torch.finfo(self.gradient if way.inexact else torch.float32).eps
        terms = (count + 2).double().mul_(inner).add_(2 * torch.finfo(self.accumulator).eps)
        error = old.add_(sums).sub_(accumulator[named]).abs_()
        bad = int((~(error <= magnitude * terms[:, None])).sum())
        before[named] = accumulator[named]
        return wrong(bad + int((before != accumulator).sum()), self._table)


def _ours(backend: str, lookup: Lookup) -> Run:
    return lambda: rows.accumulate_rows_(*lookup, backend=backend)


def _from(step: Callable[[Tensor, Tensor, Tensor], object]) -> Callable[[Lookup], Run]:
    return lambda lookup: lambda: step(*lookup)


def _sparse(tokens: Tensor, gradients: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(tokens[None], gradients, shape, check_invariants=False)
