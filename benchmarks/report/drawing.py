"""Bars in groups, labels beside lines, and the conditions of a figure in words."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from fusedacc.commands.plots import BLUE, FAINT, INK

#: Providers with this prefix are drawn bold.
OURS = "fusedacc"


def conditions(about: Mapping[str, str]) -> str:
    """Return the conditions of a row of results, in words."""
    words = [about["device"], f"threads {about['threads']}", f"torch {about['torch']}"]
    words += [f"CUDA {about['cuda']}"] if about["cuda"] else []
    return ", ".join([*words, f"commit {about['commit']}", about["date"][:10]])


class Bars:
    """Horizontal bars from top to bottom, in groups with headings."""

    def __init__(self, axes: Axes, most: float) -> None:
        self.axes = axes
        self.most = most
        self.position = -1.3
        self.ticks: dict[float, str] = {}

    def heading(self, text: str) -> None:
        self.position += 1.3
        self.axes.text(0, self.position, text, va="center", fontweight="bold", color=INK)

    def add(self, name: str, parts: dict[str, float], colours: dict[str, str], sizes: bool = True) -> float:
        """Add a bar made of parts, with the size in each part that has room. Return where the bar ends."""
        self.position += 1
        self.ticks[self.position] = name
        left = 0.0
        for part, size in parts.items():
            colour = colours[part]
            edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.8}
            self.axes.barh(self.position, size, left=left, height=0.76, color=colour, **edge)
            if sizes and size >= self.most / 26:
                look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5}
                look["color"] = "white" if colour == BLUE else INK
                self.axes.text(left + size / 2, self.position, f"{size:.3g}", **look)
            left += size
        return left

    def tell(self, end: float, text: str) -> None:
        """Write text beside the last bar, which ends at `end`."""
        self.axes.text(end + self.most / 120, self.position, text, va="center", color=INK)

    def finish(self, unit: str, room: float) -> None:
        """Set ticks and limits; the axis is `room` times as long as the longest bar."""
        self.axes.set_yticks(list(self.ticks), list(self.ticks.values()))
        for label in self.axes.get_yticklabels():
            label.set_fontweight("bold" if label.get_text().startswith(OURS) else "normal")
        self.axes.set(xlim=(0, room * self.most), ylim=(self.position + 0.55, -0.55), xlabel=unit)
        self.axes.tick_params(axis="y", length=0)
        self.axes.spines["left"].set_visible(False)
        self.axes.grid(axis="x", color=FAINT)
        self.axes.set_axisbelow(True)


def label_ends(axes: Axes, ends: dict[str, float], colours: dict[str, str], x: float, top: float) -> None:
    """Write names beside the lines' last points without overlap. The y axis is (0, `top`)."""
    names = sorted(ends, key=ends.__getitem__)
    gap = 0.05 * top
    places: list[float] = []
    for name in names:
        places.append(max(ends[name], places[-1] + gap if places else 0.01 * top))
    limit = 0.99 * top
    for index in reversed(range(len(places))):
        places[index] = min(places[index], limit)
        limit = places[index] - gap
    for name, place in zip(names, places, strict=True):
        line = {"arrowstyle": "-", "color": colours[name], "linewidth": 1.2}
        axes.annotate(
            name,
            (x, ends[name]),
            xytext=(1.05, place / top),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=INK,
            fontweight="bold" if name.startswith(OURS) else "normal",
            annotation_clip=False,
            arrowprops={**line, "relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 4},
        )
