"""Draws docs/figures/memory_*.png and *.svg from the newest rows of suites/memory.py, and writes the tables
of docs/memory.md: `make memory-figures`.
"""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fusedacc.commands.plan import COLOURS, Curve, draw_curve
from fusedacc.commands.plots import BLUE, GREEN, GREY, INK, ORANGE, SKY, VERMILION

from ..harness import ROOT
from ..records import Line
from ..suites.memory import GROWS, HALVES, MEMORY, MIB, SHUFFLED
from .pages import band, finish, of, only, panels, run, table, values

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
LINES = dict(zip(MODELS, (BLUE, GREEN, ORANGE, VERMILION, SKY, INK), strict=True))
COMMAND = "python -m benchmarks.suites.memory --only"


def curves(rows: Sequence[Line]) -> list[Curve]:
    """Return what was predicted of each model, as `fusedacc plan` draws it."""
    found = []
    for model in GROWS:
        sizes: dict[int, dict[str, int]] = {}
        for row in only(rows, case=model, provider="fusedacc"):
            sizes.setdefault(int(row["micro_batch"]), {})[row["metric"]] = round(float(row["median"]) * MIB)
        batch = max(sizes)
        found.append(Curve(MODELS[model], dict(sorted(sizes.items())[:-1]), sizes[batch], batch, None))
    return found


def share(found: Curve) -> tuple[float, float]:
    """Return the fixed bytes, and those that each sample adds between the first and the last micro-batch."""
    first, *_, last = found.by_size
    low, high = (sum(found.by_size[size].values()) for size in (first, last))
    each = (high - low) / (last - first)
    return low - each * first, each


def grows(rows: Sequence[Line]) -> Figure:
    """Draw areas by kind for each model, and the whole batch as a bar."""
    newest_rows = of(rows, "memory", "grows")
    found = curves(newest_rows)
    figure, [row] = panels(1, len(found), (13.5, 4.6))
    for axes, each in zip(row, found, strict=True):
        axes.grid(visible=False)
        top = 1.1 * sum(each.full.values())
        draw_curve(axes, each, int(2 * top), top, MIB)
        axes.set_title(f"{each.title}: {share(each)[1] / MIB:.2g} MiB a sample")
        axes.set_xlabel("samples in a micro-batch")
    row[0].set_ylabel("MiB at the peak")
    text = (
        f"Predicted by fusedacc.planner for updates of {found[0].samples} samples, with the wrapper and "
        "AdamW, float32 on a CPU. The bar is the whole batch at once."
    )
    colours = {kind: colour for kind, colour in COLOURS.items() if kind in found[0].full}
    return finish(figure, "What grows with a micro-batch, and what stays", newest_rows[0], text, colours)


def figure_of(rows: Sequence[Line], model: str, loop: str, metric: str) -> float:
    return values(only(rows, case=model, provider=loop, metric=metric))[0]


def halves(rows: Sequence[Line]) -> Figure:
    """Draw the peak and the time of each model, relative to the whole batch."""
    newest_rows = of(rows, "memory", "halves")
    figure, [row] = panels(1, 2, (11.5, 4.4))
    titles = {"peak": "peak memory", "time, share": "time of an update"}
    for axes, (metric, title) in zip(row, titles.items(), strict=True):
        for place, model in enumerate(HALVES):
            base = figure_of(newest_rows, model, WHOLE, metric)
            for lane, (loop, colour) in enumerate(HALVED.items()):
                at = place + 0.2 * (lane - 1.5)
                height = figure_of(newest_rows, model, loop, metric) / base
                axes.bar(at, height, 0.18, color=colour)
                axes.text(at, height, f"{height:.2f}", ha="center", va="bottom", fontsize=7.5, color=INK)
        axes.set_xticks(range(len(HALVES)), [MODELS[model] for model in HALVES])
        axes.axhline(1, color=INK, linewidth=1)
        axes.set_title(title)
    text = (
        "Relative to 64 samples at once. Peaks are recorded during two updates with AdamW, with parameters "
        "and optimizer state. Times are medians over rounds of the ratio within a round."
    )
    return finish(figure, "64 samples at once, and as 2 x 32", newest_rows[0], text, HALVED)


def per_sample(rows: Sequence[Line]) -> Figure:
    """Draw the time of a sample for each model, relative to the largest micro-batch."""
    newest_rows = of(rows, "memory", "per_sample")
    figure, [[axes]] = panels(1, 1, (9.5, 5.0))
    colours = {}
    for model in dict.fromkeys(row["case"] for row in newest_rows):
        line = only(newest_rows, case=model, metric="time, share")
        sizes = [int(row["micro_batch"]) for row in line]
        least = values(only(newest_rows, case=model, metric="time", micro_batch=str(sizes[-1])))[0]
        quantiles = (values(line, column) for column in ("median", "p20", "p80"))
        band(axes, sizes, *quantiles, LINES[model], marker="o", markersize=5)
        colours[f"{MODELS[model]}: {least:.3g} ms"] = LINES[model]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set(xlabel="samples in a micro-batch", ylabel=f"time of a sample, relative to {sizes[-1]}")
    text = (
        "Forward, backward and accumulation of a micro-batch, divided by its samples. The key shows the time "
        "of a sample in the largest micro-batch. Band: p20 to p80 of rounds in which sizes take turns."
    )
    return finish(
        figure, "Where a smaller micro-batch costs time, and where not", newest_rows[0], text, colours
    )


def norms(rows: Sequence[Line]) -> Figure:
    """Draw the loss by epoch for each norm and micro-batch."""
    newest_rows = of(rows, "memory", "norms")
    names = list(dict.fromkeys(row["case"] for row in newest_rows))
    figure, [row] = panels(1, len(names), (10.5, 4.6), sharey=True)
    batch = newest_rows[0]["batch"]
    for axes, norm in zip(row, names, strict=True):
        axes.set(title=norm, xlabel="epoch", yscale="log")
        sizes = dict.fromkeys(row["micro_batch"] for row in only(newest_rows, case=norm))
        for size, colour, style in zip(sizes, (INK, BLUE, VERMILION), ("-", "--", ":"), strict=False):
            line = only(newest_rows, case=norm, micro_batch=size)
            seen = only(line, metric="loss")
            off = values(only(line, metric="gradients apart"))[0]
            name = f"{int(batch) // int(size)} x {size}" + (f": first gradient off by {off:.2g}" * bool(off))
            quantiles = (values(seen, column) for column in ("median", "p20", "p80"))
            band(axes, range(1, len(seen) + 1), *quantiles, colour, linestyle=style, label=name)
        axes.legend(frameon=False, fontsize=9)
    row[0].yaxis.set_minor_locator(NullLocator())
    row[0].set_yticks((0.1, 0.2, 0.5, 1, 2), ("0.1", "0.2", "0.5", "1", "2"))
    row[0].set_ylabel("loss on unseen digits, nats")
    text = (
        f"A net of three convolutions on scikit-learn's digits, batches of {batch}, AdamW. Median and range "
        f"of {newest_rows[-1]['rounds']} seeds. Off: the relative difference from the whole batch's gradient."
    )
    return finish(figure, "Micro-batches are not the batch for a norm over samples", newest_rows[0], text)


def grows_table(rows: Sequence[Line]) -> str:
    newest_rows = of(rows, "memory", "grows")
    lines = []
    for found in curves(newest_rows):
        fixed, each = share(found)
        at = (found.full, found.by_size[found.samples // 2], found.by_size[1])
        sizes = [f"{sum(kinds.values()) / MIB:.0f}" for kinds in at]
        lines.append([found.title, f"{fixed / MIB:.0f}", f"{each / MIB:.2f}", *sizes])
    head = ("", "what stays, MiB", "a sample adds, MiB", "1 x 64", "2 x 32", "64 x 1")
    return table(newest_rows[0], f"{COMMAND} grows", head, lines)


def halves_table(rows: Sequence[Line]) -> str:
    newest_rows = of(rows, "memory", "halves")
    lines = []
    for model in HALVES:
        peaks = [figure_of(newest_rows, model, loop, "peak") for loop in list(HALVED)[:3]]
        off = [
            figure_of(newest_rows, model, loop, "gradients apart") for loop in ("fusedacc, 2 x 32", SHUFFLED)
        ]
        lines.append([MODELS[model], *(f"{peak:.0f}" for peak in peaks), *(f"{each:.1e}" for each in off)])
    head = ("", "peak of 1 x 64, MiB", "of 2 x 32", "by the wrapper", "gradients: 2 x 32 by the wrapper")
    return table(newest_rows[0], f"{COMMAND} halves", (*head, "shuffled"), lines)


CHARTS = {"grows": grows, "halves": halves, "per_sample": per_sample, "norms": norms}


def main() -> None:
    tables = {"grows": grows_table, "halves": halves_table}
    run(__doc__, MEMORY, ROOT / "docs" / "memory.md", "memory", CHARTS, tables)


if __name__ == "__main__":
    main()
