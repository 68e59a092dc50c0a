"""A picture of plans: memory by kind against the micro-batch size, with the budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...planner import budget as amounts
from ...planner.allocations import KINDS, LIBRARIES
from ...planner.budget import format_bytes
from ...planner.prediction import Predictor
from ...planner.training import Batch, models_own_loss
from ..measuring.plots import BLUE, GREEN, GREY, INK, SKY, STYLE, VERMILION, YELLOW, finish, save, swatches
from .factory import Training

#: Number of sizes per curve, which is nearly straight in between.
POINTS = 6
#: Draw up to so many times the micro-batch that fits.
BEYOND = 2


@dataclasses.dataclass(frozen=True)
class Curve:
    """Bytes by kind at a few micro-batch sizes, and with the whole batch as one."""

    title: str
    by_size: Mapping[int, Mapping[str, int]]
    full: Mapping[str, int]
    samples: int
    #: The micro-batch that fits; None if not even one sample does.
    chosen: int | None


def sizes_to(reach: int) -> list[int]:
    count = min(POINTS, reach)
    return sorted({round(1 + (reach - 1) * index / max(1, count - 1)) for index in range(count)})


def reach_of(chosen: int | None, samples: int) -> int:
    """Return the largest micro-batch that is worth drawing, below the whole batch."""
    return max(1, min(samples - 1, max(4, BEYOND * (chosen or 1))))


def curve(
    title: str,
    training: Training,
    samples: int,
    chosen: int | None,
    reach: int,
    device: torch.device,
    note: Callable[[int], None],
) -> Curve:
    """Predict memory at each size up to `reach`, and with all samples at once.

    samples: per update on one rank. note: called with each size before it runs.
    """
    predictor = Predictor(
        training.model,
        training.optimizer,
        Batch(training.sample_batch, training.batch_dims),
        training.loss_fn or models_own_loss,
        device,
        note,
    )
    scratch = amounts.scratch_bytes() if device.type == "cpu" else 0

    def kinds(size: int) -> dict[str, int]:
        found = predictor.peak(size, math.ceil(samples / size)).by_kind
        return {kind: found.get(kind, 0) for kind in KINDS} | {LIBRARIES: scratch}

    return Curve(title, {size: kinds(size) for size in sizes_to(reach)}, kinds(samples), samples, chosen)


COLOURS = {LIBRARIES: INK, **dict(zip(KINDS, (GREY, BLUE, SKY, GREEN, YELLOW, VERMILION), strict=True))}
#: Height at which a bar is cut, relative to everything else.
TALLEST = 1.6


def draw(curves: Sequence[Curve], budget: int, title: str, about: str, path: Path) -> None:
    """Draw a panel for each loop: areas by kind, the whole batch as one bar, the budget as a line.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    unit, unit_name = _unit(max(budget, *(sum(found.full.values()) for found in curves)))
    areas = max(sum(kinds.values()) for found in curves for kinds in found.by_size.values())
    whole = max(sum(found.full.values()) for found in curves)
    top = 1.12 * min(whole, TALLEST * max(areas, budget))
    top = max(top, 1.12 * areas, 1.08 * min(budget, 2 * max(areas, whole)))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.2 + 4.4 * len(curves), 5.2))
        panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
        for axes, found in zip(panels, curves, strict=True):
            draw_curve(axes, found, budget, top, unit)
            fits = "not one sample fits" if found.chosen is None else f"{found.chosen} samples fit"
            axes.set_title(f"{found.title}: {fits}", color=INK)
        panels[0].set_ylabel(f"{unit_name} at the peak")
        shown = {kind: colour for kind, colour in COLOURS.items() if kind in curves[0].full}
        save(finish(figure, title, [about], swatches(shown)), [path])


def draw_curve(axes: Any, found: Curve, budget: int, top: float, unit: int) -> None:
    """Draw one loop's panel. top: the highest byte shown. unit: bytes per unit of the axis."""
    sizes = list(found.by_size)
    shown = [kind for kind in COLOURS if kind in found.full]
    stacked = [[found.by_size[size][kind] / unit for size in sizes] for kind in shown]
    colours = [COLOURS[kind] for kind in shown]
    if len(sizes) > 1:
        axes.stackplot(sizes, stacked, colors=colours, linewidth=0)
    else:
        _bar(axes, sizes[0], 0.6, found.by_size[sizes[0]], shown, unit)
    wide = max(1.0, 0.09 * sizes[-1])
    place = sizes[-1] + 1.6 * wide
    _bar(axes, place, wide, found.full, shown, unit)
    height = sum(found.full.values())
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


def _bar(
    axes: Any, x: float, width: float, kinds: Mapping[str, int], shown: Sequence[str], unit: int
) -> None:
    base = 0.0
    for kind in shown:
        size = kinds[kind] / unit
        axes.bar(x, size, width, base, color=COLOURS[kind], linewidth=0)
        base += size


def _unit(most: int) -> tuple[int, str]:
    return (2**30, "GiB") if most >= 2**31 else (2**20, "MiB")
