"""What `bench` prints and draws: a table per case, then a summary, and a picture of the speeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from ..measuring.plots import BLUE, FAINT, INK, ORANGE, STYLE, finish, save
from .comparison import COPY, NOT_MEASURED, WRONG, Entry, fastest
from .work import OURS, STOCK, YARDSTICK

KINDS = {
    "add": "sums of gradients: acc += s * g",
    "norm": "norm of a list, for clipping",
    "product": "a Linear's weight gradient into its sum: acc += dy.t() @ x",
    "rows": "an Embedding's weight gradient into its sum: acc[tokens] += g",
}


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line per case."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.live = stream, stream.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()

    def show(self, number: int, of: int | None, title: str) -> None:
        text = f"[{number}/{of}] {title}" if of else f"[{number}] {title}"
        self.clear()
        self.stream.write(text[:78] if self.live else f"{text}\n")
        self.stream.flush()

    def note(self, text: str) -> None:
        """Write a line that stays."""
        self.clear()
        self.stream.write(f"{text}\n")
        self.stream.flush()

    def clear(self) -> None:
        if self.live:
            self.stream.write("\r\033[K")
            self.stream.flush()


def beginning(found: dict[str, Any]) -> str:
    """Return the conditions."""
    machine = found["machine"]
    lines = [
        f"{machine['device']}: {machine['name']}; {machine['threads']} threads, {machine['cpu_capability']}",
        f"fusedacc {machine['fusedacc'] or 'from its sources'}, torch {machine['torch']}, "
        f"Triton {machine['triton'] or 'not installed'}, CUDA {machine['cuda'] or 'none'}, "
        f"Python {machine['python']}",
    ]
    if machine["environment"]:
        lines.append(", ".join(f"{name}={value}" for name, value in machine["environment"].items()))
    lines.append(
        "% copy: share of a copy's bandwidth in the same rounds. x: speed relative to the fastest PyTorch\n"
        "variant (above 1 is faster), with the 95 % interval of its median. s is 1/8."
    )
    if machine["device"] != "cpu":
        lines.append("median: GPU time per call in a full queue; host: CPU time to issue one call.")
    return "\n".join(lines)


def table(case: dict[str, Any]) -> str:
    """Return one case: ours first, then PyTorch variants from the fastest on, then the yardsticks."""
    kept = f"{case['sets']} set{'s in turn' if case['sets'] > 1 else ''}"
    kept = "the same tensors on every call" if case["warm"] else kept
    head = f"\n{case['title']}\n  {KINDS[case['what']]}; {case['sizes']}; {kept}, {case['rounds']} rounds"
    if case["why"] is not None:
        return f"{head}\n  not measured: {case['why']}"
    device = any(entry["host_seconds"] is not None for entry in case["ways"])
    host = f"{'host':>10}" if device else ""
    lines = [head, f"  {'':<50}{'median':>10}{host}{'MB':>9}{'GB/s':>8}{'% copy':>8}"]
    shown = [entry for entry in case["ways"] if entry["status"] != NOT_MEASURED]
    return "\n".join([*lines, *(_line(entry, device) for entry in sorted(shown, key=_place))])


def _place(entry: Entry) -> tuple[int, bool, float]:
    """Return the sort key of an entry in its table."""
    rank, timed = (OURS, STOCK, YARDSTICK).index(entry["role"]), entry["seconds"] is not None
    return rank, not timed, entry["seconds"]["median"] if timed and rank else 0.0


def _line(entry: Entry, device: bool) -> str:
    name = f"  {entry['name']:<50}"
    if entry["seconds"] is None:
        return f"{name}  WRONG: {entry['why']}"
    line = name + f"{_time(entry['seconds']['median']):>10}"
    if device:
        line += f"{_time(entry['host_seconds']):>10}"
    if entry["bytes"] is None:
        line += f"  bytes not counted: {', '.join(entry['uncounted'])}"
    else:
        size = entry["bytes"] / 1e6
        line += f"{f'{size:.3g}' if size < 100 else f'{size:.0f}':>9}"
        line += f"{entry['gb_per_s']:>8.1f}{entry['percent_of_copy']:>8.0f}"
    if entry["speed"] is not None:
        line += f"  {_speed(entry)}"
    notes = [f"no baseline: {entry['inexact']}"] if entry["inexact"] else []
    notes += [entry["note"]] if entry["note"] else []
    return line + (f"  ({'; '.join(notes)})" if notes else "")


def _speed(entry: Entry) -> str:
    low, high = entry["interval"]
    return f"{entry['speed']:.2f} [{low:.2f}, {high:.2f}] x {entry['against']}"


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.2f} {name}"
    return f"{seconds * 1e6:.1f} us"


def wrong(found: dict[str, Any]) -> list[str]:
    """Return every wrong result, in words."""
    return [
        f"{case['title']}: {entry['name']}: {entry['why']}"
        for case in found["cases"]
        for entry in case["ways"]
        if entry["status"] == WRONG
    ]


def not_measured(found: dict[str, Any]) -> dict[str, list[str]]:
    """Return the variants or cases that were not measured, by reason."""
    reasons: dict[str, list[str]] = {}
    for case in found["cases"]:
        if case["why"] is not None:
            reasons.setdefault(case["why"], []).append(case["title"])
        for entry in case["ways"]:
            if entry["status"] == NOT_MEASURED:
                names = reasons.setdefault(entry["why"], [])
                names += [entry["name"]] if entry["name"] not in names else []
    return reasons


def chosen(found: dict[str, Any]) -> list[str]:
    """Return the backends that "auto" selected, their work and dtypes, and why."""
    groups: dict[tuple[str, str], list[str]] = {}
    for case in found["cases"]:
        kinds = groups.setdefault((case["backend"], case["reason"]), [])
        kind = f"{case['what']} {case['dtypes']}"
        kinds += [kind] if kind not in kinds else []
    return [f"{backend}: {', '.join(kinds)}: {reason}" for (backend, reason), kinds in groups.items()]


def ending(found: dict[str, Any]) -> str:
    """Return the summary: our fastest variant per case, wrong results, and what was not measured."""
    lines = ["", "our fastest variant in each case"]
    width = max(len(case["title"]) for case in found["cases"]) + 1
    for case in found["cases"]:
        entry = fastest([entry for entry in case["ways"] if entry["role"] == OURS])
        if entry is None:
            lines.append(f"  {case['what']:<8}{case['title']:<{width}}not measured")
            continue
        share = f"{entry['percent_of_copy']:>5.0f} % of copy" if entry["percent_of_copy"] else " " * 15
        speed = _speed(entry) if entry["speed"] is not None else "no PyTorch variant was measured"
        lines.append(f"  {case['what']:<8}{case['title']:<{width}}{share}  {speed}")
    slower = [
        f"{case['what']}, {case['title']}: {entry['name']}: {_speed(entry)}"
        for case in found["cases"]
        for entry in case["ways"]
        if entry["interval"] is not None and entry["interval"][1] < 1
    ]
    lines += _block("slower than the fastest PyTorch variant", slower or ["nothing"])
    lines += _block("chosen", chosen(found))
    lines += _block("not measured", [f"{', '.join(n)}: {r}" for r, n in not_measured(found).items()])
    lines += _block("WRONG RESULTS", wrong(found))
    lines += ["", f"{found['seconds']:.0f} seconds"]
    return "\n".join(lines)


def _block(title: str, lines: Iterable[str]) -> list[str]:
    shown = [f"  {line}" for line in lines]
    return ["", title, *shown] if shown else []


# The picture: a row for each case, a dot for each variant

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
