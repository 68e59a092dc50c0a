"""Rewrites the README's table of figures from the newest run in benchmarks/results: `make bench` first.

python benchmarks/readme_figures.py
"""

from __future__ import annotations

import csv
from pathlib import Path

from common import RESULTS, ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- figures: written by benchmarks/readme_figures.py -->", "<!-- end of figures -->"
COMMANDS = ("cpu_figures", "wrapper_window", "peak_memory")


def newest(path: Path) -> list[dict[str, str]]:
    """The rows of the last run in the file. Ends the program where there is none yet."""
    if not path.exists():
        raise SystemExit(f"no results in {path}: run `make bench` first")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["date"] == rows[-1]["date"]]


def figure(row: dict[str, str]) -> str:
    value = float(row["median"])
    if row["unit"] == "MB":
        return f"{value:.1f} MB"
    return f"{value / 1000:.2f} ms" if value >= 1000 else f"{value:.0f} µs"


def outcome(row: dict[str, str], baselines: dict[tuple[str, str], dict[str, str]]) -> str:
    """The comparison, in words a reader can check."""
    speedup, goal = float(row["speedup"]), float(row["goal"] or 0)
    if row["unit"] == "MB":
        stock = baselines[row["case"], "stock"]
        more = float(row["median"]) - float(stock["median"])
        return f"stock {figure(stock)}, {more:+.1f} MB (goal: at most +25)"
    name = row["against"].removesuffix(" (bytes/s)")
    told = f"{speedup:.2f} times the {'bytes/s' if name != row['against'] else 'speed'} of `{name}`"
    told += f" ({figure(baselines[row['case'], name])})"
    return told + (f", goal {goal:.3g}" + (" **missed**" if row["reached"] == "no" else "") if goal else "")


def section(results: Path) -> str:
    lines = []
    for name in COMMANDS:
        rows = newest(results / f"{name}.csv")
        baselines = {(row["case"], row["variant"]): row for row in rows}
        about = rows[-1]
        lines += [
            f"`python benchmarks/{name}.py`, {about['date'][:10]}, commit {about['commit']}, "
            f"{about['device']}, threads {about['threads']}, allocator {about['allocator']}, "
            f"torch {about['torch']}:",
            "",
            "| case | variant | median | against |",
            "|---|---|---|---|",
        ]
        for row in rows:
            if row["goal"]:
                told = outcome(row, baselines)
                lines.append(f"| {row['case']} | {row['variant']} | {figure(row)} | {told} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{README.name} holds no line {BEGIN!r} followed by {END!r}")
    README.write_text(f"{before}{BEGIN}\n\n{section(RESULTS)}\n{END}{after}")


if __name__ == "__main__":
    main()
