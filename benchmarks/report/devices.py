"""The rows of machines.csv by the processor on which they were measured or emulated."""

from __future__ import annotations

from collections.abc import Sequence

from ..machines import cells
from .plot_style import Row


def by_device(lines: Sequence[Row]) -> dict[str, list[Row]]:
    """Each device's newest rows, as `cells.latest` has them; none of a device without any."""
    measured = dict.fromkeys(line["device"] for line in lines if line["ratio"])
    return {device: cells.latest([line for line in lines if line["device"] == device]) for device in measured}
