"""A whole window of 8 micro-batches with 300 small parameters: what the wrapper costs per parameter.

The graph is as cheap as one can be: one node, whose backward makes all gradients in one call, so that what is
timed is how gradients are taken and added. A stack of small Linear layers beside it is the ordinary case.

    python benchmarks/wrapper_window.py [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from common import RESULTS, Goal, Row, Variant, measure, report
from torch import Tensor, nn

import fusedacc

STEPS = 8
F32, BF16 = torch.float32, torch.bfloat16


class OneNode(torch.autograd.Function):
    """Returns a scalar; its backward hands every parameter a fresh gradient, all made by one foreach call."""

    @staticmethod
    def forward(ctx, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return None, *torch._foreach_mul(ctx.gradients, grad_output.item())


class Bare(nn.Module):
    """`count` parameters of 16 x 16 behind one node."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(count))

    def forward(self) -> Tensor:
        if not hasattr(self, "gradients"):
            self.gradients = [torch.randn_like(weight) for weight in self.weights]
            self.listed = list(self.weights)
        return OneNode.apply(self.gradients, *self.listed)


class Layers(nn.Module):
    """`count` parameters in count/2 Linear layers of width 16, on a batch of 8."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(count // 2)))

    def forward(self) -> Tensor:
        if not hasattr(self, "inputs"):
            self.inputs = torch.randn(8, 16, dtype=self.layers[0].weight.dtype)
        return self.layers(self.inputs).float().square().mean()


def stock(model: nn.Module) -> Callable[[], None]:
    """Plain torch; sums have the parameters' dtype."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, foreach=True)

    def window() -> None:
        for _ in range(STEPS):
            (model() / STEPS).backward()
        optimizer.step()
        optimizer.zero_grad()

    return window


def stock_grad_dtype(model: nn.Module) -> Callable[[], None]:
    """bfloat16 parameters, float32 sums kept by autograd, cast at the update."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-6, foreach=True)

    def window() -> None:
        for parameter in parameters:
            parameter.grad_dtype = F32
        for _ in range(STEPS):
            (model() / STEPS).backward()
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = BF16
            parameter.grad = gradient.to(BF16)
        optimizer.step()
        optimizer.zero_grad()

    return window


def stock_mixed_add(model: nn.Module) -> Callable[[], None]:
    """bfloat16 parameters, float32 sums in a buffer that a hook adds each gradient to, cast at the update."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-6, foreach=True)
    sums = [torch.zeros_like(parameter, dtype=F32) for parameter in parameters]

    def adder(total: Tensor) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            total.add_(parameter.grad)
            parameter.grad = None

        return add

    for parameter, total in zip(parameters, sums, strict=True):
        parameter.register_post_accumulate_grad_hook(adder(total))

    def window() -> None:
        for _ in range(STEPS):
            (model() / STEPS).backward()
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total.to(BF16)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_zero_(sums)

    return window


def wrapped(model: nn.Module, backend: str) -> Callable[[], None]:
    optimizer = fusedacc.AccumulatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-6, foreach=True),
        gradient_accumulation_steps=STEPS,
        backend=backend,
    )

    def window() -> None:
        for _ in range(STEPS):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()

    return window


def figures(quick: bool = False, backend: str = "auto") -> list[Row]:
    """The goals: at most 1.05 times the stock loop's time for float32, no slower for bfloat16."""
    count, rounds = (10, 3) if quick else (300, 41)
    rows = []
    for kind, graph in ((Bare, "one cheap node"), (Layers, "Linear layers")):

        def model(dtype: torch.dtype, kind: type[nn.Module] = kind) -> nn.Module:
            torch.manual_seed(0)
            return kind(count).to(dtype)

        loop = "stock loop"
        rows += measure(
            f"window of {STEPS}, {count} small parameters, {graph}, float32",
            [
                Variant(loop, stock(model(F32))),
                Variant("fusedacc", wrapped(model(F32), backend), 0, (Goal(loop, 1 / 1.05),)),
            ],
            rounds,
        )
        loop, hook = "stock loop, grad_dtype=float32", "stock loop, mixed add_ in a hook"
        rows += measure(
            f"window of {STEPS}, {count} small parameters, {graph}, bfloat16 with float32 sums",
            [
                Variant(loop, stock_grad_dtype(model(BF16))),
                Variant(hook, stock_mixed_add(model(BF16))),
                Variant("fusedacc", wrapped(model(BF16), backend), 0, (Goal(loop, 1.0), Goal(hook, 1.0))),
            ],
            rounds,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few parameters, to try the script: nothing is recorded"
    )
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = figures(options.quick, options.backend)
    report("wrapper_window", rows, None if options.quick else options.results)


if __name__ == "__main__":
    main()
