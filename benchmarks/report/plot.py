"""Draws the newest results: docs/figures/*.png and *.svg.

    python -m benchmarks.report.plot [--results CSV] [--out docs/figures] [--only bytes,memory]

- bytes: per parameter of one window by part, stock as written, best stock and ours (from models.py's rows);
- bandwidth: of the bytes that accumulation needs, against size, beside a copy's (kernels.py);
- speedup: a window's time on real models' parameter lists, best stock's over ours (models.py);
- memory: the peak by kind while the demo trains (training.py);
- machines: training speed of real models by emulated machine (machines/, whose rows are in machines.csv
  beside the results).

A plot whose rows are missing is skipped, and the reason is printed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from fusedacc.commands.measuring.records import Line

from ..harness import RESULTS, chosen
from ..machines.cells import RESULTS as MACHINES
from . import charts, machines_chart
from .pages import FIGURES, arguments, beside, given, save

CHARTS = {
    "bytes": charts.bytes_per_parameter,
    "bandwidth": charts.bandwidth,
    "speedup": charts.speedup,
    "memory": charts.memory,
    "machines": machines_chart.machines,
}


def draw(rows: Sequence[Line], of_machines: Sequence[Line], out: Path, names: Sequence[str]) -> list[Path]:
    """Writes a PNG and an SVG of each plot that has its rows, and prints why the others have none."""
    written = []
    for name in names:
        made = of_machines if name == "machines" else rows
        written += save(name, functools.partial(CHARTS[name], made), out)
    return written


def main() -> None:
    parser = arguments(__doc__, results=RESULTS, out=FIGURES)
    parser.add_argument("--only", help=f"comma-separated; all without it: {', '.join(CHARTS)}")
    options, rows = given(parser, "make bench")
    names = chosen(options.only, list(CHARTS), "plot")
    matplotlib.use("Agg")
    draw(rows, beside(options, MACHINES.name), options.out, names)


if __name__ == "__main__":
    main()
