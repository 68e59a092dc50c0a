"""A picture of the speeds: a row for each case, a dot for each way. matplotlib is optional."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Any

from .measuring import COPY, Entry
from .report import KINDS
from .work import OURS, STOCK

# Okabe and Ito's colours, which the colour-blind can tell apart.
_BLUE, _ORANGE, _GREY, _INK = "#0072B2", "#E69F00", "#8C8C8C", "#222222"
_BOLD: dict[str, Any] = {"weight": "bold", "color": _INK}
_ROW, _HEADING, _TOP, _BENEATH = 0.3, 0.42, 0.9, 1.0  # inches
#: Prepared lists and fresh ones side by side, where they are as fast as each other.
_APART = 0.055


def problem(path: Path) -> str | None:
    """Why no picture can be drawn there; None if one can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "the package matplotlib, which draws, is not installed: pip install matplotlib"
    from matplotlib.backend_bases import FigureCanvasBase

    allowed = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in allowed:
        return f"{str(path)!r} has no ending of a picture; allowed: .{', .'.join(allowed)}"
    if not path.parent.is_dir():
        return f"{str(path)!r} is in no folder that exists; allowed: a file in an existing folder"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{str(path)!r} cannot be written; allowed: a file that can"
    return None


def picture(text: str) -> Path:
    """A file to draw, as the type of a command's argument."""
    why = problem(Path(text))
    if why is not None:
        raise argparse.ArgumentTypeError(why)
    return Path(text)


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws what was measured: speeds against the fastest stock form of each case, on a logarithmic axis.

    Raises OSError where the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = _rows(found["cases"])
    tall = sum(_HEADING if isinstance(row, str) else _ROW for row in rows)
    height = _TOP + _BENEATH + max(_ROW, tall)
    figure = Figure(figsize=(11, height), layout=None, facecolor="white")
    axes = figure.add_axes((0.37, _BENEATH / height, 0.61, 1 - (_BENEATH + _TOP) / height))
    axes.set_xscale("log")
    axes.plot((0.5, 2.1), (0, 0), linestyle="none")  # what is shown at the least
    ticks: dict[float, str] = {}
    y = 0.0
    for row in rows:
        if isinstance(row, str):
            y += _HEADING
            place = axes.get_yaxis_transform()
            axes.text(-0.58, y - 0.06, row, transform=place, va="center", **_BOLD)
        else:
            y += _ROW
            ticks[y] = row["title"]
            _draw_case(axes, y, row["what"], row["ways"])
    axes.set_ylim(y + _ROW, 0)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    _finish(figure, axes, found["machine"], height)
    figure.savefig(path, dpi=150)


def _rows(cases: list[dict[str, Any]]) -> list[str | dict[str, Any]]:
    """The cases that have a baseline, behind a heading for each kind."""
    rows: list[str | dict[str, Any]] = []
    for kind, words in KINDS.items():
        own = [c for c in cases if c["what"] == kind and any(e["speed"] is not None for e in c["ways"])]
        rows += [words, *own] if own else []
    return rows


def _draw_case(axes: Any, y: float, kind: str, entries: list[Entry]) -> None:
    against = next(entry["against"] for entry in entries if entry["against"] is not None)
    base = next(entry for entry in entries if entry["name"] == against)["seconds"]["median"]
    axes.axhline(y, color="#E6E6E6", linewidth=0.8, zorder=0)
    if kind != "product":  # whose limit is arithmetic
        limit = next(entry for entry in entries if entry["name"] == COPY)["seconds"]["median"]
        axes.plot(base / limit, y, "|", color=_INK, markersize=11, markeredgewidth=1.8, zorder=2)
    for entry in entries:
        if entry["seconds"] is None:
            continue
        if entry["role"] == STOCK:
            face = "none" if entry["inexact"] else _GREY
            speed = base / entry["seconds"]["median"]
            axes.plot(speed, y, "o", color=_GREY, markerfacecolor=face, markersize=5, alpha=0.8, zorder=3)
        elif entry["role"] == OURS:
            fresh = "fresh" in entry["name"]
            colour, place = (_ORANGE, y + _APART) if fresh else (_BLUE, y - _APART)
            if entry["interval"]:
                axes.plot(entry["interval"], (place, place), color=colour, linewidth=2.2, zorder=4)
            axes.plot(
                entry["speed"], place, "o", color=colour, markeredgecolor="white", markersize=8, zorder=5
            )


def _finish(figure: Any, axes: Any, machine: dict[str, Any], height: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.axvline(1, color=_INK, linewidth=1, zorder=1)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("speed; 1: the fastest stock form of the case, to the right is faster")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    title = "fusedacc against every form that stock torch has"
    figure.text(0.015, 1 - 0.2 / height, title, fontsize=14, va="top", **_BOLD)
    dot: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 7}
    looks: dict[str, dict[str, Any]] = {
        "fusedacc (line: 95 % interval)": {"color": _BLUE},
        "fusedacc, fresh lists": {"color": _ORANGE},
        "a stock form": {"color": _GREY},
        "less exact: no baseline": {"color": _GREY, "markerfacecolor": "none"},
        "a copy of as many bytes": {"color": _INK, "marker": "|", "markersize": 11},
    }
    handles = [Line2D([], [], label=label, **(dot | look)) for label, look in looks.items()]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.008, 1 - 0.55 / height), ncols=5, frameon=False,
        fontsize=9, columnspacing=1.2, handletextpad=0.3,
    )  # fmt: skip
    about = (
        f"{machine['name']}, {machine['threads']} threads, torch {machine['torch']}, {machine['date'][:10]}"
    )
    figure.text(0.015, 0.15 / height, about, fontsize=8.5, color="#555555", va="bottom")
