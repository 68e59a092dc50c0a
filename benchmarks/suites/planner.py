"""The planner's predicted peak against that of real updates, on real architectures.

For each architecture, precision and loop: two windows of two micro-batches on fake tensors, and the same for
real with every allocation and release counted as torch's allocator reports it. Memory that libraries take for
themselves, which `plan` adds to both, is not included. Goal: within 5 % of the measured peak.

It needs the packages of requirements-integrations.txt, so `make bench-integrations` runs it, and `make bench`
does not.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

import fusedacc
from fusedacc.planner.prediction import Batch, Predictor, recipe_of

from .. import harness
from ..contestants.zoo.architectures import Architecture, architectures
from ..harness import progress
from ..records import Case, Results, at_most, row
from .experts_model import transformers_version

#: Micro-batches of a window.
STEPS = 2
#: The share by which a prediction may be off.
TOLERANCE = 0.05
FLOAT32, AUTOCAST, BFLOAT16 = PRECISIONS = ("float32", "autocast", "bfloat16")


def _adamw(model: nn.Module, **how: Any) -> Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, 1e-3, **how)


def _wrapped(model: nn.Module, inside: bool = False, **how: Any) -> Optimizer:
    return fusedacc.AccumulatingOptimizer(_adamw(model), STEPS, model=model if inside else None, **how)


_short_sums = functools.partial(_wrapped, accumulate_dtype=torch.bfloat16)
#: By loop: what makes its optimizer, and the precisions in which it is measured.
LOOPS: dict[str, tuple[Callable[[nn.Module], Optimizer], tuple[str, ...]]] = {
    "stock": (_adamw, PRECISIONS),
    "stock, fused AdamW": (functools.partial(_adamw, fused=True), (FLOAT32, BFLOAT16)),
    "wrapped": (_wrapped, PRECISIONS),
    "wrapped, bfloat16 sums": (_short_sums, (FLOAT32,)),
    "wrapped, masters, bfloat16 sums": (functools.partial(_short_sums, master_weights=True), (BFLOAT16,)),
    "model=": (functools.partial(_wrapped, inside=True), PRECISIONS),
    "model=, kept casts": (functools.partial(_wrapped, inside=True, keep_casts=True), (AUTOCAST,)),
}
#: The precisions and loops that only `--full` measures.
FULL = ((BFLOAT16, "stock, fused AdamW"), (FLOAT32, "wrapped, bfloat16 sums"))


def compared(architecture: Architecture, way: str, precision: str, device: torch.device) -> tuple[int, int]:
    """Return the predicted and the measured bytes of one architecture with one loop in one precision."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == BFLOAT16 else torch.float32
    model = architecture.make().to(device, dtype)
    drawn = architecture.draw(torch.Generator().manual_seed(1))
    batch = Batch(tree_map(lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype), drawn))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == AUTOCAST):
            return architecture.loss(model, batch)

    recipe = recipe_of(LOOPS[way][0](model))
    predictor = Predictor(model, recipe, batch, loss_fn, device, lambda size: None)
    predicted = predictor.peak(batch.size, STEPS)
    measured, why = predictor.measured_peak(batch.size, STEPS)
    if measured is None:
        raise RuntimeError(why)
    return predicted.bytes, measured


def off(predicted: int, measured: int) -> float:
    return abs(predicted / measured - 1)


def figures(results: Results, effort: str) -> None:
    note = transformers_version()
    pairs = [(precision, way) for precision in PRECISIONS for way in LOOPS if precision in LOOPS[way][1]]
    pairs = [pair for pair in pairs if effort == "full" or pair not in FULL]
    cells = [(architecture, *pair) for architecture in architectures(effort == "quick") for pair in pairs]
    for architecture, precision, way in progress(cells, "planner", "combination"):
        case = Case("planner", architecture.name, "training", architecture.shapes, precision)
        found = results.attempt(case, [way], compared, architecture, way, precision, results.device)
        for what, size in zip(("predicted", "measured"), found or (), strict=False):
            error = at_most(TOLERANCE, max(off(*found), 1e-6), "within 5 % of measured")
            held = error if what == "predicted" else {}
            figure = {"metric": "peak memory", "unit": "MB", "median": size / 1e6, "bytes": size}
            results.add([row(case, f"{way}: {what}", **figure, **held, note=note)])


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
