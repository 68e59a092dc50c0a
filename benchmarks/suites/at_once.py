"""From how many bytes on a gradient is best added at once, on a GPU: windows of one model, by that limit.

    python -m benchmarks.suites.at_once [--model gpt2] [--mebibytes 1,16,32]

bfloat16 parameters behind one cheap node, whose backward hands each a fresh gradient; each way has a limit of
`fusedacc.autograd.python_hooks` of its own. Rows of benchmark "at_once" have the device's time and the
launches.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

import fusedacc
from fusedacc.autograd import python_hooks
from fusedacc.commands.measuring.records import Case, Results, Variant
from fusedacc.commands.measuring.timing import timer_for

from .. import harness
from ..contestants import model_shapes
from ..contestants.loops import window
from ..harness import counted, measure
from .wrapper_window import STEPS, OneNode

ROUNDS = {"quick": 3, "short": 11, "full": 31}
MEBIBYTES = (1, 16, 32)


class Listed(nn.Module):
    """Parameters of these shapes behind one node."""

    def __init__(self, shapes: list[tuple[int, ...]], device: torch.device) -> None:
        super().__init__()
        kind = {"dtype": torch.bfloat16, "device": device}
        self.weights = nn.ParameterList(torch.zeros(shape, **kind) for shape in shapes)
        self.gradients = [torch.full(shape, 1 / 64, **kind) for shape in shapes]
        self.listed = list(self.weights)

    def forward(self) -> torch.Tensor:
        return OneNode.apply(self.gradients, *self.listed)


def at_limit(model: nn.Module, limit: int, device: torch.device) -> Callable[[], None]:
    """A counted window with that limit; hooks read it when they are made."""
    with mock.patch.dict(python_hooks.LARGE_BYTES, {device.type: limit}):
        optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), STEPS)
    return window(optimizer, lambda index: model(), STEPS)


def figures(
    results: Results, effort: str, name: str = "gpt2", mebibytes: tuple[int, ...] = MEBIBYTES
) -> None:
    """One case: a window of `STEPS` micro-batches of the model's list."""
    parameters = model_shapes.load(name)
    if effort == "quick":
        parameters = model_shapes.tiny(parameters)
    shapes = model_shapes.shapes(parameters)
    case = Case("at_once", name, "window", model_shapes.describe(parameters, parameters), "bfloat16")
    variants = []
    for size in mebibytes:
        run = at_limit(Listed(shapes, results.device), size * 2**20, results.device)
        run()
        meter = counted(run)
        variants.append(Variant(f"from {size} MiB", run, meter.total_bytes, (), meter.calls))
    results.add(measure(case, variants, ROUNDS[effort], timer=timer_for(results.device)))


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--model", default="gpt2", help=f"one of {', '.join(model_shapes.NAMES)} (%(default)s)"
    )
    parser.add_argument("--mebibytes", default=",".join(map(str, MEBIBYTES)), help="limits (%(default)s)")
    options = parser.parse_args()
    (name,) = harness.chosen(options.model, model_shapes.NAMES, "model")
    mebibytes = tuple(int(size) for size in options.mebibytes.split(","))
    harness.run(figures, options, name=name, mebibytes=mebibytes)


if __name__ == "__main__":
    main()
