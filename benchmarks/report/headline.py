"""The headline: bytes per parameter of one window, by setting and way, from the newest rows of models.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from fusedacc.commands.measuring.records import newest

MODE = "window k=8"
CASE = "counted"
UNIT = "B/param"
MODEL, KEPT = "ours, model=", "ours, model=, keep_casts="
#: A row's note begins with its way's role.
ROLES = ("as written", "best stock", "ours", MODEL, KEPT)
#: By the column `dtypes`.
TITLES = {
    "float32 into float32": "float32 parameters and sums",
    "autocast bfloat16 into float32": "float32 parameters under autocast(bfloat16)",
    "bfloat16 into float32": "bfloat16 parameters, float32 sums",
}


@dataclasses.dataclass(frozen=True)
class Counted:
    """What one way moves in a window, in bytes per parameter. `row`: that of the total."""

    title: str
    role: str
    total: float
    parts: dict[str, float]
    row: dict[str, str]

    @property
    def ours(self) -> bool:
        return self.role.startswith("ours")

    @property
    def way(self) -> str:
        """Its name without "stock" ("mixed add_"); empty for what is only its role, "as written"."""
        name = self.row["provider"].removeprefix("stock ")
        return "" if name == self.role else name


def against_best(counted: Counted, own: Mapping[str, Counted]) -> str:
    """How much more or less it moves than the best of stock; empty where `own`, by role, has none."""
    best = own.get("best stock")
    return f"{100 * (counted.total / best.total - 1):+.0f} %" if best else ""


def headline(rows: Sequence[dict[str, str]]) -> list[Counted]:
    """One entry per setting and role that the newest count has, in the order of TITLES and ROLES."""
    wanted = ("models", CASE, MODE, UNIT)
    columns = ("benchmark", "case", "mode", "unit")
    own = [row for row in rows if tuple(row[name] for name in columns) == wanted and row["median"]]
    own = newest(own, "models") if own else []
    found = []
    for dtypes, title in TITLES.items():
        for role in ROLES:
            of = {r["metric"]: r for r in own if r["dtypes"] == dtypes and r["note"].startswith(f"{role}: ")}
            total = of.pop("bytes: total", None)
            if total:
                parts = {name.removeprefix("bytes: "): float(row["median"]) for name, row in of.items()}
                found.append(Counted(title, role, float(total["median"]), parts, total))
    return found
