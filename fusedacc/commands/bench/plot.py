"""Draw the speeds: a row for each case, a dot for each variant."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from ..measuring.plots import BLUE, FAINT, INK, ORANGE, STYLE, finish, save
from .comparison import COPY, Entry
from .report import KINDS
from .work import OURS, STOCK

_GREY = "#8C8C8C"
_ROW, _HEADING, _AROUND = 0.3, 0.42, 1.9  # inches
#: Distance between prepared and fresh lists, which may be equally fast.
_APART = 0.055


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the speeds relative to the fastest PyTorch variant of each case, on a logarithmic axis.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = _rows(found["cases"])
    places = list(itertools.accumulate(_HEADING if isinstance(row, str) else _ROW for row in rows))
    bottom = max([_ROW, *places])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, _AROUND + bottom))
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.plot((0.5, 2.1), (0, 0), linestyle="none")  # the smallest range
        for y, row in zip(places, rows, strict=True):
            if not isinstance(row, str):
                _draw_case(axes, y, row["what"], row["ways"])
        axes.set_ylim(bottom + _ROW, 0)
        _finish_axes(axes, rows, places)
        dot: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 7}
        looks: dict[str, dict[str, Any]] = {
            "fusedacc (line: 95 % interval)": {"color": BLUE},
            "fusedacc, fresh lists": {"color": ORANGE},
            "a PyTorch variant": {"color": _GREY},
            "less exact: no baseline": {"color": _GREY, "markerfacecolor": "none"},
            "a copy of as many bytes": {"color": INK, "marker": "|", "markersize": 11},
        }
        from matplotlib.lines import Line2D

        machine = found["machine"]
        about = f"{machine['name']}, {machine['threads']} threads, torch {machine['torch']}"
        key = {label: Line2D([], [], **(dot | look)) for label, look in looks.items()}
        title = "fusedacc and every PyTorch variant"
        save(finish(figure, title, [f"{about}, {machine['date'][:10]}"], key), [path])


def _rows(cases: list[dict[str, Any]]) -> list[str | dict[str, Any]]:
    """Return the cases that have a baseline, after a heading for each kind."""
    rows: list[str | dict[str, Any]] = []
    for kind, words in KINDS.items():
        own = [c for c in cases if c["what"] == kind and any(e["speed"] is not None for e in c["ways"])]
        rows += [words, *own] if own else []
    return rows


def _draw_case(axes: Any, y: float, kind: str, entries: list[Entry]) -> None:
    against = next(entry["against"] for entry in entries if entry["against"] is not None)
    base = next(entry for entry in entries if entry["name"] == against)["seconds"]["median"]
    axes.axhline(y, color=FAINT, linewidth=0.8, zorder=0)
    if kind != "product":  # products are limited by arithmetic
        limit = next(entry for entry in entries if entry["name"] == COPY)["seconds"]["median"]
        axes.plot(base / limit, y, "|", color=INK, markersize=11, markeredgewidth=1.8, zorder=2)
    for entry in entries:
        if entry["seconds"] is None:
            continue
        if entry["role"] == STOCK:
            face = "none" if entry["inexact"] else _GREY
            speed = base / entry["seconds"]["median"]
            axes.plot(speed, y, "o", color=_GREY, markerfacecolor=face, markersize=5, alpha=0.8, zorder=3)
        elif entry["role"] == OURS:
            fresh = "fresh" in entry["name"]
            colour, place = (ORANGE, y + _APART) if fresh else (BLUE, y - _APART)
            axes.plot(entry["interval"], (place, place), color=colour, linewidth=2.2, zorder=4)
            look = {"color": colour, "markeredgecolor": "white", "markersize": 8}
            axes.plot(entry["speed"], place, "o", **look, zorder=5)


def _finish_axes(axes: Any, rows: list[str | dict[str, Any]], places: list[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.axvline(1, color=INK, linewidth=1, zorder=1)
    axes.set_yticks(places, [row if isinstance(row, str) else row["title"] for row in rows], fontsize=9)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set(color=INK, weight="bold" if isinstance(row, str) else "normal")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("speed relative to the fastest PyTorch variant of the case; further right is faster")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
