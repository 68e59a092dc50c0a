"""The headline: bytes per parameter of one window, by setting and loop, from the newest rows of models.py."""

import dataclasses
from collections.abc import Mapping, Sequence

from fusedacc.commands.measuring.records import Line, newest

from .pages import only

MODE = "window k=8"
MODEL, KEPT = "ours, model=", "ours, model=, keep_casts="
#: A row's note begins with the role of its loop.
ROLES = ("as written", "best stock", "ours", MODEL, KEPT)
#: By the column `dtypes`.
TITLES = {
    "float32 into float32": "float32 parameters and sums",
    "autocast bfloat16 into float32": "float32 parameters under autocast(bfloat16)",
    "bfloat16 into float32": "bfloat16 parameters, float32 sums",
}


@dataclasses.dataclass(frozen=True)
class Counted:
    """The bytes per parameter of one loop in a window. `row` is that of the total."""

    title: str
    role: str
    total: float
    parts: dict[str, float]
    row: Line

    @property
    def ours(self) -> bool:
        return self.role.startswith("ours")

    @property
    def way(self) -> str:
        """The name without "stock" ("mixed add_"); empty if it is the role, "as written"."""
        name = self.row["provider"].removeprefix("stock ")
        return "" if name == self.role else name


def against_best(counted: Counted, own: Mapping[str, Counted]) -> str:
    """Return the difference from the best of stock; empty if `own`, by role, has none."""
    best = own.get("best stock")
    return f"{100 * (counted.total / best.total - 1):+.0f} %" if best else ""


def headline(rows: Sequence[Line]) -> dict[str, dict[str, Counted]]:
    """Return the newest count by title and role, in the order of TITLES and ROLES."""
    own = only(rows, benchmark="models", case="counted", mode=MODE, unit="B/param")
    own = [row for row in own if row["median"]]
    own = newest(own, "models") if own else []
    found: dict[str, dict[str, Counted]] = {}
    for dtypes, title in TITLES.items():
        for role in ROLES:
            here = [row for row in only(own, dtypes=dtypes) if row["note"].startswith(f"{role}: ")]
            parts = {row["metric"].removeprefix("bytes: "): float(row["median"]) for row in here}
            if "total" in parts:
                (row,) = only(here, metric="bytes: total")
                counted = Counted(title, role, parts.pop("total"), parts, row)
                found.setdefault(title, {})[role] = counted
    return found
