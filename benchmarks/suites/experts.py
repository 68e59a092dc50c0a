"""A layer of a mixture of experts through autograd and the wrapper: a micro-batch of a window that goes on.

Few tokens reach each expert, so a micro-batch is mostly memory traffic: stock's backward writes a gradient of
all experts and adds it to the sum; ours adds each expert's product to its own sum. "grouped" layers multiply
by torch's grouped_mm, or in our way by `grouped_linear`; "loop" layers read one expert after the other.

Much of stock's time on a CPU may be page faults: the C library gives a large gradient's memory back to the
system when it is freed, and takes it anew. So each figure is there twice, in processes of their own: with the
C library's defaults, and with memory that it keeps.

Goals on a CPU, each against every way of stock: of a grouped layer's micro-batch 1.6 times as fast in float32
and 2.4 in bfloat16, with memory kept 1.15 and 1.25; of a loop's, 3 with defaults.

    python -m benchmarks.suites.experts [--quick | --full] [--device cuda]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from fusedacc.commands.measuring import records
from fusedacc.commands.measuring.timing import take_turns

from .. import harness
from ..contestants.experts import Experts, Shape
from ..harness import processes, progress
from .layers import INSIDE, STOCK, WRAPPED, EndlessWindow

SHAPES = {
    "quick": (Shape(4, 32, 16, 8, 2),),
    "short": (Shape(64, 512, 1024, 64, 2), Shape(128, 512, 512, 64, 8), Shape(16, 768, 2048, 256, 2)),
}
SHAPES["full"] = SHAPES["short"]
#: Of the layers that read one expert after the other: stock takes seconds for those above.
LOOP = {"quick": SHAPES["quick"][0], "short": Shape(32, 256, 512, 64, 2), "full": Shape(32, 256, 512, 64, 2)}
ROUNDS = {"quick": 3, "short": 7, "full": 41}
DTYPES = {"float32": torch.float32, "bfloat16 into float32": torch.bfloat16}
#: A hook that adds each gradient to a float32 sum, the best of stock where weights are bfloat16.
HOOK = "stock, add_ in a hook"
WAYS = {"float32": (STOCK, WRAPPED, INSIDE), "bfloat16 into float32": (STOCK, HOOK, WRAPPED, INSIDE)}
#: What the C library reads as a process starts: it keeps what is freed.
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**60), "MALLOC_TOP_PAD_": str(2**28)}
DEFAULTS = "micro-batch"
MODES = {DEFAULTS: {}, "micro-batch, memory kept": KEPT}
GOALS = {
    ("grouped", "float32", "micro-batch"): 1.6,
    ("grouped", "bfloat16 into float32", "micro-batch"): 2.4,
    ("grouped", "float32", "micro-batch, memory kept"): 1.15,
    ("grouped", "bfloat16 into float32", "micro-batch, memory kept"): 1.25,
    ("loop", "float32", "micro-batch"): 3.0,
    ("loop", "bfloat16 into float32", "micro-batch"): 3.0,
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """What every way of `WAYS[case.dtypes]` trains. `make(way)`: is called where it is measured; `goals`:
    by mode, how many times as fast as each way of stock ours is to be on a CPU."""

    case: records.Case
    make: Callable[[str], EndlessWindow]
    goals: Mapping[str, float]


def work(shape: Shape, layer: str, dtypes: str, way: str, device: torch.device) -> EndlessWindow:
    read = "ours" if layer == "grouped" and way == INSIDE else layer
    torch.manual_seed(0)
    model = Experts(shape, read).to(device, DTYPES[dtypes])
    x, experts, weights = shape.batch(DTYPES[dtypes], device)
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x)

    def forward(model: torch.nn.Module) -> list[torch.Tensor]:
        return [model(x.detach().requires_grad_(), experts, weights)]

    return trained(model, way, forward, gradient)


def trained(
    model: torch.nn.Module,
    way: str,
    forward: Callable[[torch.nn.Module], Sequence[torch.Tensor]],
    gradient: torch.Tensor,
) -> EndlessWindow:
    """A model trained in one of `WAYS`. `gradient`: of its one output."""
    made = EndlessWindow(model, way, forward, [gradient])
    if way == HOOK:
        add_by_hooks(model)
    return made


def add_by_hooks(model: torch.nn.Module) -> None:
    """Each parameter's gradient goes to its own float32 sum, and is let go."""

    def add(parameter: torch.Tensor) -> None:
        total, gradient = getattr(parameter, "total", None), parameter.grad
        if total is None:
            parameter.total = gradient.float()
        else:
            total.add_(gradient)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(add)


def measure(
    make: Callable[[str], EndlessWindow], names: Sequence[str], rounds: int, what: str
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each round's micro-batch, and bytes of a later one's backward, by way."""
    ways = {way: make(way) for way in names}
    for each in ways.values():
        each.run()  # the window's first, which makes the sums
    counted = {way: each.bytes() for way, each in ways.items()}
    runs = {way: each.run for way, each in ways.items()}
    seconds = take_turns(runs, harness.rounds(rounds, what), lambda run, calls: sum(run()))
    return seconds, counted


def figures(results: records.Results, effort: str) -> None:
    cells = []
    for layer, shapes in (("grouped", SHAPES[effort]), ("loop", (LOOP[effort],))):
        for shape in shapes:
            for dtypes in DTYPES:
                words = f"{shape.weights / 1e6:.1f} M weights"
                case = records.Case("experts", f"{shape}, {layer}", "", words, dtypes)
                make = functools.partial(work, shape, layer, dtypes, device=results.device)
                goals = {mode: GOALS.get((layer, dtypes, mode), 0.0) for mode in MODES}
                cells.append(Cell(case, make, goals))
    by_memory(results, cells, ROUNDS[effort])


def by_memory(results: records.Results, cells: Sequence[Cell], rounds: int, note: str = "") -> None:
    """The rows of all cells in each of `MODES`, which differ on a CPU alone."""
    modes = MODES if results.device.type == "cpu" else {DEFAULTS: {}}
    for mode, values in modes.items():
        with processes(values, 1) as apart:
            for cell in progress(cells, mode, "cell"):
                case, names = dataclasses.replace(cell.case, mode=mode), WAYS[cell.case.dtypes]
                try:
                    measured = apart.submit(measure, cell.make, names, rounds, case.case).result()
                except Exception as error:
                    results.add([records.cannot_run(case, way, records.first_line(error)) for way in names])
                else:
                    add(results, case, cell.goals.get(mode, 0.0), note, *measured)


def add(
    results: records.Results,
    case: records.Case,
    least: float,
    note: str,
    seconds: dict[str, list[float]],
    moved: dict[str, int],
) -> None:
    """The rows of one cell: its times and, once, its bytes."""
    ways = WAYS[case.dtypes]
    of_stock = [way for way in ways if way in (STOCK, HOOK)]
    held_to = tuple(records.Goal(way, least if results.device.type == "cpu" else 0.0) for way in of_stock)
    variants = [records.Variant(way, goals=held_to if way == INSIDE else (), note=note) for way in ways]
    results.add(records.rows_of(case, variants, seconds))
    if case.mode == "micro-batch":
        counted = dataclasses.replace(case, mode="backward")
        rows = []
        least_moved = min(moved[way] for way in of_stock)
        for way in ways:
            held = records.at_most(least_moved, moved[way], "best of stock") if way == INSIDE else {}
            figure = {"metric": "bytes", "unit": "MB", "median": moved[way] / 1e6, "note": note}
            rows.append(records.row(counted, way, **figure, **held))
        results.add(rows)


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
