"""Draws docs/figures/head_memory.png and .svg from the newest rows of suites/head.py.

python -m benchmarks.report.head_chart [--results CSV] [--out docs/figures]
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from fusedacc.commands.measuring.plots import BLUE, FAINT, GREY
from fusedacc.commands.measuring.records import Line

from ..harness import RESULTS, ROOT
from ..suites.head import OURS, PEAK_TOKENS, PEAK_WIDTH, PLAIN
from .pages import finish, of, run

COLOURS = {PLAIN: GREY, OURS: BLUE}


def memory(rows: Sequence[Line]) -> Figure:
    """The peak of a head's forward and backward against the vocabulary."""
    own = of(rows, "head", "head_memory")
    figure, axes = plt.subplots(figsize=(7.5, 4.4))
    for way, colour in COLOURS.items():
        points = [(int(row["case"]) / 1000, float(row["median"])) for row in own if row["provider"] == way]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", linewidth=2)
        axes.annotate(f"{points[-1][1]:.0f} MB", points[-1], (0, 7), textcoords="offset points", ha="center")
    axes.set_xlabel("classes in the vocabulary, thousands")
    axes.set_ylabel("MB at the peak")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=FAINT)
    text = (
        f"Live bytes of one forward and backward beside weight, sum and input: {PEAK_TOKENS} tokens, width "
        f"{PEAK_WIDTH}, float32. PyTorch holds the logits, their gradient and the weight's gradient."
    )
    return finish(figure, "Memory of a language model's head", own[0], text, COLOURS)


if __name__ == "__main__":
    run(__doc__, RESULTS, ROOT / "docs" / "head.md", "head", {"memory": memory}, {})
