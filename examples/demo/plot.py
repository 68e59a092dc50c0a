"""Draws the demo's plot: losses, times, bytes moved and peak memory."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from fusedacc.commands import plots
from fusedacc.commands.plots import BLUE, FAINT, GREEN, INK, ORANGE, QUIET, VERMILION

from .measure import PARTS
from .report import ModelResult, Result, equality

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOP_COLOURS = {"stock": ORANGE, "fusedacc": BLUE, "fusedacc, model=": INK}
PART_COLOURS = dict(zip(PARTS, ("#C8C8C8", VERMILION, GREEN), strict=True))
FASTER, SLOWER = "#007A5A", "#C04A00"


def plot(result: Result, path: Path) -> None:
    """Draw losses, time, bytes by part and peak memory, in one row per model, and write a PNG to `path`."""
    import matplotlib
    from matplotlib.figure import Figure

    highest = max(model.ratio(loop)[2] for model in result.models for loop in model.wrapped)
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(13.5, 3.7 * len(result.models)))
        rows = figure.subplots(len(result.models), 4, squeeze=False, width_ratios=(1.2, 1, 1.2, 0.9))
        for (losses, times, moved, peaks), model in zip(rows, result.models, strict=True):
            losses.set_title("\n\nTraining loss")  # leaves room for the row's heading
            draw_losses(losses, model)
            draw_times(times, model, max(1.1, 1.03 * highest))
            draw_bytes(moved, model)
            draw_peaks(peaks, model)
        plots.finish(figure, "Two small transformers: what accumulation costs", [result.conditions])
        for (losses, *_), model in zip(rows, result.models, strict=True):
            top = losses.get_position().y1 + 0.42 / figure.get_figheight()
            figure.text(plots.LEFT, top, heading(model), fontsize=12, fontweight="bold", color=INK)
        plots.save(figure, [path], 140)


def heading(model: ModelResult) -> str:
    return (
        f"{model.name.capitalize()}, vocabulary of {model.vocabulary:,}, micro-batches of "
        f"{model.micro_batch_size} x {model.context}: gradients are {100 * model.share_of_gradients():.0f} % "
        "of the bytes that plain PyTorch moves"
    )


def draw_losses(axes: Axes, model: ModelResult) -> None:
    updates = range(1, len(model.losses["stock"]) + 1)
    dotted = {"linewidth": 1.2, "linestyle": (0, (1, 2))}
    lines = ({"linewidth": 5, "alpha": 0.55}, {"linewidth": 1.8}, dotted)
    for (loop, losses), line in zip(model.losses.items(), lines, strict=True):
        told = f": {equality(model, loop)}" if loop in model.wrapped else ""
        axes.plot(updates, losses, color=LOOP_COLOURS[loop], label=short(loop) + told, **line)
    axes.set_xlabel("update")
    axes.grid(axis="y", color=FAINT)
    axes.legend(frameon=False, loc="upper right", fontsize=9)


def draw_times(axes: Axes, model: ModelResult, right: float) -> None:
    """Draw the times. `right` is the end of the axis, the same for all models."""
    axes.barh(0, 1, color=LOOP_COLOURS["stock"], alpha=0.75, height=0.62)
    stock = statistics.median(model.times["stock"])
    axes.text(right, 0, f"{1e3 * stock:.0f} ms", va="center")
    for position, loop in enumerate(model.wrapped, start=1):
        median, low, high = model.ratio(loop)
        axes.barh(position, median, color=LOOP_COLOURS[loop], alpha=0.75, height=0.62)
        errors = [[median - low], [high - median]]
        axes.errorbar(median, position, xerr=errors, color="#999999", capsize=4, linewidth=1.8)
        colour = FASTER if high < 1 else SLOWER if low > 1 else QUIET
        axes.text(right, position, f"{median:.2f}", va="bottom", color=colour, fontweight="bold", fontsize=12)
        axes.text(right, position + 0.03, f"{low:.2f} to {high:.2f}", va="top", color=colour, fontsize=8)
    axes.axvline(1, color=QUIET, linewidth=1, linestyle="--")
    finish_bars(axes, list(model.times), "Time per update (stock = 1)")
    axes.set_xlim(0, right)


def draw_bytes(axes: Axes, model: ModelResult) -> None:
    for position, (loop, parts) in enumerate(model.parts.items()):
        left = 0.0
        for part, size in parts.items():
            look = {"color": PART_COLOURS[part], "height": 0.62, "edgecolor": "white"}
            axes.barh(position, size / 1e9, left=left, label=part if loop == "stock" else None, **look)
            left += size / 1e9
        axes.text(left, position, f" {left:.2f}", va="center")
    finish_bars(axes, list(model.parts), "Bytes moved in a window (GB)", room=1.4)
    axes.set_xlim(0, 1.15 * max(model.bytes(loop) for loop in model.parts) / 1e9)
    axes.legend(frameon=False, loc="upper left", fontsize=8.5, borderaxespad=0, labelspacing=0.3)


def draw_peaks(axes: Axes, model: ModelResult) -> None:
    for position, (loop, peak) in enumerate(model.peaks.items()):
        axes.barh(position, peak / 1e6, color=LOOP_COLOURS[loop], alpha=0.75, height=0.62)
        axes.text(peak / 1e6, position, f" {peak / 1e6:.1f}", va="center")
    finish_bars(axes, list(model.peaks), "Peak memory (MB)")
    axes.set_xlim(0, 1.3 * max(model.peaks.values()) / 1e6)


def finish_bars(axes: Axes, loops: list[str], title: str, room: float = 0.0) -> None:
    """Format the axes of a bar chart. `room` is the space above the bars, in bars."""
    axes.set_yticks(range(len(loops)), [short(loop) for loop in loops])
    axes.set_ylim(len(loops) - 0.5, -0.5 - room)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title)
    axes.grid(axis="x", color=FAINT)
    axes.spines["left"].set_visible(False)


def short(loop: str) -> str:
    return loop.removeprefix("fusedacc, ")
