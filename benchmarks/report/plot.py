"""Draws the newest results: docs/figures/*.png and *.svg.

    python -m benchmarks.report.plot [--results CSV] [--out docs/figures]

- bytes: per parameter of one window, by part and loop (rows of models.py);
- bandwidth: of the bytes that accumulation needs, by size, beside a copy's (kernels.py);
- speedup: of a window on real models' parameter lists (models.py);
- memory: the peak by kind while the demo trains (training.py);
- machines: training speed of real models by emulated machine (machines.csv, beside the results).

A plot without rows is skipped, and the reason is printed.
"""

import functools

import matplotlib

from ..harness import RESULTS
from ..machines.cells import RESULTS as MACHINES
from .charts import CHARTS
from .pages import FIGURES, arguments, beside, given, save


def main() -> None:
    options, rows = given(arguments(__doc__, results=RESULTS, out=FIGURES), "make bench")
    matplotlib.use("Agg")
    for name, chart in CHARTS.items():
        made = beside(options, MACHINES.name) if name == "machines" else rows
        save(name, functools.partial(chart, made), options.out)


if __name__ == "__main__":
    main()
