"""A picture of plans: memory by kind against the micro-batch, with the budget. matplotlib is optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...planner.allocations import KINDS, LIBRARIES
from ...planner.budget import format_bytes
from .curves import Curve

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = {
    LIBRARIES: "#222222",
    **dict(zip(KINDS, ("#B4B4B4", "#0072B2", "#56B4E9", "#009E73", "#F0E442", "#D55E00"), strict=True)),
}
INK, QUIET = "#222222", "#555555"
#: A bar may be so many times as high as all else before it is cut.
TALLEST = 1.6


def draw(curves: Sequence[Curve], budget: int, title: str, about: str, path: Path) -> None:
    """A panel for each loop: areas by kind, the whole batch as one bar, and the budget as a line.

    Raises OSError where the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.2 + 4.4 * len(curves), 5.2), facecolor="white")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    unit, unit_name = _unit(max(budget, *(_total(found.full) for found in curves)))
    areas = max(_total(kinds) for found in curves for kinds in found.by_size.values())
    whole = max(_total(found.full) for found in curves)
    top = 1.12 * min(whole, TALLEST * max(areas, budget))
    top = max(top, 1.12 * areas, 1.08 * min(budget, 2 * max(areas, whole)))
    for axes, found in zip(panels, curves, strict=True):
        draw_curve(axes, found, budget, top, unit)
        fits = "not one sample fits" if found.chosen is None else f"{found.chosen} samples fit"
        axes.set_title(f"{found.title}: {fits}", loc="left", fontsize=11, weight="bold", color=INK)
    panels[0].set_ylabel(f"{unit_name} at the peak")
    figure.text(0.012, 0.985, title, fontsize=13, weight="bold", color=INK, va="top")
    key(figure, panels[0], 0.012, 0.925)
    figure.text(0.012, 0.015, about, fontsize=8.5, color=QUIET)
    figure.tight_layout(rect=(0, 0.05, 1, 0.89))
    figure.savefig(path, dpi=150)


def key(figure: Any, axes: Any, x: float, y: float) -> None:
    """What the colours are, above the axes."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="upper left", bbox_to_anchor=(x, y), ncols=len(names), frameon=False,
        fontsize=9, borderaxespad=0, borderpad=0, columnspacing=1.2, handlelength=1.1, handletextpad=0.5,
    )  # fmt: skip


def draw_curve(axes: Any, found: Curve, budget: int, top: float, unit: int) -> None:
    """One loop's panel. `top`: the highest byte that is shown; `unit`: bytes in one of the axis."""
    sizes = list(found.by_size)
    shown = [kind for kind in COLOURS if kind in found.full]
    stacked = [[found.by_size[size][kind] / unit for size in sizes] for kind in shown]
    colours = [COLOURS[kind] for kind in shown]
    if len(sizes) > 1:
        axes.stackplot(sizes, stacked, colors=colours, labels=shown, linewidth=0)
    else:
        _bar(axes, sizes[0], 0.6, found.by_size[sizes[0]], shown, unit, True)
    wide = max(1.0, 0.09 * sizes[-1])
    place = sizes[-1] + 1.6 * wide
    _bar(axes, place, wide, found.full, shown, unit, False)
    height = _total(found.full)
    cut = height > top
    words = f"whole: {format_bytes(height)}" + (", cut" if cut else "")
    axes.text(
        place + wide / 2, min(height, 0.94 * top) / unit, words, fontsize=8.5, color=INK,
        ha="right", va="bottom", bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1},
    )  # fmt: skip
    if budget <= top:
        axes.axhline(budget / unit, color=INK, linestyle=(0, (5, 2)), linewidth=1.6)
        axes.text(
            sizes[0], budget / unit, f" budget {format_bytes(budget)}", va="bottom", fontsize=9, color=INK
        )
    if found.chosen is not None and found.chosen <= sizes[-1]:
        axes.axvline(found.chosen, color=INK, linewidth=1, linestyle=":")
    step = max(1, round((sizes[-1] - 1) / 6))
    ticks = list(range(1, sizes[-1] + 1, step))
    axes.set_xticks([*ticks, place], [*map(str, ticks), str(found.samples)])
    axes.set(xlim=(sizes[0] - (0.5 if len(sizes) == 1 else 0), place + wide), ylim=(0, top / unit))
    axes.set_xlabel("samples in a micro-batch; the bar: all in one")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _bar(
    axes: Any, x: float, width: float, kinds: Mapping[str, int], shown: Sequence[str], unit: int, named: bool
) -> None:
    base = 0.0
    for kind in shown:
        size = kinds[kind] / unit
        label = {"label": kind} if named else {}
        axes.bar(x, size, width, base, color=COLOURS[kind], linewidth=0, **label)
        base += size


def _total(kinds: Mapping[str, int]) -> int:
    return sum(kinds.values())


def _unit(most: int) -> tuple[int, str]:
    return (2**30, "GiB") if most >= 2**31 else (2**20, "MiB")
