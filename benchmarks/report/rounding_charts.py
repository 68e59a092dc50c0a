"""Draws docs/figures/rounding_*.png and *.svg from the newest rows of suites/rounding.py, and writes their
tables into docs/rounding.md: `make rounding-figures`.

    python -m benchmarks.report.rounding_charts [--results CSV] [--out docs/figures] [--page docs/rounding.md]
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fusedacc.commands.measuring.plots import BLUE, FAINT, INK, QUIET, VERMILION
from fusedacc.commands.measuring.records import Line

from ..contestants.rounded import FLOAT32, NEAREST, STOCHASTIC
from ..harness import ROOT
from ..suites.rounding import ROUNDING
from .pages import finish, of, run
from .rounding_tables import STATES, TABLES, by_seed, of_training

COLOURS = {FLOAT32: INK, NEAREST: VERMILION, STOCHASTIC: BLUE}
LINES = {FLOAT32: "-", NEAREST: "--", STOCHASTIC: "-"}
ABOVE = f"loss above {FLOAT32}"


def curve(axes: Axes, rows: Sequence[Line], name: str, scale: float = 1.0) -> None:
    """A line through the medians over seeds, and their range."""
    points = {at: [scale * value for value in values] for at, values in by_seed(rows).items()}
    middle = [statistics.median(values) for values in points.values()]
    low, high = ([of_all(values) for values in points.values()] for of_all in (min, max))
    axes.plot(list(points), middle, color=COLOURS[name], linestyle=LINES[name], linewidth=2)
    axes.fill_between(list(points), low, high, color=COLOURS[name], alpha=0.15, linewidth=0)


def training(rows: Sequence[Line]) -> Figure:
    """A column for each k: the loss, and beneath it how far it is above that with float32 sums."""
    own = of_training(rows)
    counts = sorted({int(row["k"]) for row in own})
    figure, panels = plt.subplots(
        2, len(counts), figsize=(10.5, 6.6), sharex="col", sharey="row", squeeze=False
    )
    for (upper, lower), k in zip(panels.T, counts, strict=True):
        here = [row for row in own if row["k"] == str(k)]
        for name in COLOURS:
            of_way = [row for row in here if row["provider"] == name]
            curve(upper, [row for row in of_way if row["metric"] == "loss"], name)
            if name != FLOAT32:
                curve(lower, [row for row in of_way if row["metric"] == ABOVE], name, 1e3)
        upper.set_title(f"{k} micro-batches an update")
        lower.axhline(0, color=INK, linewidth=1)
        lower.set_xlabel("update")
        for axes in (upper, lower):
            axes.grid(axis="y", color=FAINT)
    panels[0][0].set_ylabel("loss, nats")
    panels[1][0].set_ylabel("above float32 sums, 0.001 nats")
    seeds = sorted({len({row["seed"] for row in own if row["k"] == str(k)}) for k in counts})
    text = (
        f"The demo's transformer on bytes, {own[0]['shapes'].split(';')[0]}, bfloat16 parameters, AdamW; the "
        f"loss of the micro-batches. Median and range of {' or '.join(map(str, seeds))} seeds, which give "
        "weights, data and random bits; below, each seed against float32 sums with the same weights and data."
    )
    return finish(figure, "Training with sums in float32 and in bfloat16", own[0], text, COLOURS)


def sums(rows: Sequence[Line]) -> Figure:
    """A column for each state of the model: the error, and how much of the sum there is."""
    own = of(rows, "rounding", "sums")
    cases = list(dict.fromkeys(row["case"] for row in own))
    states = list(dict.fromkeys(case.split(", ")[1] for case in cases))
    sizes = list(dict.fromkeys(case.split(", ")[0] for case in cases))
    figure, panels = plt.subplots(
        2, len(states), figsize=(10.5, 6.6), sharex=True, sharey="row", squeeze=False
    )
    for (upper, lower), state in zip(panels.T, states, strict=True):
        for size, line in zip(sorted(sizes), ("-", ":"), strict=False):
            for name in (NEAREST, STOCHASTIC):
                key = (f"{size}, {state}", name)
                of_line = [row for row in own if (row["case"], row["provider"]) == key]
                for axes, metric in ((upper, "apart"), (lower, "share kept")):
                    points = [row for row in of_line if row["metric"] == metric and float(row["at"]) > 1]
                    at, values = ([float(row[key]) for row in points] for key in ("at", "median"))
                    axes.plot(at, values, color=COLOURS[name], linestyle=line, linewidth=2)
        for line, size in zip(("-", ":"), sorted(sizes), strict=False):
            upper.plot([], [], color=QUIET, linestyle=line, label=f"micro-batches of {size}")
        upper.set_title(STATES.get(state, state))
        upper.set_yscale("log")
        lower.set_xscale("log", base=2)
        lower.xaxis.set_major_formatter("{x:g}")
        lower.set_xlabel("micro-batches in the sum")
        lower.axhline(1, color=INK, linewidth=1)
        for axes in (upper, lower):
            axes.grid(axis="y", color=FAINT)
    upper.yaxis.set_minor_locator(NullLocator())
    panels[0][0].set_yticks((0.001, 0.01, 0.1, 1), ("0.001", "0.01", "0.1", "1"))
    panels[0][0].legend(frameon=False, fontsize=9)
    panels[0][0].set_ylabel("length of the error")
    panels[1][0].set_ylabel("share of the sum that is kept")
    text = (
        "The same gradients of the demo's transformer added up in bfloat16 and in float32. Error: the "
        "difference from the float32 sum, as a share of its length. Kept: the part along the float32 sum."
    )
    colours = {name: COLOURS[name] for name in (NEAREST, STOCHASTIC)}
    return finish(figure, "What is left of a window's gradient", own[0], text, colours)


def additions(rows: Sequence[Line]) -> Figure:
    """The mean over elements by the number of additions, and their values at the end."""
    own = of(rows, "rounding", "statistics")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.4), width_ratios=(3, 2))
    step = 2.0 ** int(re.search(r"2\^(-?\d+)", own[0]["case"])[1])
    for name in (NEAREST, STOCHASTIC):
        means = [row for row in own if (row["provider"], row["metric"]) == (name, "mean")]
        at, middle, low, high = ([float(r[key]) for r in means] for key in ("at", "median", "p20", "p80"))
        left.plot(at, middle, color=COLOURS[name], linewidth=2)
        left.fill_between(at, low, high, color=COLOURS[name], alpha=0.15, linewidth=0)
    left.plot((0, at[-1]), (1, 1 + step * at[-1]), color=INK, linestyle=":", linewidth=2)
    left.set(xlabel="additions", ylabel="sum", title="mean of all elements")
    counted = [row for row in own if (row["provider"], row["metric"]) == (STOCHASTIC, "elements")]
    values, heights = ([float(row[key]) for row in counted] for key in ("at", "median"))
    gaps = [after - before for before, after in itertools.pairwise(values)]
    right.bar(values, heights, 0.8 * min(gaps, default=1.0), color=BLUE)
    right.axvline(1 + step * at[-1], color=INK, linestyle=":", linewidth=2)
    right.set(xlabel="sum, stochastic", ylabel="elements", title=f"after {at[-1]:.0f} additions")
    for axes in (left, right):
        axes.grid(axis="y", color=FAINT)
        axes.set_axisbelow(True)
    text = (
        f"{own[0]['case']}, in bfloat16. Band: from the 20th to the 80th percentile of elements. Dotted: as "
        "it should be. To nearest, every addition is lost."
    )
    colours = {"as it should be": INK, NEAREST: VERMILION, STOCHASTIC: BLUE}
    return finish(figure, "Many additions, each far below the sum", own[0], text, colours)


CHARTS = {"training": training, "sums": sums, "statistics": additions}


def main() -> None:
    run(__doc__, ROUNDING, ROOT / "docs" / "rounding.md", "rounding", CHARTS, TABLES)


if __name__ == "__main__":
    main()
