"""Draws docs/figures/rounding_*.png and *.svg from the newest rows of suites/rounding.py, and writes the
tables of docs/rounding.md: `make rounding-figures`.
"""

import functools
import itertools
import re
import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fusedacc.commands.plots import BLUE, INK, QUIET, VERMILION

from ..contestants.loops import KINDS
from ..harness import ROOT
from ..records import PEAK, Line
from ..suites.rounding import FLOAT32, NEAREST, ROUNDING, STOCHASTIC, STOCK
from .pages import band, figure, finish, of, only, panels, run, table, values
from .plot import MODELS

COLOURS = {FLOAT32: INK, NEAREST: VERMILION, STOCHASTIC: BLUE}
LINES = {FLOAT32: "-", NEAREST: "--", STOCHASTIC: "-"}
IN_BFLOAT16 = (NEAREST, STOCHASTIC)
ABOVE = f" above {FLOAT32}"
#: Micro-batches whose sums are in the table.
COUNTS = (8, 64, 256, 512, 1024, 2048)
STATES = {"after 0 updates": "initial weights"}


def of_training(rows: Sequence[Line]) -> list[Line]:
    """Return the newest rows of each k, which may be of several runs. Raises NoRows."""
    newest_rows = only(rows, benchmark="training")
    last = {row["case"]: row["date"] for row in newest_rows}
    return [row for row in newest_rows if last[row["case"]] == row["date"]] or of(
        rows, "rounding", "training"
    )


def by_seed(rows: Sequence[Line], **columns: str) -> dict[float, list[float]]:
    """Return the figures of all seeds by `at`, in ascending order."""
    found: dict[float, list[float]] = {}
    for row in sorted(only(rows, **columns), key=lambda row: (float(row["at"]), int(row["seed"]))):
        found.setdefault(float(row["at"]), []).append(float(row["median"]))
    return found


def numbers(rows: Sequence[Line]) -> list[str]:
    return sorted({row["k"] for row in rows}, key=int)


def training(rows: Sequence[Line]) -> Figure:
    """Draw the loss for each k, and beneath it the difference from float32 sums."""
    newest_rows = of_training(rows)
    counts = numbers(newest_rows)
    figure, grid = panels(2, len(counts), (10.5, 6.6), sharex="col", sharey="row")
    for upper, lower, k in zip(*grid, counts, strict=True):
        for axes, metric, scale in ((upper, "loss", 1.0), (lower, f"loss{ABOVE}", 1e3)):
            for name in COLOURS:
                points = by_seed(newest_rows, k=k, provider=name, metric=metric)
                each = [[scale * value for value in found] for found in points.values()]
                ends = (list(map(end, each)) for end in (statistics.median, min, max))
                band(axes, list(points), *ends, COLOURS[name], linestyle=LINES[name])
        upper.set_title(f"{k} micro-batches an update")
        lower.axhline(0, color=INK, linewidth=1)
        lower.set_xlabel("update")
    grid[0][0].set_ylabel("loss, nats")
    grid[1][0].set_ylabel("above float32 sums, 0.001 nats")
    seeds = sorted({len({row["seed"] for row in only(newest_rows, k=k)}) for k in counts})
    text = (
        f"The demo's transformer on bytes, {newest_rows[0]['shapes'].split(';')[0]}, bfloat16 parameters, "
        f"AdamW. Loss of the micro-batches. Median and range of {' or '.join(map(str, seeds))} seeds, which "
        "determine weights, data and random bits. Below: each seed minus float32 sums with the same "
        "weights and data."
    )
    return finish(figure, "Training with sums in float32 and in bfloat16", newest_rows[0], text, COLOURS)


def sums(rows: Sequence[Line]) -> Figure:
    """Draw the error for each state of the model, and how much of the sum is kept."""
    newest_rows = of(rows, "rounding", "sums")
    parts = [row["case"].split(", ") for row in newest_rows]
    sizes = sorted({size for size, _ in parts})
    states = dict.fromkeys(state for _, state in parts)
    figure, grid = panels(2, len(states), (10.5, 6.6), sharex=True, sharey="row")
    for upper, lower, state in zip(*grid, states, strict=True):
        for size, line in zip(sizes, ("-", ":"), strict=False):
            drawn = ((upper, "apart"), (lower, "share kept"))
            for name, (axes, metric) in itertools.product(IN_BFLOAT16, drawn):
                points = only(newest_rows, case=f"{size}, {state}", provider=name, metric=metric)
                points = [row for row in points if float(row["at"]) > 1]
                look = {"color": COLOURS[name], "linestyle": line, "linewidth": 2}
                axes.plot(values(points, "at"), values(points), **look)
            upper.plot([], [], color=QUIET, linestyle=line, label=f"micro-batches of {size}")
        upper.set_title(STATES.get(state, state))
        upper.set_yscale("log")
        lower.set_xscale("log", base=2)
        lower.xaxis.set_major_formatter("{x:g}")
        lower.set_xlabel("micro-batches in the sum")
        lower.axhline(1, color=INK, linewidth=1)
    first = grid[0][0]
    beneath = grid[1][0]
    grid[0][-1].yaxis.set_minor_locator(NullLocator())
    first.set_yticks((0.001, 0.01, 0.1, 1), ("0.001", "0.01", "0.1", "1"))
    first.legend(frameon=False, fontsize=9)
    first.set_ylabel("relative error")
    beneath.set_ylabel("share of the sum that is kept")
    text = (
        "The same gradients of the demo's transformer added up in bfloat16 and in float32. Error: norm of "
        "the difference relative to the float32 sum. Kept: the component along the float32 sum."
    )
    colours = {name: COLOURS[name] for name in IN_BFLOAT16}
    return finish(figure, "What is left of a window's gradient", newest_rows[0], text, colours)


def additions(rows: Sequence[Line]) -> Figure:
    """Draw the mean over elements by the number of additions, and their values at the end."""
    newest_rows = of(rows, "rounding", "statistics")
    figure, [[left, right]] = panels(1, 2, (10.5, 4.4), width_ratios=(3, 2))
    step = 2.0 ** int(re.search(r"2\^(-?\d+)", newest_rows[0]["case"])[1])
    for name in IN_BFLOAT16:
        means = only(newest_rows, provider=name, metric="mean")
        at, *quantiles = (values(means, column) for column in ("at", "median", "p20", "p80"))
        band(left, at, *quantiles, COLOURS[name])
    left.plot((0, at[-1]), (1, 1 + step * at[-1]), color=INK, linestyle=":", linewidth=2)
    left.set(xlabel="additions", ylabel="sum", title="mean of all elements")
    counted = only(newest_rows, provider=STOCHASTIC, metric="elements")
    found = values(counted, "at")
    gaps = [after - before for before, after in itertools.pairwise(found)]
    right.bar(found, values(counted), 0.8 * min(gaps, default=1.0), color=BLUE)
    right.axvline(1 + step * at[-1], color=INK, linestyle=":", linewidth=2)
    right.set(xlabel="sum, stochastic", ylabel="elements", title=f"after {at[-1]:.0f} additions")
    text = (
        f"{newest_rows[0]['case']}, in bfloat16. Band: 20th to 80th percentile of the elements. Dotted: "
        "exact. Rounding to nearest loses every addition."
    )
    colours = {"exact": INK, NEAREST: VERMILION, STOCHASTIC: BLUE}
    return finish(figure, "Many additions, each far below the sum", newest_rows[0], text, colours)


def mean_and_spread(found: Sequence[float], digits: int) -> str:
    spread = statistics.stdev(found) if len(found) > 1 else 0.0
    return f"{statistics.mean(found):.{digits}f} ± {spread:.{digits}f}"


Cells = tuple[Sequence[str], list[Sequence[str]]]


def training_table(newest_rows: Sequence[Line]) -> Cells:
    """Return the loss on unseen text, and the difference from float32 sums."""
    lines = []
    for k, name in itertools.product(numbers(newest_rows), COLOURS):
        (losses,) = by_seed(newest_rows, k=k, provider=name, metric="unseen loss").values()
        cells = [k, name, str(len(losses)), mean_and_spread(losses, 4), "", ""]
        for off in by_seed(newest_rows, k=k, provider=name, metric=f"unseen loss{ABOVE}").values():
            cells[-2:] = mean_and_spread(off, 5), f"{max(map(abs, off)):.5f}"
        lines.append(cells)
    return ("k", "", "seeds", "loss on unseen text, nats", "above float32 sums", "the furthest seed"), lines


def sums_table(newest_rows: Sequence[Line]) -> Cells:
    """Return the error of a window's sum, and what is kept of it, by micro-batches."""
    lines = []
    for case, name in itertools.product(sorted({row["case"] for row in newest_rows}), IN_BFLOAT16):
        size, state = case.split(", ")
        cells = [f"{size}, {STATES.get(state, state)}", name.removeprefix("bfloat16 sums, ")]
        for at in COUNTS:
            here = [row for row in only(newest_rows, case=case, provider=name) if float(row["at"]) == at]
            found = {row["metric"]: 100 * float(row["median"]) for row in here}
            cells.append(f"{found['apart']:.1f} % / {found['share kept']:.1f} %" if found else "")
        lines.append(cells)
    return ("error / share kept", "", *(f"k = {at}" for at in COUNTS)), lines


def additions_table(newest_rows: Sequence[Line]) -> Cells:
    last = max(only(newest_rows, metric="mean"), key=lambda row: float(row["at"]))["at"]
    lines = []
    for name in IN_BFLOAT16:
        here = [row for row in only(newest_rows, provider=name, at=last) if row["metric"] != "elements"]
        found = {row["metric"]: float(row["median"]) for row in here}
        off = f"{found['off by']:+.2f}" if "off by" in found else ""
        cells = [f"{found['mean']:.5g}", f"{found['standard error']:.2g}", off]
        lines.append([name, *cells, f"{100 * found['share kept']:.2f} %"])
    return (
        newest_rows[0]["case"],
        "mean",
        "standard error",
        "off by, in standard errors",
        "share kept",
    ), lines


def ratios(newest_rows: Sequence[Line]) -> list[str]:
    """Return the speed relative to float32 sums and to rounding to nearest."""
    against = {row["against"]: f"{float(row['speedup']):.2f}" for row in newest_rows if row["against"]}
    return [against.get(name, "") for name in (FLOAT32, NEAREST)]


def speed(newest_rows: Sequence[Line]) -> Cells:
    lines = []
    for name in dict.fromkeys(row["provider"] for row in newest_rows):
        mine = only(newest_rows, provider=name)
        rate = f"{float(mine[0]['gb_per_s']):.1f}"
        share = f"{float(mine[0]['percent_of_peak']):.0f} %"
        shown = f"`{name}`" if name in PEAK else name
        lines.append([shown, figure(mine[0]), rate, share, *ratios(mine)])
    return (
        newest_rows[0]["case"],
        "median",
        "GB/s",
        "of the bandwidth",
        "x float32 sums",
        "x to nearest",
    ), lines


def lists(newest_rows: Sequence[Line]) -> Cells:
    lines = []
    for model in dict.fromkeys(row["case"] for row in newest_rows if row["median"]):
        mine = only(newest_rows, case=model)
        times = [figure(only(mine, provider=name)[0]) for name in COLOURS]
        lines.append([MODELS[model], mine[0]["shapes"], *times, *ratios(mine)])
    return ("", "", "float32 sums", "to nearest", "stochastic", "x float32 sums", "x to nearest"), lines


def memory(newest_rows: Sequence[Line]) -> Cells:
    lines = []
    for name in (*COLOURS, STOCK):
        mine = {row["metric"]: f"{float(row['median']):.2f}" for row in only(newest_rows, provider=name)}
        lines.append([name, mine["peak memory"], *(mine[f"peak memory: {kind}"] for kind in KINDS)])
    return ("bytes a parameter", "peak", *KINDS), lines


CHARTS = {"training": training, "sums": sums, "statistics": additions}
#: By part: the head and the lines of its newest rows.
TABLES = {
    "training": training_table,
    "sums": sums_table,
    "statistics": additions_table,
    "speed": speed,
    "lists": lists,
    "memory": memory,
}


def written(part: str, rows: Sequence[Line]) -> str:
    newest_rows = of_training(rows) if part == "training" else of(rows, "rounding", part)
    command = f"python -m benchmarks.suites.rounding --only {'speed' if part == 'lists' else part}"
    return table(newest_rows[0], command, *TABLES[part](newest_rows))


def main() -> None:
    tables = {part: functools.partial(written, part) for part in TABLES}
    run(__doc__, ROUNDING, ROOT / "docs" / "rounding.md", "rounding", CHARTS, tables)


if __name__ == "__main__":
    main()
