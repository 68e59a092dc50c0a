"""What `bench` prints: a table per case, then a summary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

from .cases import OURS, STOCK, YARDSTICK
from .comparison import NOT_MEASURED, WRONG, Entry, fastest

KINDS = {
    "add": "sums of gradients: acc += s * g",
    "norm": "norm of a list, for clipping",
}


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line per case."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.live = stream.isatty()

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


def beginning(figures: dict[str, Any]) -> str:
    """Return the conditions."""
    machine = figures["machine"]
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
    if case["warm"]:
        tensors = "the same tensors on every call"
    elif case["sets"] > 1:
        tensors = f"{case['sets']} sets in turn"
    else:
        tensors = f"{case['sets']} set"
    head = f"\n{case['title']}\n  {KINDS[case['what']]}; {case['sizes']}; {tensors}, {case['rounds']} rounds"
    if case["why"] is not None:
        return f"{head}\n  not measured: {case['why']}"
    on_gpu = any(entry["host_seconds"] is not None for entry in case["ways"])
    host = f"{'host':>10}" if on_gpu else ""
    lines = [head, f"  {'':<50}{'median':>10}{host}{'MB':>9}{'GB/s':>8}{'% copy':>8}"]
    shown = [entry for entry in case["ways"] if entry["status"] != NOT_MEASURED]
    return "\n".join([*lines, *(_line(entry, on_gpu=on_gpu) for entry in sorted(shown, key=_place))])


def _place(entry: Entry) -> tuple[int, bool, float]:
    """Return the sort key of an entry in its table."""
    rank = (OURS, STOCK, YARDSTICK).index(entry["role"])
    is_timed = entry["seconds"] is not None
    is_ours = entry["role"] == OURS
    return rank, not is_timed, entry["seconds"]["median"] if is_timed and not is_ours else 0.0


def _line(entry: Entry, *, on_gpu: bool) -> str:
    name = f"  {entry['name']:<50}"
    if entry["seconds"] is None:
        return f"{name}  WRONG: {entry['why']}"
    line = name + f"{_time(entry['seconds']['median']):>10}"
    if on_gpu:
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


def wrong(figures: dict[str, Any]) -> list[str]:
    """Return every wrong result, in words."""
    return [
        f"{case['title']}: {entry['name']}: {entry['why']}"
        for case in figures["cases"]
        for entry in case["ways"]
        if entry["status"] == WRONG
    ]


def not_measured(figures: dict[str, Any]) -> dict[str, list[str]]:
    """Return the variants or cases that were not measured, by reason."""
    reasons: dict[str, list[str]] = {}
    for case in figures["cases"]:
        if case["why"] is not None:
            reasons.setdefault(case["why"], []).append(case["title"])
        for entry in case["ways"]:
            if entry["status"] == NOT_MEASURED:
                names = reasons.setdefault(entry["why"], [])
                names += [entry["name"]] if entry["name"] not in names else []
    return reasons


def chosen(figures: dict[str, Any]) -> list[str]:
    """Return the backends that "auto" selected, their work and dtypes, and why."""
    groups: dict[tuple[str, str], list[str]] = {}
    for case in figures["cases"]:
        kinds = groups.setdefault((case["backend"], case["reason"]), [])
        kind = f"{case['what']} {case['dtypes']}"
        kinds += [kind] if kind not in kinds else []
    return [f"{backend}: {', '.join(kinds)}: {reason}" for (backend, reason), kinds in groups.items()]


def ending(figures: dict[str, Any]) -> str:
    """Return the summary: our fastest variant per case, wrong results, and what was not measured."""
    lines = ["", "our fastest variant in each case"]
    width = max(len(case["title"]) for case in figures["cases"]) + 1
    for case in figures["cases"]:
        entry = fastest([entry for entry in case["ways"] if entry["role"] == OURS])
        if entry is None:
            lines.append(f"  {case['what']:<8}{case['title']:<{width}}not measured")
            continue
        share = f"{entry['percent_of_copy']:>5.0f} % of copy" if entry["percent_of_copy"] else " " * 15
        speed = _speed(entry) if entry["speed"] is not None else "no PyTorch variant was measured"
        lines.append(f"  {case['what']:<8}{case['title']:<{width}}{share}  {speed}")
    slower = [
        f"{case['what']}, {case['title']}: {entry['name']}: {_speed(entry)}"
        for case in figures["cases"]
        for entry in case["ways"]
        if entry["interval"] is not None and entry["interval"][1] < 1
    ]
    lines += _block("slower than the fastest PyTorch variant", slower or ["nothing"])
    lines += _block("chosen", chosen(figures))
    lines += _block("not measured", [f"{', '.join(n)}: {r}" for r, n in not_measured(figures).items()])
    lines += _block("WRONG RESULTS", wrong(figures))
    lines += ["", f"{figures['seconds']:.0f} seconds"]
    return "\n".join(lines)


def _block(title: str, lines: Iterable[str]) -> list[str]:
    shown = [f"  {line}" for line in lines]
    return ["", title, *shown] if shown else []
