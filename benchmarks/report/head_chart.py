"""Draws docs/figures/head_memory.png and .svg from the newest rows of suites/head.py.

python -m benchmarks.report.head_chart [--results CSV] [--out docs/figures]
"""

from collections.abc import Sequence

from matplotlib.figure import Figure

from fusedacc.commands.measuring.plots import BLUE, GREY
from fusedacc.commands.measuring.records import Line

from ..harness import INSIDE, RESULTS, ROOT, STOCK
from ..suites.head import PEAK_TOKENS, PEAK_WIDTH
from .pages import finish, of, only, panels, run, values

COLOURS = {STOCK: GREY, INSIDE: BLUE}


def memory(rows: Sequence[Line]) -> Figure:
    """Draw the peak of a head's forward and backward against the vocabulary."""
    own = of(rows, "head", "head_memory")
    figure, [[axes]] = panels(1, 1, (7.5, 4.4))
    for way, colour in COLOURS.items():
        line = only(own, provider=way)
        at, peaks = [int(row["case"]) / 1000 for row in line], values(line)
        axes.plot(at, peaks, color=colour, marker="o", linewidth=2)
        last = (at[-1], peaks[-1])
        axes.annotate(f"{peaks[-1]:.0f} MB", last, (0, 7), textcoords="offset points", ha="center")
    axes.set_xlabel("classes in the vocabulary, thousands")
    axes.set_ylabel("MB at the peak")
    axes.set_ylim(bottom=0)
    text = (
        f"Live bytes of one forward and backward besides weight, sum and input: {PEAK_TOKENS} tokens, width "
        f"{PEAK_WIDTH}, float32. PyTorch holds the logits, their gradient and the weight's gradient."
    )
    return finish(figure, "Memory of a language model's head", own[0], text, COLOURS)


if __name__ == "__main__":
    run(__doc__, RESULTS, ROOT / "docs" / "head.md", "head", {"memory": memory}, {})
