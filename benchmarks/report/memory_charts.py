"""Draws docs/figures/memory_*.png and *.svg from the newest rows of suites/memory.py, and writes their tables
into docs/memory.md: `make memory-figures`.

    python -m benchmarks.report.memory_charts [--results CSV] [--out docs/figures] [--page docs/memory.md]
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fusedacc.commands.measuring.plots import BLUE, FAINT, GREEN, GREY, INK, ORANGE, SKY, VERMILION
from fusedacc.commands.measuring.records import Line, markdown
from fusedacc.commands.plan import COLOURS, Curve, draw_curve

from ..harness import ROOT
from ..suites.memory import GROWS, HALVES, MEMORY, SHUFFLED
from .pages import conditions, finish, of, run

MIB = 2**20
MODELS = {
    "gpt-64": "decoder",
    "vit": "vision transformer",
    "conv": "residual net",
    "unet": "U-Net",
    "lstm": "LSTM",
    "mlp": "MLP",
}
WHOLE = "stock, 1 x 64"
HALVED = {WHOLE: GREY, "stock, 2 x 32": SKY, "fusedacc, 2 x 32": BLUE, "fusedacc model=, 2 x 32": GREEN}
LINES = {"gpt-64": BLUE, "vit": GREEN, "conv": ORANGE, "unet": VERMILION, "lstm": SKY, "mlp": INK}


def curve_of(rows: Sequence[Line], model: str, loop: str) -> Curve:
    """What was predicted of a model, as the command draws it."""
    sizes: dict[int, dict[str, int]] = {}
    for row in (row for row in rows if (row["case"], row["provider"]) == (model, loop)):
        sizes.setdefault(int(row["micro_batch"]), {})[row["metric"]] = round(float(row["median"]) * MIB)
    batch = max(sizes)
    return Curve(MODELS[model], dict(sorted(sizes.items())[:-1]), sizes[batch], batch, None)


def share(found: Curve) -> tuple[float, float]:
    """What stays, and what each sample adds between the first and the last micro-batch: bytes."""
    first, *_, last = found.by_size
    low, high = (sum(found.by_size[size].values()) for size in (first, last))
    each = (high - low) / (last - first)
    return low - each * first, each


def grows(rows: Sequence[Line]) -> Figure:
    """A panel for each model: areas by kind, and the whole batch as a bar."""
    own = of(rows, "memory", "grows")
    found = [curve_of(own, model, "fusedacc") for model in GROWS]
    figure, panels = plt.subplots(1, len(found), figsize=(13.5, 4.6))
    for axes, each in zip(panels, found, strict=True):
        top = 1.1 * sum(each.full.values())
        draw_curve(axes, each, int(2 * top), top, MIB)
        axes.set_title(f"{each.title}: {share(each)[1] / MIB:.2g} MiB a sample")
        axes.set_xlabel("samples in a micro-batch")
    panels[0].set_ylabel("MiB at the peak")
    batch = found[0].samples
    text = (
        f"Predicted by fusedacc.planner for updates of {batch} samples, the wrapper and AdamW, float32 on a "
        "CPU; the bar is the whole batch in one."
    )
    colours = {kind: colour for kind, colour in COLOURS.items() if kind in found[0].full}
    return finish(figure, "What grows with a micro-batch, and what stays", own[0], text, colours)


def figure_of(rows: Sequence[Line], model: str, loop: str, metric: str) -> float:
    wanted = (model, loop, metric)
    return next(float(r["median"]) for r in rows if (r["case"], r["provider"], r["metric"]) == wanted)


def halves(rows: Sequence[Line]) -> Figure:
    """Bars for each model, peak on the left and time on the right, the whole batch being 1."""
    own = of(rows, "memory", "halves")
    figure, panels = plt.subplots(1, 2, figsize=(11.5, 4.4))
    for axes, metric in zip(panels, ("peak", "time, share"), strict=True):
        for place, model in enumerate(HALVES):
            base = figure_of(own, model, WHOLE, metric)
            for lane, (loop, colour) in enumerate(HALVED.items()):
                height = figure_of(own, model, loop, metric) / base
                at = place + 0.2 * (lane - 1.5)
                axes.bar(at, height, 0.18, color=colour)
                axes.text(at, height, f"{height:.2f}", ha="center", va="bottom", fontsize=7.5, color=INK)
        axes.set_xticks(range(len(HALVES)), [MODELS[model] for model in HALVES])
        axes.axhline(1, color=INK, linewidth=1)
        axes.grid(axis="y", color=FAINT)
        axes.set_axisbelow(True)
    panels[0].set_title("peak memory")
    panels[1].set_title("time of an update")
    text = (
        "64 samples at once being 1. Peaks are recorded over two updates with AdamW, parameters and states "
        "included; times are medians over rounds of the share within a round."
    )
    return finish(figure, "64 samples at once, and as 2 x 32", own[0], text, HALVED)


def per_sample(rows: Sequence[Line]) -> Figure:
    """A line for each model: the time of a sample, that in the largest micro-batch being 1."""
    own = of(rows, "memory", "per_sample")
    figure, axes = plt.subplots(figsize=(9.5, 5.0))
    lines: dict[str, dict[int, Line]] = {}
    for row in (row for row in own if row["metric"] == "time, share"):
        lines.setdefault(row["case"], {})[int(row["micro_batch"])] = row
    colours = {}
    for model, line in lines.items():
        middle, low, high = ([float(row[key]) for row in line.values()] for key in ("median", "p20", "p80"))
        last = [r for r in own if r["case"] == model and r["micro_batch"] == str(max(line))]
        least = next(float(row["median"]) for row in last if row["metric"] == "time")
        axes.plot(list(line), middle, color=LINES[model], marker="o", markersize=5, linewidth=2)
        axes.fill_between(list(line), low, high, color=LINES[model], alpha=0.15, linewidth=0)
        colours[f"{MODELS[model]}: {least:.3g} ms"] = LINES[model]
    sizes = sorted({size for line in lines.values() for size in line})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set(xlabel="samples in a micro-batch", ylabel=f"time of a sample, in {sizes[-1]} being 1")
    axes.grid(axis="y", color=FAINT)
    text = (
        "Forward, backward and accumulation of a micro-batch, by its samples; the key has that of a "
        "sample in the largest. Band: from p20 to p80 of rounds in which sizes take turns."
    )
    return finish(figure, "Where a smaller micro-batch costs time, and where not", own[0], text, colours)


def norms(rows: Sequence[Line]) -> Figure:
    """A panel for each norm: the loss by epoch, for each micro-batch."""
    own = of(rows, "memory", "norms")
    names = list(dict.fromkeys(row["case"] for row in own))
    figure, panels = plt.subplots(1, len(names), figsize=(10.5, 4.6), sharey=True)
    batch = own[0]["batch"]
    colours: dict[str, str] = {}
    for axes, norm in zip(panels, names, strict=True):
        axes.set(title=norm, xlabel="epoch", yscale="log")
        sizes = list(dict.fromkeys(int(row["micro_batch"]) for row in own if row["case"] == norm))
        for size, colour, line in zip(sizes, (INK, BLUE, VERMILION), ("-", "--", ":"), strict=False):
            line_rows = [r for r in own if (r["case"], r["micro_batch"]) == (norm, str(size))]
            seen = [row for row in line_rows if row["metric"] == "loss"]
            off = next(float(row["median"]) for row in line_rows if row["metric"] == "gradients apart")
            name = f"{int(batch) // size} x {size}"
            colours.setdefault(name, colour)
            epochs = range(1, len(seen) + 1)
            middle, low, high = ([float(r[key]) for r in seen] for key in ("median", "p20", "p80"))
            label = f"{name}: first gradient off by {off:.2g}" if off else f"{name}"
            axes.plot(epochs, middle, color=colour, linestyle=line, linewidth=2, label=label)
            axes.fill_between(epochs, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.legend(frameon=False, fontsize=9)
        axes.grid(axis="y", color=FAINT)
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].set_yticks((0.1, 0.2, 0.5, 1, 2), ("0.1", "0.2", "0.5", "1", "2"))
    panels[0].set_ylabel("loss on unseen digits, nats")
    text = (
        f"A net of three convolutions on scikit-learn's digits, batches of {batch}, AdamW; median, range of "
        f"{own[-1]['rounds']} seeds. Off: the length of the difference from the whole batch's gradient, as "
        "a share of it."
    )
    return finish(figure, "Micro-batches are not the batch for a norm over samples", own[0], text)


def table(row: Line, part: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """The conditions and the table."""
    return (
        conditions(row, f"python -m benchmarks.suites.memory --only {part}") + "\n\n" + markdown(head, lines)
    )


def grows_table(rows: Sequence[Line]) -> str:
    own, lines = of(rows, "memory", "grows"), []
    for model in GROWS:
        found = curve_of(own, model, "fusedacc")
        fixed, each = share(found)
        at = (found.full, found.by_size[found.samples // 2], found.by_size[1])
        sizes = [f"{sum(kinds.values()) / MIB:.0f}" for kinds in at]
        lines.append([MODELS[model], f"{fixed / MIB:.0f}", f"{each / MIB:.2f}", *sizes])
    head = ("", "what stays, MiB", "a sample adds, MiB", "1 x 64", "2 x 32", "64 x 1")
    return table(own[0], "grows", head, lines)


def halves_table(rows: Sequence[Line]) -> str:
    own, lines = of(rows, "memory", "halves"), []
    for model in HALVES:
        peaks = [figure_of(own, model, loop, "peak") for loop in list(HALVED)[:3]]
        off = [figure_of(own, model, loop, "gradients apart") for loop in ("fusedacc, 2 x 32", SHUFFLED)]
        lines.append([MODELS[model], *(f"{peak:.0f}" for peak in peaks), *(f"{each:.1e}" for each in off)])
    head = ("", "peak of 1 x 64, MiB", "of 2 x 32", "by the wrapper")
    return table(own[0], "halves", (*head, "gradients: 2 x 32 by the wrapper", "shuffled"), lines)


CHARTS = {"grows": grows, "halves": halves, "per_sample": per_sample, "norms": norms}


def main() -> None:
    tables = {"grows": grows_table, "halves": halves_table}
    run(__doc__, MEMORY, ROOT / "docs" / "memory.md", "memory", CHARTS, tables)


if __name__ == "__main__":
    main()
