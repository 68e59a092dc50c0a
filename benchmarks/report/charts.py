"""The plots of plot.py: each takes all rows of a results file and returns a matplotlib Figure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fusedacc.commands.measuring import plots, records
from fusedacc.commands.measuring.records import PEAK, Line

from .headline import MODE, MODEL, ROLES, TITLES, against_best, headline
from .pages import NoRows, finish

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
#: Colour and marker of each provider that is drawn.
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


def newest(rows: Sequence[Line], benchmark: str, wanted: Callable[[Line], object], what: str) -> list[Line]:
    """The rows that are wanted, of the last run that has such; none of what could not run."""
    own = [row for row in rows if row["benchmark"] == benchmark and row["median"] and wanted(row)]
    if not own:
        raise NoRows(f"there are no rows of benchmarks/suites/{benchmark}.py with {what}")
    return records.newest(own, benchmark)


def bytes_per_parameter(rows: Sequence[Line]) -> Figure:
    """A bar per setting and way, stacked by part; ours is told against the best of stock."""
    found = headline(rows)
    if not found:
        raise NoRows("there are no rows of benchmarks/suites/models.py with a counted window of 8")
    figure, axes = plt.subplots(figsize=(10.5, 6.4))
    bars = plots.Bars(axes, max(counted.total for counted in found))
    for title in dict.fromkeys(counted.title for counted in found):
        bars.heading(title)
        own = {counted.role: counted for counted in found if counted.title == title}
        for role in (role for role in ROLES if role in own):
            counted = own[role]
            stock = "" if counted.ours else f"{role.replace('as written', 'stock as written')}: "
            parts = {part: counted.parts[part] for part in PARTS if counted.parts.get(part)}
            end = bars.add((stock + counted.way).removesuffix(": "), parts, PARTS)
            told = f"{counted.total:.1f}"
            if counted.ours and (ratio := against_best(counted, own)):
                told += f"  ({ratio})"
            bars.tell(end, told)
    bars.finish("bytes read and written per parameter in one window", room=1.12)
    about = found[0].row
    text = (
        f"Counted on {about['shapes']}, each operand of each operator once. In brackets: against best stock."
    )
    if any(counted.role == MODEL for counted in found):
        text += " With model= these are weights of Linear layers; what products read is in no bar."
    title = "Memory traffic of one window: 8 micro-batches, clipping, AdamW"
    return finish(figure, title, about, text, PARTS)


def bandwidth(rows: Sequence[Line]) -> Figure:
    """A panel per dtype pair, a line per provider; the same bytes for all, so that higher is faster."""
    own = newest(rows, "kernels", lambda row: row["mode"] == "accumulate" and elements(row), "one tensor")
    wanted = ("bfloat16 into float32", "float32 into float32")
    pairs = [pair for pair in wanted if len({elements(row) for row in own if row["dtypes"] == pair}) > 1]
    if not pairs:
        raise NoRows("the newest rows of benchmarks/suites/kernels.py with one tensor have no two sizes")
    size = (1.5 + 5.5 * len(pairs), 5.4)
    figure, panels = plt.subplots(1, len(pairs), figsize=size, sharey=True, squeeze=False)
    top = 0.0
    for axes, pair in zip(panels[0], pairs, strict=True):
        top = max(top, lines_of_pair(axes, [row for row in own if row["dtypes"] == pair]))
        axes.set(title=f"{pair.replace('into', 'gradients into')} sums", xlabel="elements in one tensor")
    for axes in panels[0]:
        axes.set_ylim(0, 1.08 * top)
        ends = {line.get_label(): line.get_ydata()[-1] for line in axes.get_lines()}
        colours = {line.get_label(): line.get_color() for line in axes.get_lines()}
        plots.label_ends(axes, ends, colours, axes.get_lines()[0].get_xdata()[-1], 1.08 * top)
    panels[0][0].set_ylabel("GB/s of the bytes that are needed")
    text = (
        "Needed: each gradient read once, each sum read and written once; the same bytes for every way, "
        "whatever it moves, so that a line twice as high is twice as fast. Medians. On a CPU, work in place "
        "can pass the copy: its destination is read too, which is not counted."
    )
    return finish(figure, "How fast one tensor is accumulated, against its size", own[0], text)


def elements(row: Line) -> int:
    """Of one tensor; 0 for lists of more."""
    size = re.match(r"1 tensor of (\d+)", row["shapes"])
    return int(size[1]) if size else 0


def lines_of_pair(axes: Axes, own: Sequence[Line]) -> float:
    """Draws a line per provider, and the faster of copy and triad. Returns the highest value."""
    sizes = sorted({elements(row) for row in own})
    lines: dict[str, dict[int, float]] = {PEAK_LABEL: {}}
    for size in sizes:
        at = {row["provider"]: row for row in own if elements(row) == size}
        lines[PEAK_LABEL][size] = max(float(at[name]["gb_per_s"]) for name in PEAK if name in at)
        of = {name: row for name, row in at.items() if name in LINES}
        needed = min(float(row["bytes"]) for row in of.values())
        for name in of:
            lines.setdefault(name, {})[size] = needed / float(of[name]["median"]) / 1e3  # MB/s to GB/s
    style = {"color": plots.INK, "linestyle": (0, (5, 2)), "linewidth": 1.6, "zorder": 3}
    for name, line in lines.items():
        if name in LINES:
            colour, marker = LINES[name]
            width, order = (2.8, 4) if name.startswith(plots.OURS) else (1.4, 2)
            style = {"color": colour, "marker": marker, "markersize": 5, "linewidth": width, "zorder": order}
        axes.plot(list(line), list(line.values()), label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [records.count(size) for size in sizes])
    axes.grid(axis="y", color=plots.FAINT)
    axes.set_axisbelow(True)
    return max(value for line in lines.values() for value in line.values())


def speedup(rows: Sequence[Line]) -> Figure:
    """A bar per model and setting: a window's time by the fastest exact way of stock, over ours."""
    own = newest(
        rows, "models", lambda row: (row["mode"], row["metric"]) == (MODE, "time"), "a window's time"
    )
    cases: dict[tuple[str, str], dict[str, Line]] = {}
    for row in (row for row in own if row["provider"] == plots.OURS and row["speedup"]):
        cases.setdefault((row["dtypes"], row["case"]), {})[row["against"]] = row
    if not cases:
        raise NoRows(f"the newest rows of benchmarks/suites/models.py time no {MODE} against stock")
    settings = [dtypes for dtypes in TITLES if any(dtypes == of for of, _ in cases)]
    figure, axes = plt.subplots(figsize=(10.5, 1.6 + 0.42 * (len(cases) + len(settings))))
    longest = max(min(float(row["speedup"]) for row in found.values()) for found in cases.values())
    bars = plots.Bars(axes, max(1.0, longest))
    written = {(r["dtypes"], r["case"], r["provider"]) for r in own if r["note"].startswith("as written: ")}
    for dtypes in settings:
        bars.heading(TITLES[dtypes])
        for (of, case), found in cases.items():
            if of != dtypes:
                continue
            best = min(found.values(), key=lambda row: float(row["speedup"]))
            ratio = float(best["speedup"])
            bars.add(
                f"{MODELS.get(case, case)}: {best['shapes']}", {"": ratio}, {"": plots.BLUE}, sizes=False
            )
            bars.tell(max(1.02, ratio), f"{ratio:.2f} x {best['against']}")
            line = (bars.position - 0.5, bars.position + 0.5)
            axes.plot((1, 1), line, color=plots.INK, linewidth=1.6, zorder=4)
            for name in (name for name in found if (dtypes, case, name) in written):
                place = ratio / float(found[name]["speedup"])
                axes.plot(
                    place, bars.position, marker="D", color=plots.ORANGE, markeredgecolor="white", zorder=5
                )
    bars.finish("speed of fusedacc, the fastest exact way of stock torch being 1", room=1.5)
    text = (
        "8 micro-batches with gradients provided, clipping, AdamW: no forward and no activations, so in "
        "whole training the difference is smaller. Diamond: stock as written."
    )
    return finish(figure, "Time of one window on the parameters of real models", own[-1], text)


def memory(rows: Sequence[Line]) -> Figure:
    """A bar per way, stacked by kind, for the largest model that was trained in each dtype."""
    by_kind = "peak memory: "
    own = newest(rows, "training", lambda row: row["metric"].startswith(by_kind), "peak memory by kind")
    largest = {row["dtypes"]: row["case"] for row in own}  # sizes grow through a run
    kept = [row for row in own if row["case"] == largest[row["dtypes"]]]
    peaks: dict[tuple[str, str], dict[str, float]] = {}
    for row in kept:
        kind = row["metric"].removeprefix(by_kind)
        peaks.setdefault((row["dtypes"], row["provider"]), {})[kind] = float(row["median"])
    figure, axes = plt.subplots(figsize=(10.5, 1.7 + 0.36 * (len(peaks) + 1.2 * len(largest))))
    bars = plots.Bars(axes, max(sum(kinds.values()) for kinds in peaks.values()))
    for dtypes, case in largest.items():
        bars.heading(f"{dtypes}: {case}")
        for (of, provider), kinds in peaks.items():
            if of == dtypes:
                end = bars.add(provider, {kind: kinds[kind] for kind in KINDS if kinds.get(kind)}, KINDS)
                bars.tell(end, f"{end:.1f} MB")
    bars.finish("MB alive at the peak", room=1.14)
    models = dict.fromkeys(f"{row['case']}: {row['shapes'].partition(';')[0]}" for row in kept)
    text = f"Two updates of two micro-batches, AdamW. {'; '.join(models)}."
    return finish(figure, "Peak memory while the demo's transformer trains", own[-1], text, KINDS)
