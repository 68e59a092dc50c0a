"""A layer of a mixture of experts through autograd and the wrapper: a micro-batch within a window.

Few tokens reach each expert, so a micro-batch is mostly memory traffic. "grouped" layers multiply by torch's
grouped_mm, or with `model=` by `grouped_linear`. "loop" layers read one expert after the other.

On a CPU, much of stock's time may be page faults, because the C library returns the memory of a large
gradient to the system. So each figure is measured with the C library's defaults, and with freed memory kept.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fusedacc.commands.timing import take_turns

from .. import harness, records
from ..contestants.experts import Experts, Shape
from ..contestants.loops import HookSums
from ..harness import BF16, F32, INSIDE, STOCK, WRAPPED, in_process, processes, progress
from .layers import EndlessWindow

SHAPES = {
    "quick": (Shape(4, 32, 16, 8, 2),),
    "short": (Shape(64, 512, 1024, 64, 2), Shape(128, 512, 512, 64, 8), Shape(16, 768, 2048, 256, 2)),
}
SHAPES["full"] = SHAPES["short"]
#: Of a GPU, in bfloat16.
ON_GPU = (Shape(64, 2048, 1024, 4096, 8), Shape(64, 2048, 1024, 512, 8))
#: Of the layers that read one expert after the other, for which stock takes seconds with the shapes above.
LOOP = {"quick": SHAPES["quick"][0], "short": Shape(32, 256, 512, 64, 2), "full": Shape(32, 256, 512, 64, 2)}
ROUNDS = {"quick": 3, "short": 7, "full": 41}
DTYPES = {"float32": F32, "bfloat16 into float32": BF16}
#: A hook that adds each gradient to a float32 sum: stock's best for bfloat16 weights.
HOOK = "stock, add_ in a hook"
WAYS = {"float32": (STOCK, WRAPPED, INSIDE), "bfloat16 into float32": (STOCK, HOOK, WRAPPED, INSIDE)}
#: Variables with which the C library keeps freed memory.
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**60), "MALLOC_TOP_PAD_": str(2**28)}
DEFAULTS = "micro-batch"
MODES = {DEFAULTS: {}, "micro-batch, memory kept": KEPT}
#: Goals on a CPU by layer and dtypes: the least speed relative to each way of stock, in each of MODES.
GOALS = {
    ("grouped", "float32"): (1.6, 1.15),
    ("grouped", "bfloat16 into float32"): (2.4, 1.25),
    ("loop", "float32"): (3.0, 0.0),
    ("loop", "bfloat16 into float32"): (3.0, 0.0),
}


#: What all ways of a case train, by `make(way)` in the measuring process; and the goals on a CPU by mode.
Cell = tuple[records.Case, Callable[[str], EndlessWindow], Mapping[str, float]]


def work(shape: Shape, layer: str, dtypes: str, way: str, device: torch.device) -> EndlessWindow:
    read = "ours" if layer == "grouped" and way == INSIDE else layer
    torch.manual_seed(0)
    model = Experts(shape, read).to(device, DTYPES[dtypes])
    x, experts, weights = shape.batch(DTYPES[dtypes], device)
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x)

    def forward(model: nn.Module) -> list[Tensor]:
        return [model(x.detach().requires_grad_(), experts, weights)]

    return trained(model, way, forward, gradient)


def trained(
    model: nn.Module, way: str, forward: Callable[[nn.Module], Sequence[Tensor]], gradient: Tensor
) -> EndlessWindow:
    """Return a model trained in one of `WAYS`. `gradient` is that of its output."""
    made = EndlessWindow(model, way, forward, [gradient])
    if way == HOOK:
        parameters = list(model.parameters())
        made.sums = [torch.empty_like(parameter, dtype=F32) for parameter in parameters]
        HookSums(parameters, made.sums)
    return made


def measure(
    make: Callable[[str], EndlessWindow], names: Sequence[str], rounds: int, what: str
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds of each round's micro-batch, and the bytes of a later backward, by way."""
    ways = {way: make(way) for way in names}
    for each in ways.values():
        each.run()  # the first of the window, which makes the sums
    counted = {way: each.bytes() for way, each in ways.items()}
    runs = {way: each.run for way, each in ways.items()}
    seconds = take_turns(runs, harness.rounds(rounds, what), lambda run, calls: sum(run()))
    return seconds, counted


def figures(results: records.Results, effort: str) -> None:
    cells = []
    layers = {"grouped": SHAPES[effort], "loop": (LOOP[effort],)}
    kinds = list(DTYPES)
    if results.device.type == "cuda" and effort != "quick":
        layers = {"grouped": ON_GPU}
        kinds = kinds[1:]
    for layer, shapes in layers.items():
        for shape in shapes:
            for dtypes in kinds:
                words = f"{shape.weights / 1e6:.1f} M weights"
                case = records.Case("experts", f"{shape}, {layer}", "", words, dtypes)
                make = functools.partial(work, shape, layer, dtypes, device=results.device)
                cells.append((case, make, dict(zip(MODES, GOALS[layer, dtypes], strict=True))))
    by_memory(results, cells, ROUNDS[effort])


def by_memory(results: records.Results, cells: Sequence[Cell], rounds: int, note: str = "") -> None:
    """Add the rows of all cells in each of `MODES`. On a GPU there is one mode."""
    modes = MODES if results.device.type == "cpu" else {DEFAULTS: {}}
    for mode, values in modes.items():
        with processes(values, 1) as apart:
            for case, make, goals in progress(cells, mode, "cell"):
                names = WAYS[case.dtypes]
                case_of_mode = dataclasses.replace(case, mode=mode)
                measured = results.attempt(
                    case_of_mode, names, in_process, apart, measure, make, names, rounds, case.case
                )
                if measured:
                    add(results, case_of_mode, goals.get(mode, 0.0), note, measured)


def add(results: records.Results, case: records.Case, least: float, note: str, measured: tuple) -> None:
    """Add the rows of one cell: its times, and its bytes once."""
    seconds, moved = measured
    ways = WAYS[case.dtypes]
    of_stock = [way for way in ways if way in (STOCK, HOOK)]
    goals = [records.Goal(way, least if results.device.type == "cpu" else 0.0) for way in of_stock]
    results.add(records.timed_rows(case, seconds, {INSIDE: goals}, note))
    if case.mode == DEFAULTS:
        megabytes = {way: moved[way] / 1e6 for way in ways}
        limits = {INSIDE: (min(megabytes[way] for way in of_stock), "best of stock")}
        counted = dataclasses.replace(case, mode="backward")
        results.add(records.value_rows(counted, "bytes", "MB", megabytes, limits, note=note))


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
