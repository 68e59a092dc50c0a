"""The plot of emulated machines: the speed of every cell against stock's, by machine."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator, NullFormatter, NullLocator

from fusedacc.commands.measuring.plots import BLUE, FAINT, GREEN, INK
from fusedacc.commands.measuring.records import Line

from ..machines.cells import LEAST, by_device, parsed
from ..machines.cells import Row as Cell
from ..machines.emulated import MACHINES
from ..machines.loops import MODEL, PLAIN, PRECISIONS
from ..machines.zoo import LAYERS
from .pages import NoRows, finish

COLOURS = {PLAIN: BLUE, MODEL: GREEN}
MARKERS = dict(zip(PRECISIONS, ("o", "s", "^", "v"), strict=True))


def machines(lines: Sequence[Line]) -> Figure:
    """A panel per device; in it a row per machine and loop, a mark per cell: the median of stock's time over
    the loop's."""
    of_devices = by_device(lines)
    panels = {device: rows for device, own in of_devices.items() if (rows := _cells(own))}
    if not panels:
        raise NoRows("there are no rows of benchmarks/machines")
    every = [row for rows in panels.values() for row in rows]
    models = list(dict.fromkeys(row.model for row in every))
    heights = [len({row.machine for row in rows}) for rows in panels.values()]
    figure, places = plt.subplots(
        len(panels),
        figsize=(10.5, 1.6 + 0.6 * len(panels) + 0.75 * sum(heights)),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    panel_axes = list(places.flat)
    for axes, (device, rows) in zip(panel_axes, panels.items(), strict=True):
        _panel(axes, device, rows, models)
    axes = panel_axes[-1]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(MultipleLocator(0.1 if max(row.ratio for row in every) < 2 else 0.5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("speed, the fastest exact way of stock torch being 1")
    keys = [plt.Line2D([], [], color=INK, marker=m, linestyle="", markersize=4.5) for m in MARKERS.values()]
    panel_axes[0].legend(
        keys,
        list(MARKERS),
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(keys),
        fontsize=9,
    )
    text = (
        f"{len(models)} models, windows of up to 8 micro-batches, clipping, AdamW; a mark is the median "
        'of the ratios within a round. Machines other than "as it is" are emulated by environment variables. '
        f"Dashed: {LEAST}, the goal."
    )
    newest = [own[-1] for own in of_devices.values()]
    told = {name: ", ".join(dict.fromkeys(line[name] for line in newest)) for name in ("device", "commit")}
    about = {**lines[-1], **told, "threads": "as named"}
    return finish(figure, "Training speed by machine, model and precision", about, text, COLOURS)


def _cells(lines: Sequence[Line]) -> list[Cell]:
    return [row for row in map(parsed, lines) if row.loop in COLOURS and row.model not in LAYERS]


def _panel(axes: Axes, device: str, rows: Sequence[Cell], models: Sequence[str]) -> None:
    shown = [machine for machine in MACHINES if any(row.machine == machine.name for row in rows)]
    for place, machine in enumerate(shown):
        for lane, (loop, colour) in enumerate(COLOURS.items()):
            height = place + 0.4 * lane - 0.2
            for row in (row for row in rows if (row.machine, row.loop) == (machine.name, loop)):
                shift = 0.26 * (models.index(row.model) / max(1, len(models) - 1) - 0.5)
                marker = MARKERS[row.precision]
                axes.plot(
                    row.ratio, height + shift, marker, color=colour, markersize=4.5, alpha=0.75, zorder=3
                )
    axes.axvline(1, color=INK, linewidth=1.4, zorder=2)
    axes.axvline(LEAST, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=2)
    axes.set_yticks(range(len(shown)), [machine.about for machine in shown])
    axes.set_ylim(len(shown) - 0.45, -0.55)
    axes.set_title(device, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=FAINT)
    axes.set_axisbelow(True)
