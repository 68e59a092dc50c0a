"""Rewrites the tables of docs/benchmarks.md and docs/figures.md from the newest rows. Run `make bench` first.

    python -m benchmarks.report.page_tables [--results CSV] [--overview PAGE] [--page PAGE]

The overview, docs/benchmarks.md, gets the bytes per parameter of one window, and the range of speeds over the
machines of machines.csv, which is beside the results. The page, docs/figures.md, gets that range by machine,
and every figure with a goal. Each table is written between its markers.
"""

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence

from fusedacc.commands.measuring.records import Line, markdown, newest

from ..harness import RESULTS, ROOT
from ..machines import cells, loops
from ..machines.zoo import LAYERS
from ..run_all import APART, SHOWN
from .pages import arguments, beside, conditions, figure, given, markers, only, rewrite, table

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
SPEED, FIGURES, BYTES, MACHINES = map(markers, ("speed", "figures", "bytes", "machines"))
#: The machine that is not limited.
WHOLE = "native"
#: The columns of the bytes, by role. Ours have a second one for the difference from the best of stock.
COLUMNS = {
    "as written": ("PyTorch, as written",),
    "best stock": ("PyTorch, best loop",),
    "ours": ("fusedacc", "against the best"),
    MODEL: ("fusedacc, `model=`", "against the best"),
    KEPT: ("with `keep_casts=True`", "against the best"),
}
#: The columns that a figure shares with its baseline.
CASE = ("case", "mode", "shapes", "dtypes", "metric")


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


def outcome(row: Line, of: dict[tuple[str, ...], Line]) -> str:
    ratio, goal = float(row["speedup"]), float(row["goal"])
    missed = " **missed**" if row["reached"] == "no" else ""
    name = row["against"].removesuffix(" (bytes/s)")
    if row["unit"] != "us":
        limit = ratio * float(row["median"])
        return f"at most {limit:.1f} {row['unit']}: {name}{missed}"
    text = f"{ratio:.2f} times the {'bytes/s' if name != row['against'] else 'speed'} of `{name}`"
    baseline = of.get((*(row[column] for column in CASE), name))
    return text + (f" ({figure(baseline)})" if baseline else "") + f", goal {goal:.3g}{missed}"


def goals(rows: Sequence[Line]) -> str:
    """Return a table per benchmark: each goal in the newest run that has any, and whether it was reached."""
    parts = []
    for name in SHOWN:
        with_goals = [row for row in only(rows, benchmark=name) if row["goal"] and row["median"]]
        if not with_goals:
            print(f"no figure with a goal from benchmarks/suites/{name}.py", file=sys.stderr)
            continue
        with_goals = newest(with_goals, name)
        own = only(rows, benchmark=name, date=with_goals[-1]["date"])
        of = {(*(row[column] for column in CASE), row["provider"]): row for row in own if row["median"]}
        lines = (
            (f"{r['case']}, {r['mode']}", r["dtypes"], r["provider"], figure(r), outcome(r, of))
            for r in with_goals
        )
        head = ("case", "dtypes", "way", "median", "against")
        parts.append(table(own[-1], APART.get(name, ""), head, lines))
    return "\n\n".join(parts)


def window_bytes(rows: Sequence[Line]) -> str:
    found = headline(rows)
    if not found:
        print("no bytes per parameter from benchmarks/suites/models.py", file=sys.stderr)
        return ""
    about = next(counted.row for own in found.values() for counted in own.values())
    columns = {role: titles for role, titles in COLUMNS.items() if any(role in own for own in found.values())}
    text = (
        "Bytes read and written per parameter in one window of 8 micro-batches, with clipping and AdamW. "
        f"Each operand of each operator counts once. The model is {about['shapes']}."
    )
    if MODEL in columns:
        text += " With `model=` the parameters are weights of Linear layers. "
        text += "No column counts what matrix products read."
    lines = []
    for title, own in found.items():
        line = [title]
        for role, titles in columns.items():
            counted = own.get(role)
            if counted is None:
                line += [""] * len(titles)
                continue
            way = "" if counted.ours or not counted.way else f" ({counted.way})"
            line.append(f"{counted.total:.1f}{way}")
            line += [against_best(counted, own)] * (len(titles) - 1)
        lines.append(line)
    head = ["", *(title for titles in columns.values() for title in titles)]
    return f"{text}\n\n{conditions(about)}\n\n{markdown(head, lines)}"


def machines(lines: Sequence[Line]) -> str:
    """Return the range of each loop's speed by machine, from the newest rows of each device."""
    of_devices = cells.by_device(lines)
    if not of_devices:
        print("no speed from benchmarks/machines", file=sys.stderr)
        return ""
    parts = [
        "Speed of training relative to the fastest exact loop of plain PyTorch in the same precision, in up "
        f"to {len(loops.PRECISIONS)} precisions: medians of ratios within a round, the worst with its 95 % "
        "interval. All machines but the first two of a table are emulated on the same processor."
    ]
    for own in of_devices.values():
        rows = [cells.parsed(line) for line in own]
        models = len({row.model for row in rows} - LAYERS)
        last = {**own[-1], "threads": "as named"}
        parts.append(f"{conditions(last, 'make bench-machines')} {models} models\n\n{cells.by_machine(rows)}")
    return "\n\n".join(parts)


def speed(lines: Sequence[Line]) -> str:
    """Return the range of speeds over all devices and machines, in a sentence."""
    of_devices = cells.by_device(lines)
    rows = [cells.parsed(line) for own in of_devices.values() for line in own]
    rows = [row for row in rows if row.ratio and row.model not in LAYERS]
    if not rows:
        return ""
    ranges = {}
    for loop in (loops.PLAIN, loops.MODEL, loops.KEPT):
        own = [row.ratio for row in rows if row.loop == loop]
        if own:
            low, high, median = min(own), max(own), statistics.median(own)
            ranges[loop] = f"{low:.2f} to {high:.2f} times", f"median {median:.2f}"
    plain, model = ranges[loops.PLAIN], ranges[loops.MODEL]
    casts = ""
    if loops.KEPT in ranges:
        speeds, median = ranges[loops.KEPT]
        casts = f" Under autocast `keep_casts=True` ran at {speeds} the speed of `model=` alone, {median}."
    models = len({row.model for row in rows})
    devices = " and ".join(f"{device} (commit {own[-1]['commit']})" for device, own in of_devices.items())
    limited = len({row.machine for row in rows} - {WHOLE})
    return (
        f"Training ran at {plain[0]} the speed of the best plain PyTorch loop, {plain[1]}. "
        f"With `model=` it ran at {model[0]} that speed, {model[1]}.{casts} These are {models} models in up "
        f"to {len(loops.PRECISIONS)} precisions on {devices}, on the whole processor and limited to fewer "
        f"threads or instructions in {limited} ways. [Every figure](figures.md) has a table for each machine."
    )


def main() -> None:
    paths = {"overview": ROOT / "docs" / "benchmarks.md", "page": ROOT / "docs" / "figures.md"}
    options, rows = given(arguments(__doc__, results=RESULTS, **paths), "make bench")
    of_machines = beside(options, cells.RESULTS.name)
    rewrite(
        {
            options.overview: {BYTES: window_bytes(rows), SPEED: speed(of_machines)},
            options.page: {MACHINES: machines(of_machines), FIGURES: goals(rows)},
        }
    )


if __name__ == "__main__":
    main()
