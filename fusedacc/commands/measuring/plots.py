"""Shared by all pictures: style, colours, titles, keys, bars in groups, and labels beside lines. Imports
matplotlib only to draw."""

from __future__ import annotations

import argparse
import importlib.util
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "fusedacc",
}
INK, QUIET, FAINT = "#222222", "#555555", "#E6E6E6"
# The colors of Okabe and Ito, which color-blind readers can tell apart.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILION, PINK, YELLOW, GREY = "#D55E00", "#CC79A7", "#F0E442", "#B4B4B4"
#: Providers with this prefix are drawn bold.
OURS = "fusedacc"
LEFT = 0.012


def add_plot_argument(parser: argparse.ArgumentParser, drawn: str) -> None:
    """Add the option `--plot FILE`, whose help says what is drawn."""
    parser.add_argument(
        "--plot",
        type=_picture,
        metavar="FILE",
        help=f"draw {drawn} (.png, .svg, ...; needs matplotlib)",
    )


def _picture(text: str) -> Path:
    """Parse a command's argument that is a picture file."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "the package matplotlib, which draws, is not installed: pip install matplotlib"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    path, allowed = Path(text), sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in allowed:
        why = f"is not a picture format; allowed: .{', .'.join(allowed)}"
    elif not path.parent.is_dir():
        why = "is not in an existing folder; allowed: a file in an existing folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "cannot be written; allowed: a writable file"
    else:
        return path
    raise argparse.ArgumentTypeError(f"{text!r} {why}")


def conditions(about: Mapping[str, str]) -> str:
    """Return the conditions of a row of results, in words."""
    words = [about["device"], f"threads {about['threads']}", f"torch {about['torch']}"]
    words += [f"CUDA {about['cuda']}"] if about["cuda"] else []
    return ", ".join([*words, f"commit {about['commit']}", about["date"][:10]])


def swatches(colours: Mapping[str, str]) -> dict[str, Any]:
    """Return handles of a key: a rectangle of each colour."""
    from matplotlib.patches import Rectangle

    return {name: Rectangle((0, 0), 1, 1, color=colour) for name, colour in colours.items()}


def finish(figure: Figure, title: str, notes: Sequence[str], key: Mapping[str, Any] | None = None) -> Figure:
    """Put the title and the key (handles by name; see `swatches`) above the axes, and the notes beneath."""
    width = int(figure.get_figwidth() * 13)  # characters, capitals among them
    lines = [line for note in notes for line in textwrap.wrap(note, width)]
    inch = 1 / figure.get_figheight()
    figure.text(LEFT, 0.1 * inch, "\n".join(lines), fontsize=8.5, color=QUIET, ha="left", va="bottom")
    figure.text(LEFT, 1 - 0.12 * inch, title, fontsize=13, fontweight="bold", ha="left", va="top")
    top = 0.45
    if key:
        figure.legend(
            list(key.values()), list(key), frameon=False, loc="upper left",
            bbox_to_anchor=(LEFT, 1 - top * inch), ncols=len(key), borderaxespad=0, borderpad=0,
            columnspacing=1.3, handlelength=1.1, handletextpad=0.5, fontsize=9,
        )  # fmt: skip
        top += 0.25
    beneath = 0.19 * len(lines) + 0.16
    figure.tight_layout(rect=(0, beneath * inch, 1, 1 - top * inch), w_pad=2.0)
    return figure


def save(figure: Figure, paths: Iterable[Path], dpi: int = 150) -> None:
    """Write the figure. Equal figures give equal bytes: an SVG gets no date."""
    for path in paths:
        figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else {})


class Bars:
    """Horizontal bars from top to bottom, in groups with headings."""

    def __init__(self, axes: Axes, most: float) -> None:
        self.axes, self.most = axes, most
        self.position = -1.3
        self.ticks: dict[float, str] = {}

    def heading(self, text: str) -> None:
        self.position += 1.3
        self.axes.text(0, self.position, text, va="center", fontweight="bold", color=INK)

    def add(self, name: str, parts: dict[str, float], colours: dict[str, str], sizes: bool = True) -> float:
        """Add a bar made of parts, with the size in each part that has room. Return where the bar ends."""
        self.position += 1
        self.ticks[self.position] = name
        left = 0.0
        for part, size in parts.items():
            colour = colours[part]
            edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.8}
            self.axes.barh(self.position, size, left=left, height=0.76, color=colour, **edge)
            if sizes and size >= self.most / 26:
                look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5}
                look["color"] = "white" if colour == BLUE else INK
                self.axes.text(left + size / 2, self.position, f"{size:.3g}", **look)
            left += size
        return left

    def tell(self, end: float, text: str) -> None:
        """Write text beside the last bar, which ends at `end`."""
        self.axes.text(end + self.most / 120, self.position, text, va="center", color=INK)

    def finish(self, unit: str, room: float) -> None:
        """Set ticks and limits; the axis is `room` times as long as the longest bar."""
        self.axes.set_yticks(list(self.ticks), list(self.ticks.values()))
        for label in self.axes.get_yticklabels():
            label.set_fontweight("bold" if label.get_text().startswith(OURS) else "normal")
        self.axes.set(xlim=(0, room * self.most), ylim=(self.position + 0.55, -0.55), xlabel=unit)
        self.axes.tick_params(axis="y", length=0)
        self.axes.spines["left"].set_visible(False)
        self.axes.grid(axis="x", color=FAINT)
        self.axes.set_axisbelow(True)


def label_ends(axes: Axes, ends: dict[str, float], colours: dict[str, str], x: float, top: float) -> None:
    """Write names beside the lines' last points without overlap. The y axis is (0, `top`)."""
    names = sorted(ends, key=ends.__getitem__)
    gap = 0.05 * top
    places: list[float] = []
    for name in names:
        places.append(max(ends[name], places[-1] + gap if places else 0.01 * top))
    limit = 0.99 * top
    for index in reversed(range(len(places))):
        places[index] = min(places[index], limit)
        limit = places[index] - gap
    for name, place in zip(names, places, strict=True):
        line = {"arrowstyle": "-", "color": colours[name], "linewidth": 1.2}
        axes.annotate(
            name, (x, ends[name]), xytext=(1.05, place / top), textcoords="axes fraction", va="center",
            fontsize=9, color=INK, fontweight="bold" if name.startswith(OURS) else "normal",
            annotation_clip=False, arrowprops={**line, "relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 4},
        )  # fmt: skip
