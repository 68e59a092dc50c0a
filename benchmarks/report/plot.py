"""Draws the newest results: docs/figures/*.png and *.svg.

- bytes: per parameter of one window, by part and loop (rows of models.py);
- bandwidth: of the bytes that accumulation needs, by size, beside a copy's (kernels.py);
- speedup: of a window on real models' parameter lists (models.py);
- memory: the peak by kind while the demo trains (training.py).

A plot without rows is skipped, and the reason is printed.
"""

import functools
import re
from collections.abc import Sequence

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fusedacc.commands import plots

from .. import records
from ..harness import RESULTS
from ..records import PEAK, Line
from . import drawing, page_tables
from .page_tables import MODE, TITLES, against_best
from .pages import FIGURES, NoRows, arguments, finish, given, newest_with, only, panels, save, shown

PARTS = {
    "weight gradients": plots.GREY,
    "forward": plots.YELLOW,
    "cast": plots.ORANGE,
    "first touch": plots.SKY,
    "accumulate": plots.BLUE,
    "update: cast": plots.VERMILION,
    "update: clip": plots.PINK,
    "update: optimizer": plots.GREEN,
}
KINDS = {
    "weights": plots.GREY,
    "gradients": plots.BLUE,
    "optimizer": plots.GREEN,
    "activations and others": plots.YELLOW,
}
MODELS = {
    "resnet50": "ResNet-50",
    "vit_b_16": "ViT-B/16",
    "bert_base": "BERT-base",
    "gpt2": "GPT-2 124M",
    "gpt2_xl": "GPT-2 1.5B",
    "llama3_8b": "Llama-3 8B",
    "mixtral_8x7b": "Mixtral 8x7B",
}
#: The colour and marker of each provider that is drawn.
LINES = {
    "fusedacc cpu": (plots.BLUE, "o"),
    "fusedacc cuda": (plots.BLUE, "o"),
    "fusedacc triton": (plots.SKY, "s"),
    "add_": (plots.ORANGE, "^"),
    "torch._foreach_add_": (plots.VERMILION, "v"),
    "foreach cast and add": (plots.PINK, "D"),
    "autograd grad_dtype": (plots.GREEN, "P"),
    "compiled foreach": ("#000000", "X"),
    "by hand": ("#8A8A8A", "*"),
    "apex axpby": ("#8C7A00", "<"),
}
PEAK_LABEL = "measured peak: copy, triad"


def bytes_per_parameter(rows: Sequence[Line]) -> Figure:
    """Draw a bar per setting and loop, stacked by part. Ours show the difference from the best of stock."""
    found = page_tables.headline(rows)
    figure, axes = plt.subplots(figsize=(10.5, 6.4))
    every = [counted for by_role in found.values() for counted in by_role.values()]
    bars = drawing.Bars(axes, max(counted.total for counted in every))
    for title, by_role in found.items():
        bars.heading(title)
        for role, counted in by_role.items():  # in the order of ROLES
            stock = "" if counted.ours else f"{role.replace('as written', 'stock as written')}: "
            parts = {part: counted.parts[part] for part in PARTS if counted.parts.get(part)}
            end = bars.add(shown(stock + counted.way).removesuffix(": "), parts, PARTS)
            ratio = against_best(counted, by_role) if counted.ours else ""
            bars.tell(end, f"{counted.total:.1f}" + (f"  ({ratio})" if ratio else ""))
    bars.finish("bytes read and written per parameter in one window", room=1.12)
    about = every[0].row
    text = (
        f"Counted on {about['shapes']}, each operand of each operator once. In brackets: relative to the "
        "best plain PyTorch loop."
    )
    if any(page_tables.MODEL in by_role for by_role in found.values()):
        text += " With model= the parameters are weights of Linear layers; what products read is in no bar."
    title = "Memory traffic of one window: 8 micro-batches, clipping, AdamW"
    return finish(figure, title, about, text, PARTS)


def bandwidth(rows: Sequence[Line]) -> Figure:
    """Draw a panel per dtype pair and a line per provider. All have the same bytes, so higher is faster."""
    newest_rows = newest_with(
        rows, "kernels", lambda row: row["mode"] == "accumulate" and elements(row), "one tensor"
    )
    wanted = ("bfloat16 into float32", "float32 into float32")
    pairs = [
        pair for pair in wanted if len({elements(row) for row in newest_rows if row["dtypes"] == pair}) > 1
    ]
    if not pairs:
        raise NoRows("the newest rows of benchmarks/suites/kernels.py with one tensor have no two sizes")
    figure, [row] = panels(1, len(pairs), (1.5 + 5.5 * len(pairs), 5.4), sharey=True)
    top = 1.08 * max(
        lines_of_pair(axes, only(newest_rows, dtypes=pair)) for axes, pair in zip(row, pairs, strict=True)
    )
    for axes, pair in zip(row, pairs, strict=True):
        axes.set(title=f"{pair.replace('into', 'gradients into')} sums", xlabel="elements in one tensor")
        axes.set_ylim(0, top)
        ends = {line.get_label(): line.get_ydata()[-1] for line in axes.get_lines()}
        colours = {line.get_label(): line.get_color() for line in axes.get_lines()}
        drawing.label_ends(axes, ends, colours, axes.get_lines()[0].get_xdata()[-1], top)
    row[0].set_ylabel("GB/s of the bytes that are needed")
    text = (
        "Needed: each gradient read once, each sum read and written once. These bytes are the same for every "
        "loop, so a line twice as high is twice as fast. Medians. On a CPU, work in place can exceed the "
        "copy, whose destination is read too, which is not counted."
    )
    return finish(figure, "How fast one tensor is accumulated, by its size", newest_rows[0], text)


def elements(row: Line) -> int:
    """Return the elements of one tensor; 0 for longer lists."""
    size = re.match(r"1 tensor of (\d+)", row["shapes"])
    return int(size[1]) if size else 0


def lines_of_pair(axes: Axes, newest_rows: Sequence[Line]) -> float:
    """Draw a line per provider, and the faster of copy and triad. Return the highest value."""
    sizes = sorted({elements(row) for row in newest_rows})
    lines: dict[str, dict[int, float]] = {PEAK_LABEL: {}}
    for size in sizes:
        at = {row["provider"]: row for row in newest_rows if elements(row) == size}
        lines[PEAK_LABEL][size] = max(float(at[name]["gb_per_s"]) for name in PEAK if name in at)
        of = {name: row for name, row in at.items() if name in LINES}
        needed = min(float(row["bytes"]) for row in of.values())
        for name in of:
            lines.setdefault(name, {})[size] = needed / float(of[name]["median"]) / 1e3  # MB/s to GB/s
    style = {"color": plots.INK, "linestyle": (0, (5, 2)), "linewidth": 1.6, "zorder": 3}
    for name, line in lines.items():
        if name in LINES:
            colour, marker = LINES[name]
            width, order = (2.8, 4) if name.startswith(drawing.OURS) else (1.4, 2)
            style = {"color": colour, "marker": marker, "markersize": 5, "linewidth": width, "zorder": order}
        axes.plot(list(line), list(line.values()), label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [records.count(size) for size in sizes])
    return max(value for line in lines.values() for value in line.values())


def speedup(rows: Sequence[Line]) -> Figure:
    """Draw a bar per model and setting: the speed relative to the fastest exact loop of stock."""
    newest_rows = newest_with(
        rows, "models", lambda row: (row["mode"], row["metric"]) == (MODE, "time"), "a window's time"
    )
    cases: dict[tuple[str, str], dict[str, Line]] = {}
    for row in (row for row in newest_rows if row["provider"] == drawing.OURS and row["speedup"]):
        cases.setdefault((row["dtypes"], row["case"]), {})[row["against"]] = row
    if not cases:
        raise NoRows(f"the newest rows of benchmarks/suites/models.py time no {MODE} against stock")
    ratios = {key: {name: float(row["speedup"]) for name, row in of.items()} for key, of in cases.items()}
    settings = [dtypes for dtypes in TITLES if any(dtypes == of for of, _ in cases)]
    figure, axes = plt.subplots(figsize=(10.5, 1.6 + 0.42 * (len(cases) + len(settings))))
    bars = drawing.Bars(axes, max(1.0, *(min(found.values()) for found in ratios.values())))
    written = {
        (r["dtypes"], r["case"], r["provider"]) for r in newest_rows if r["note"].startswith("as written: ")
    }
    for dtypes in settings:
        bars.heading(TITLES[dtypes])
        for (_, case), found in ((key, found) for key, found in ratios.items() if key[0] == dtypes):
            name = min(found, key=found.__getitem__)
            label = f"{MODELS.get(case, case)}: {cases[dtypes, case][name]['shapes']}"
            bars.add(label, {"": found[name]}, {"": plots.BLUE}, sizes=False)
            bars.tell(max(1.02, found[name]), f"{found[name]:.2f} x {shown(name)}")
            line = (bars.position - 0.5, bars.position + 0.5)
            axes.plot((1, 1), line, color=plots.INK, linewidth=1.6, zorder=4)
            look = {"marker": "D", "color": plots.ORANGE, "markeredgecolor": "white", "zorder": 5}
            for other in (other for other in found if (dtypes, case, other) in written):
                axes.plot(found[name] / found[other], bars.position, **look)
    bars.finish("speed of fusedacc relative to the fastest exact PyTorch loop", room=1.5)
    text = (
        "8 micro-batches with given gradients, clipping, AdamW. There is no forward and no activation, so "
        "the difference is smaller in whole training. Diamond: PyTorch as written in tutorials."
    )
    return finish(figure, "Time of one window on the parameters of real models", newest_rows[-1], text)


def memory(rows: Sequence[Line]) -> Figure:
    """Draw a bar per loop, stacked by kind, for the largest model that was trained in each dtype."""
    by_kind = "peak memory: "
    newest_rows = newest_with(
        rows, "training", lambda row: row["metric"].startswith(by_kind), "peak memory by kind"
    )
    largest = {row["dtypes"]: row["case"] for row in newest_rows}  # sizes grow through a run
    kept = [row for row in newest_rows if row["case"] == largest[row["dtypes"]]]
    peaks: dict[tuple[str, str], dict[str, float]] = {}
    for row in kept:
        kind = row["metric"].removeprefix(by_kind)
        peaks.setdefault((row["dtypes"], row["provider"]), {})[kind] = float(row["median"])
    figure, axes = plt.subplots(figsize=(10.5, 1.7 + 0.36 * (len(peaks) + 1.2 * len(largest))))
    bars = drawing.Bars(axes, max(sum(kinds.values()) for kinds in peaks.values()))
    for dtypes, case in largest.items():
        bars.heading(f"{dtypes}: {case}")
        for (_, provider), kinds in ((key, kinds) for key, kinds in peaks.items() if key[0] == dtypes):
            parts = {kind: kinds[kind] for kind in KINDS if kinds.get(kind)}
            end = bars.add(shown(provider), parts, KINDS)
            bars.tell(end, f"{end:.1f} MB")
    bars.finish("MB alive at the peak", room=1.14)
    models = dict.fromkeys(f"{row['case']}: {row['shapes'].partition(';')[0]}" for row in kept)
    text = f"Two updates of two micro-batches, AdamW. {'; '.join(models)}."
    return finish(figure, "Peak memory while the demo's transformer trains", newest_rows[-1], text, KINDS)


#: By the name of the file.
CHARTS = {"bytes": bytes_per_parameter, "bandwidth": bandwidth, "speedup": speedup, "memory": memory}


def main() -> None:
    options, rows = given(arguments(__doc__, results=RESULTS, out=FIGURES), "make bench")
    matplotlib.use("Agg")
    for name, chart in CHARTS.items():
        save(name, functools.partial(chart, rows), options.out)


if __name__ == "__main__":
    main()
