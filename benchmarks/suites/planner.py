"""The planner's peak against that of real updates, on real architectures: how well `plan` predicts.

Of each architecture, precision and loop: two windows of two micro-batches on fake tensors, and the same for
real, every allocation and release counted as torch's allocator reports it. Memory that libraries take for
themselves, which `plan` adds to both, is in neither.

The goal of each: within 5 % of what was measured.

It needs the packages of requirements-integrations.txt, so `make bench-integrations` runs it, and `make bench`
does not.

    python -m benchmarks.suites.planner [--quick | --full] [--only "GPT-2;T5"]
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

import fusedacc
from fusedacc.commands.measuring.records import Case, Results, Row, at_most, cannot_run, first_line, row
from fusedacc.planner.allocations import Peak
from fusedacc.planner.prediction import Predictor
from fusedacc.planner.training import Batch, recipe_of

from .. import harness
from ..harness import progress
from ..machines.zoo.architectures import Architecture, architectures

#: Micro-batches of a window.
STEPS = 2
#: The share by which a prediction may be off.
TOLERANCE = 0.05
FLOAT32, AUTOCAST, BFLOAT16 = PRECISIONS = ("float32", "autocast", "bfloat16")


@dataclasses.dataclass(frozen=True)
class PlannedLoop:
    """A loop: `make` gives its optimizer; in some precisions only, where it is for these."""

    make: Callable[[nn.Module], Optimizer]
    precisions: tuple[str, ...] = PRECISIONS


def _adamw(model: nn.Module, **how: Any) -> Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, 1e-3, **how)


def _wrapped(model: nn.Module, inside: bool = False, **how: Any) -> Optimizer:
    return fusedacc.AccumulatingOptimizer(_adamw(model), STEPS, model=model if inside else None, **how)


_SHORT = {"master_weights": True, "accumulate_dtype": torch.bfloat16}
LOOPS = {
    "stock": PlannedLoop(_adamw),
    "stock, fused AdamW": PlannedLoop(functools.partial(_adamw, fused=True), (FLOAT32, BFLOAT16)),
    "wrapped": PlannedLoop(_wrapped),
    "wrapped, bfloat16 sums": PlannedLoop(
        functools.partial(_wrapped, accumulate_dtype=torch.bfloat16), (FLOAT32,)
    ),
    "wrapped, masters, bfloat16 sums": PlannedLoop(functools.partial(_wrapped, **_SHORT), (BFLOAT16,)),
    "model=": PlannedLoop(functools.partial(_wrapped, inside=True)),
    "model=, kept casts": PlannedLoop(functools.partial(_wrapped, inside=True, keep_casts=True), (AUTOCAST,)),
}
#: What is measured with `--full` alone: precision and loop.
FULL = ((BFLOAT16, "stock, fused AdamW"), (FLOAT32, "wrapped, bfloat16 sums"))


@dataclasses.dataclass(frozen=True)
class Found:
    """Bytes at the peak, and what the predicted ones were for."""

    predicted: Peak
    measured: int

    @property
    def error(self) -> float:
        """The share by which the prediction is off."""
        return self.predicted.bytes / self.measured - 1


def compared(architecture: Architecture, way: str, precision: str, device: torch.device) -> Found:
    """One architecture by one loop in one precision."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == BFLOAT16 else torch.float32
    model = architecture.make().to(device, dtype)
    drawn = architecture.draw(torch.Generator().manual_seed(1))

    def placed(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)

    batch = Batch(tree_map(placed, drawn))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == AUTOCAST):
            return architecture.loss(model, batch)

    optimizer = LOOPS[way].make(model)
    predictor = Predictor(model, recipe_of(optimizer), batch, loss_fn, device, lambda size: None)
    predicted = predictor.peak(batch.size, STEPS)
    measured, why = predictor.measured_peak(batch.size, STEPS)
    if measured is None:
        raise RuntimeError(why)
    return Found(predicted, measured)


def rows_of(case: Case, way: str, found: Found, note: str) -> list[Row]:
    figure = {"metric": "peak memory", "unit": "MB", "note": note}
    off = at_most(TOLERANCE, max(abs(found.error), 1e-6), "within 5 % of measured")
    measured, predicted = found.measured / 1e6, found.predicted.bytes / 1e6
    return [
        row(case, f"{way}: measured", **figure, median=measured, bytes=found.measured),
        row(case, f"{way}: predicted", **figure, median=predicted, bytes=found.predicted.bytes, **off),
    ]


def combinations(effort: str) -> list[tuple[str, str]]:
    both = [
        (precision, way) for precision in PRECISIONS for way in LOOPS if precision in LOOPS[way].precisions
    ]
    return [pair for pair in both if effort == "full" or pair not in FULL]


def figures(results: Results, effort: str, only: Sequence[str] | None = None) -> None:
    """SystemExit, and no row, where there is no Transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit(
            "Transformers is not installed; `make bench-integrations` has an environment with it"
        )
    note = f"transformers {importlib.metadata.version('transformers')}"
    chosen = [own for own in architectures(effort == "quick") if only is None or own.name in only]
    cells = [(own, *rest) for own in chosen for rest in combinations(effort)]
    for architecture, precision, way in progress(cells, "planner", "combination"):
        case = Case("planner", architecture.name, "training", architecture.shapes, precision)
        try:
            found = compared(architecture, way, precision, results.device)
        except Exception as error:
            results.add([cannot_run(case, way, first_line(error))])
            continue
        results.add(rows_of(case, way, found, note))


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--only", help="names of architectures, separated by semicolons")
    options = parser.parse_args()
    only = options.only.split(";") if options.only else None
    names = [own.name for own in architectures()]
    if only and not set(only) <= set(names):
        raise SystemExit(f"unknown architecture in {options.only!r}; allowed: {'; '.join(names)}")
    harness.run(figures, options, only=only)


if __name__ == "__main__":
    main()
