"""Shared by all pictures: style, colours, titles and keys. Imports matplotlib only to draw."""

from __future__ import annotations

import argparse
import importlib.util
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

    path = Path(text)
    allowed = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in allowed:
        why = f"is not a picture format; allowed: .{', .'.join(allowed)}"
    elif not path.parent.is_dir():
        why = "is not in an existing folder; allowed: a file in an existing folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "cannot be written; allowed: a writable file"
    else:
        return path
    raise argparse.ArgumentTypeError(f"{text!r} {why}")


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
            list(key.values()),
            list(key),
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(LEFT, 1 - top * inch),
            ncols=len(key),
            borderaxespad=0,
            borderpad=0,
            columnspacing=1.3,
            handlelength=1.1,
            handletextpad=0.5,
            fontsize=9,
        )
        top += 0.25
    beneath = 0.19 * len(lines) + 0.16
    figure.tight_layout(rect=(0, beneath * inch, 1, 1 - top * inch), w_pad=2.0)
    return figure


def save(figure: Figure, paths: Iterable[Path], dpi: int = 150) -> None:
    """Write the figure. Equal figures give equal bytes: an SVG gets no date."""
    for path in paths:
        figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else {})
