"""Ways to add a Linear's weight gradient, a product, into its sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...kernels import matmul
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

#: The sum, the output's gradient and the input.
Operands = tuple[Tensor, Tensor, Tensor]


class Products(Work):
    """`sum += dy.t() @ x` for a Linear of `inputs` to `outputs` features and so many tokens."""

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
        super().__init__()
        self.shape, self.device = (tokens, outputs, inputs), device
        self.operand, self.accumulator = operand, accumulator
        self.name = f"Linear {inputs} to {outputs}, {tokens} tokens"
        self.dtypes = f"{name_of(operand)} into {name_of(accumulator)}"
        self.sizes = f"dy {tokens} x {outputs}, x {tokens} x {inputs}, sum {outputs} x {inputs}"
        self._buffer: Tensor | None = None
        self._expected: tuple[Tensor, Tensor] | None = None

    @property
    def _operand_bytes(self) -> int:
        tokens, outputs, inputs = self.shape
        return tokens * (outputs + inputs) * self.operand.itemsize

    @property
    def _weights(self) -> int:
        return self.shape[1] * self.shape[2]

    @property
    def set_bytes(self) -> int:
        tokens, outputs, _ = self.shape
        # With autograd's parameter and output.
        own = (self._weights + tokens * outputs) * self.operand.itemsize
        return self._operand_bytes + self._weights * self.accumulator.itemsize + own

    @property
    def moved(self) -> int:
        return self._operand_bytes + 2 * self._weights * self.accumulator.itemsize

    @property
    def working_bytes(self) -> int:
        # The reference in float64 and what it is made of; products and casts.
        return 6 * 8 * self._weights + 8 * self._operand_bytes

    def make(self) -> Operands:
        tokens, outputs, inputs = self.shape
        return (
            filled((outputs, inputs), self.accumulator, self.device),
            filled((tokens, outputs), self.operand, self.device),
            filled((tokens, inputs), self.operand, self.device),
        )

    def chosen(self) -> tuple[str, str]:
        found = matmul.select(self.device, self.accumulator, self.operand, tokens=self.shape[0])
        return f"{found.name} ({found.how})", found.reason

    def ways(self, backends: Sequence[str]) -> list[Way]:
        equal = self.operand == self.accumulator
        one = None if equal else "needs operands of the accumulator's dtype"
        mixed = "the dtypes are equal: nothing to cast" if equal else None
        return [
            *(Way(label("into the sum", name), OURS, functools.partial(_ours, name)) for name in backends),
            Way("acc.add_(dy.t() @ x)", STOCK, _from(lambda acc, dy, x: acc.add_(dy.t() @ x))),
            Way(
                "torch.mm(dy.t(), x, out=kept), acc.add_(kept)",
                STOCK,
                self._kept,
            ),
            Way(
                "acc.add_((dy.t() @ x).to(acc.dtype))",
                STOCK,
                _from(lambda acc, dy, x: acc.add_((dy.t() @ x).to(acc.dtype))),
                obstacle=mixed,
            ),
            Way(
                "acc.addmm_(dy.t().to(acc.dtype), x.to(acc.dtype))",
                STOCK,
                _from(lambda acc, dy, x: acc.addmm_(dy.t().to(acc.dtype), x.to(acc.dtype))),
                obstacle=mixed,
            ),
            Way(
                "acc.addmm_(dy.t(), x)", STOCK, _from(lambda acc, dy, x: acc.addmm_(dy.t(), x)), obstacle=one
            ),
            Way(
                "torch.addmm(acc, dy.t(), x, out=acc)",
                STOCK,
                _from(lambda acc, dy, x: torch.addmm(acc, dy.t(), x, out=acc)),
                obstacle=one,
            ),
            Way("torch.addmm(out_dtype=acc.dtype, out=acc)", STOCK, _from(_addmm_wide), obstacle=mixed),
            Way(
                "autograd of F.linear into .grad",
                STOCK,
                _autograd,
                obstacle=None if equal else grad_dtype_obstacle(),
            ),
        ]

    def _kept(self, operands: Operands) -> Run:
        accumulator, dy, x = operands
        if self._buffer is None:
            self._buffer = torch.empty_like(accumulator, dtype=self.operand)
        kept = self._buffer

        def run() -> None:
            torch.mm(dy.t(), x, out=kept)
            accumulator.add_(kept)

        return run

    def check(self, way: Way, run: Run, operands: Operands) -> str | None:
        """Held to a rounding of each term of the sums in float32, and where operands are of 16 bits to two
        of the product in their dtype: torch rounds it so before anybody can add it."""
        accumulator, dy, x = operands
        if self._expected is None:
            left, right = dy.t().double(), x.double()
            self._expected = left @ right, left.abs_() @ right.abs_()
        product, magnitude = self._expected
        before = accumulator.double()
        run()
        terms = (self.shape[0] + 2) * torch.finfo(torch.float32).eps
        if self.operand.itemsize < 4:
            terms += 2 * torch.finfo(self.operand).eps
        rounding = 2 * torch.finfo(self.accumulator).eps
        allowed = magnitude * terms + (before.abs() + magnitude) * rounding
        error = before.add_(product).sub_(accumulator).abs_()
        return wrong(int((~(error <= allowed)).sum()), self._weights)


def _ours(backend: str, operands: Operands) -> Run:
    return lambda: matmul.gemm_accumulate_(*operands, backend=backend)


def _from(step: Callable[[Tensor, Tensor, Tensor], object]) -> Callable[[Operands], Run]:
    return lambda operands: lambda: step(*operands)


def _addmm_wide(accumulator: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return torch.addmm(accumulator, dy.t(), x, out_dtype=accumulator.dtype, out=accumulator)


def _autograd(operands: Operands) -> Run:
    """A backward that makes the weight's gradient alone: the input needs none."""
    accumulator, dy, x = operands
    weight = parameter_with(torch.zeros_like(accumulator, dtype=dy.dtype), accumulator)
    output = torch.nn.functional.linear(x, weight)
    return lambda: torch.autograd.backward(output, dy, retain_graph=True)
