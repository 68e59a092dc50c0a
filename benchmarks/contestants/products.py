"""A Linear's weight gradient into its sum: the case, the variants that compute it, and the check."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedacc.commands.bench.cases import (
    STOCK,
    BenchVariant,
    Pair,
    Work,
    filled,
    off,
    ours,
    parameter_with,
    stock,
    wrong,
)
from fusedacc.commands.timing import Run
from fusedacc.kernels import matmul

#: The sum, the output's gradient and the input.
Operands = tuple[Tensor, Tensor, Tensor]


class Products(Work):
    """`sum += dy.t() @ x` for a Linear layer and a number of tokens."""

    what = "product"

    def __init__(self, tokens: int, outputs: int, inputs: int, dtypes: Pair, device: torch.device) -> None:
        super().__init__(f"Linear {inputs} to {outputs}, {tokens} tokens", device, *dtypes)
        self.shape = tokens, outputs, inputs
        self.sizes = f"dy {tokens} x {outputs}, x {tokens} x {inputs}, sum {outputs} x {inputs}"
        operand, accumulator = dtypes
        weights = outputs * inputs
        read = tokens * (outputs + inputs) * operand.itemsize
        sums = weights * accumulator.itemsize
        # The last summand: autograd's parameter and output.
        self.set_bytes = read + sums + (weights + tokens * outputs) * operand.itemsize
        self.moved = read + 2 * sums
        # The float64 reference and its operands; products and casts.
        self.working_bytes = 6 * 8 * weights + 8 * read
        self._expected: tuple[Tensor, Tensor] | None = None

    def make(self) -> Operands:
        tokens, outputs, inputs = self.shape
        sums = filled((outputs, inputs), self.accumulator, self.device)
        dy, x = (filled((tokens, size), self.gradient, self.device) for size in (outputs, inputs))
        return sums, dy, x

    def chosen(self) -> tuple[str, str]:
        found = matmul.select(self.device, self.accumulator, self.gradient, tokens=self.shape[0])
        return f"{found.name} ({found.how})", found.reason

    def variants(self, backends: Sequence[str]) -> list[BenchVariant]:
        equal = self.gradient == self.accumulator
        wide = self.accumulator
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
                "autograd of F.linear into .grad", STOCK, self._autograd, obstacle=self.grad_dtype_obstacle()
            ),
        ]

    @functools.cached_property
    def _kept(self) -> Tensor:
        return torch.empty(self.shape[1:], dtype=self.gradient, device=self.device)

    def _add_kept(self, accumulator: Tensor, dy: Tensor, x: Tensor) -> None:
        torch.mm(dy.t(), x, out=self._kept)
        accumulator.add_(self._kept)

    def _autograd(self, operands: Operands) -> Run:
        """Return a backward that computes only the weight's gradient: the input needs none."""
        accumulator, dy, x = operands
        weight = parameter_with(torch.zeros_like(accumulator, dtype=dy.dtype), accumulator)
        output = torch.nn.functional.linear(x, weight)
        return lambda: torch.autograd.backward(output, dy, retain_graph=True)

    def check(self, variant: BenchVariant, run: Run, operands: Operands) -> str | None:
        """Allow a float32 rounding per term, and for 16-bit operands two roundings of the product.

        PyTorch rounds a product of 16-bit operands to 16 bits before it adds the product.
        """
        accumulator, dy, x = operands
        if self._expected is None:
            left = dy.t().double()
            right = x.double()
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
