"""Variants that add a layer's weight gradient to its sum: a Linear's product, an Embedding's rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import matmul
from ...kernels.dtypes import dtype_name
from ...kernels.lists import accumulate_rows_, select_for_rows
from ..measuring.timing import Run
from .work import (
    STOCK,
    BenchVariant,
    Work,
    filled,
    grad_dtype_obstacle,
    off,
    ours,
    parameter_with,
    stock,
    wrong,
)

#: For a product: the sum, the output's gradient and the input. For rows: the table of sums, the tokens and
#: their gradients.
Three = tuple[Tensor, Tensor, Tensor]


class Products(Work):
    """`sum += dy.t() @ x` for a Linear layer and a number of tokens."""

    what = "product"

    def __init__(
        self,
        tokens: int,
        outputs: int,
        inputs: int,
        operand: torch.dtype,
        accumulator: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(f"Linear {inputs} to {outputs}, {tokens} tokens", device, operand, accumulator)
        self.shape = tokens, outputs, inputs
        self.sizes = f"dy {tokens} x {outputs}, x {tokens} x {inputs}, sum {outputs} x {inputs}"
        weights, read = outputs * inputs, tokens * (outputs + inputs) * operand.itemsize
        # Autograd's parameter and output.
        own = (weights + tokens * outputs) * operand.itemsize
        self.set_bytes = read + weights * accumulator.itemsize + own
        self.moved = read + 2 * weights * accumulator.itemsize
        # The float64 reference and its operands; products and casts.
        self.working_bytes = 6 * 8 * weights + 8 * read
        self._expected: tuple[Tensor, Tensor] | None = None

    def make(self) -> Three:
        tokens, outputs, inputs = self.shape
        sums = filled((outputs, inputs), self.accumulator, self.device)
        dy, x = (filled((tokens, size), self.gradient, self.device) for size in (outputs, inputs))
        return sums, dy, x

    def chosen(self) -> tuple[str, str]:
        found = matmul.select(self.device, self.accumulator, self.gradient, tokens=self.shape[0])
        return f"{found.name} ({found.how})", found.reason

    def variants(self, backends: Sequence[str]) -> list[BenchVariant]:
        equal, wide = self.gradient == self.accumulator, self.accumulator
        one = None if equal else "needs operands of the accumulator's dtype"
        mixed = "the dtypes are equal: nothing to cast" if equal else None
        return [
            *(ours("into the sum", backend, matmul.gemm_accumulate_) for backend in backends),
            stock("acc.add_(dy.t() @ x)", lambda acc, dy, x: acc.add_(dy.t() @ x)),
            stock("torch.mm(dy.t(), x, out=kept), acc.add_(kept)", self._add_kept),
            stock(
                "acc.add_((dy.t() @ x).to(acc.dtype))",
                lambda acc, dy, x: acc.add_((dy.t() @ x).to(wide)),
                obstacle=mixed,
            ),
            stock(
                "acc.addmm_(dy.t().to(acc.dtype), x.to(acc.dtype))",
                lambda acc, dy, x: acc.addmm_(dy.t().to(wide), x.to(wide)),
                obstacle=mixed,
            ),
            stock("acc.addmm_(dy.t(), x)", lambda acc, dy, x: acc.addmm_(dy.t(), x), obstacle=one),
            stock(
                "torch.addmm(acc, dy.t(), x, out=acc)",
                lambda acc, dy, x: torch.addmm(acc, dy.t(), x, out=acc),
                obstacle=one,
            ),
            stock(
                "torch.addmm(out_dtype=acc.dtype, out=acc)",
                lambda acc, dy, x: torch.addmm(acc, dy.t(), x, out_dtype=wide, out=acc),
                obstacle=mixed,
            ),
            BenchVariant(
                "autograd of F.linear into .grad",
                STOCK,
                self._autograd,
                obstacle=None if equal else grad_dtype_obstacle(),
            ),
        ]

    @functools.cached_property
    def _kept(self) -> Tensor:
        return torch.empty(self.shape[1:], dtype=self.gradient, device=self.device)

    def _add_kept(self, accumulator: Tensor, dy: Tensor, x: Tensor) -> None:
        torch.mm(dy.t(), x, out=self._kept)
        accumulator.add_(self._kept)

    def _autograd(self, operands: Three) -> Run:
        """Return a backward that computes only the weight's gradient: the input needs none."""
        accumulator, dy, x = operands
        weight = parameter_with(torch.zeros_like(accumulator, dtype=dy.dtype), accumulator)
        output = torch.nn.functional.linear(x, weight)
        return lambda: torch.autograd.backward(output, dy, retain_graph=True)

    def check(self, variant: BenchVariant, run: Run, operands: Three) -> str | None:
        """Allow a float32 rounding per term, and for 16-bit operands two roundings of the product.

        Torch rounds such a product to 16 bits before it can be added.
        """
        accumulator, dy, x = operands
        if self._expected is None:
            left, right = dy.t().double(), x.double()
            self._expected = left @ right, left.abs_() @ right.abs_()
        product, magnitude = self._expected
        before = accumulator.double()
        run()
        terms = (self.shape[0] + 2) * torch.finfo(torch.float32).eps
        if self.gradient.itemsize < 4:
            terms += 2 * torch.finfo(self.gradient).eps
        rounding = 2 * torch.finfo(self.accumulator).eps
        allowed = magnitude * terms + (before.abs() + magnitude) * rounding
        error = before.add_(product).sub_(accumulator).abs_()
        return wrong(off(error, allowed), accumulator.numel())


class Rows(Work):
    """`table[token] += gradient` for each token; the tokens are distributed as in text."""

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
        name = f"Embedding {height} x {columns}, {tokens} tokens"
        super().__init__(name, device, gradient, accumulator)
        self.shape = height, columns, tokens
        self.sizes = f"table {height} x {columns}, gradients {tokens} x {columns}"
        looked_up = columns * tokens
        self.set_bytes = tokens * 8 + looked_up * gradient.itemsize
        self.moved = looked_up * (gradient.itemsize + 2 * accumulator.itemsize)
        # The table, a clone, a dense gradient, its cast and autograd's parameter; rows in float64.
        self.working_bytes = 5 * height * columns * accumulator.itemsize + 6 * 8 * looked_up

    @functools.cached_property
    def _sums(self) -> Tensor:
        return filled(self.shape[:2], self.accumulator, self.device)

    @functools.cached_property
    def _weight(self) -> Tensor:
        return torch.zeros_like(self._sums, dtype=self.gradient)

    def make(self) -> Three:
        """Return tokens and gradients, and the table, which all sets share."""
        height, columns, tokens = self.shape
        gradients = filled((tokens, columns), self.gradient, self.device)
        return self._sums, text_like(tokens, height, self.device), gradients

    def chosen(self) -> tuple[str, str]:
        found = select_for_rows(torch.empty(1, 1, dtype=self.accumulator, device=self.device), self.gradient)
        return found.backend.name, found.reason

    def variants(self, backends: Sequence[str]) -> list[BenchVariant]:
        height, wide = self.shape[0], self.accumulator
        dense = torch.ops.aten.embedding_dense_backward.default
        narrow = f"sums of rows in {dtype_name(self.gradient)}" if self.gradient.itemsize < 4 else None
        return [
            *(ours("rows", backend, accumulate_rows_) for backend in backends),
            stock(
                "acc.index_add_(0, tokens, g)", lambda acc, tokens, g: acc.index_add_(0, tokens, g.to(wide))
            ),
            stock(
                "acc.index_put_((tokens,), g, accumulate=True)",
                lambda acc, tokens, g: acc.index_put_((tokens,), g.to(wide), accumulate=True),
            ),
            stock(
                "acc.add_(sparse gradient)",
                lambda acc, tokens, g: acc.add_(_sparse(tokens, g.to(wide), acc.shape)),
            ),
            stock(
                "acc.add_(dense gradient)",
                lambda acc, tokens, g: acc.add_(dense(g.to(wide), tokens, height, -1, False)),
            ),
            BenchVariant(
                "autograd of F.embedding into .grad",
                STOCK,
                self._autograd,
                obstacle=grad_dtype_obstacle() if narrow else None,
                inexact=narrow,
            ),
        ]

    def _autograd(self, lookup: Three) -> Run:
        accumulator, tokens, gradients = lookup
        output = torch.nn.functional.embedding(tokens, parameter_with(self._weight, accumulator))
        return lambda: torch.autograd.backward(output, gradients, retain_graph=True)

    def check(self, variant: BenchVariant, run: Run, lookup: Three) -> str | None:
        """Allow a rounding per term of a row's sum; rows that are not looked up must keep their bits."""
        accumulator, tokens, gradients = lookup
        named, place, count = torch.unique(tokens, return_inverse=True, return_counts=True)
        before = accumulator.clone()
        run()
        fresh = gradients.double()
        old = before[named].double()
        sums = torch.zeros_like(old).index_add_(0, place, fresh)
        magnitude = torch.zeros_like(old).index_add_(0, place, fresh.abs_()).add_(old.abs())
        inner = torch.finfo(self.gradient if variant.inexact else torch.float32).eps
        terms = (count + 2).double().mul_(inner).add_(2 * torch.finfo(self.accumulator).eps)
        bad = off(old.add_(sums).sub_(accumulator[named]).abs_(), magnitude * terms[:, None])
        before[named] = accumulator[named]
        return wrong(bad + int((before != accumulator).sum()), accumulator.numel())


def text_like(count: int, height: int, device: torch.device) -> Tensor:
    """Return tokens of which the k-th most frequent has a share of about 1/k."""
    ranks = torch.exp(torch.rand(count, device=device) * math.log(height + 1)).long() - 1
    return ranks.clamp_(max=height - 1)


def _sparse(tokens: Tensor, gradients: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(tokens[None], gradients, shape, check_invariants=False)
