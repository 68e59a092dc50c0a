"""Rewrites the tables of docs/benchmarks.md and docs/figures.md from the newest rows: run `make bench` first.

    python -m benchmarks.report.page_tables [--results CSV] [--overview PAGE] [--page PAGE]

The overview, docs/benchmarks.md, gets the bytes per parameter of one window, and the range of speeds over the
machines of machines.csv, which is beside the results. The page, docs/figures.md, gets that range by machine,
and every figure that has a goal. Each table is written between its own markers.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from fusedacc.commands.measuring.records import Line, markdown, newest

from ..harness import RESULTS, ROOT
from ..machines import cells, loops
from ..machines.zoo import LAYERS
from ..run_all import APART, SHOWN
from . import headline
from .pages import arguments, beside, conditions, figure, given, markers, rewrite

SPEED = markers("speed")
FIGURES = markers("figures")
BYTES = markers("bytes")
#: The processor itself, with nothing held back.
WHOLE = "native"
MACHINES = markers("machines")
#: Of the bytes, by role: those of ours with the difference to the best of stock.
COLUMNS = {
    "as written": ("stock, as written",),
    "best stock": ("best of stock",),
    "ours": ("fusedacc", "against the best"),
    headline.MODEL: ("fusedacc, `model=`", "against the best"),
    headline.KEPT: ("with `keep_casts=True`", "against the best"),
}
#: What one figure shares with the one it is held against.
CASE = ("case", "mode", "shapes", "dtypes", "metric")


def outcome(row: Line, of: dict[tuple[str, ...], Line]) -> str:
    """The comparison, in words a reader can check."""
    ratio, goal = float(row["speedup"]), float(row["goal"])
    missed = " **missed**" if row["reached"] == "no" else ""
    name = row["against"].removesuffix(" (bytes/s)")
    if row["unit"] != "us":
        limit = ratio * float(row["median"])
        return f"at most {limit:.1f} {row['unit']}: {name}{missed}"
    told = f"{ratio:.2f} times the {'bytes/s' if name != row['against'] else 'speed'} of `{name}`"
    baseline = of.get((*(row[column] for column in CASE), name))
    return told + (f" ({figure(baseline)})" if baseline else "") + f", goal {goal:.3g}{missed}"


def goals(rows: Sequence[Line]) -> str:
    """A table per benchmark: what has a goal, and whether it was reached, in the newest run that has such."""
    lines = []
    for name in SHOWN:
        with_goals = [row for row in rows if row["benchmark"] == name and row["goal"] and row["median"]]
        if not with_goals:
            print(f"no figure with a goal from benchmarks/suites/{name}.py", file=sys.stderr)
            continue
        with_goals = newest(with_goals, name)
        own = [row for row in rows if row["benchmark"] == name and row["date"] == with_goals[-1]["date"]]
        of = {(*(row[column] for column in CASE), row["provider"]): row for row in own if row["median"]}
        lines += [
            conditions(own[-1], APART.get(name, "")),
            "",
            markdown(
                ("case", "dtypes", "way", "median", "against"),
                (
                    (f"{r['case']}, {r['mode']}", r["dtypes"], r["provider"], figure(r), outcome(r, of))
                    for r in with_goals
                ),
            ),
            "",
        ]
    return "\n".join(lines).rstrip()


def cell(counted: headline.Counted) -> str:
    way = "" if counted.ours else counted.way
    return f"{counted.total:.1f}" + (f" ({way})" if way else "")


def window_bytes(rows: Sequence[Line]) -> str:
    """A row per setting, a column per way."""
    found = headline.headline(rows)
    if not found:
        print("no bytes per parameter from benchmarks/suites/models.py", file=sys.stderr)
        return ""
    about = found[0].row
    columns = {role: titles for role, titles in COLUMNS.items() if any(own.role == role for own in found)}
    titles = [title for of_role in columns.values() for title in of_role]
    lines = [
        "Bytes read and written per parameter in one window of 8 micro-batches, with clipping and AdamW. "
        f"Each operand of each operator counts once. The model is {about['shapes']}."
        + (
            " With `model=` the parameters are weights of Linear layers. "
            "No column counts what matrix products read." * (headline.MODEL in columns)
        ),
        "",
        conditions(about),
        "",
    ]
    cells_of = []
    for title in dict.fromkeys(counted.title for counted in found):
        own = {counted.role: counted for counted in found if counted.title == title}
        told = []
        for role, of_role in columns.items():
            counted = own.get(role)
            told.append(cell(counted) if counted else "")
            if len(of_role) > 1:
                told.append(headline.against_best(counted, own) if counted else "")
        cells_of.append([title, *told])
    return "\n".join([*lines, markdown(["", *titles], cells_of)])


def machines(lines: Sequence[Line]) -> str:
    """The range of each loop's speed by machine, from the newest rows of each device."""
    of_devices = cells.by_device(lines)
    if not of_devices:
        print("no speed from benchmarks/machines", file=sys.stderr)
        return ""
    parts = []
    for own in of_devices.values():
        rows = [cells.parsed(line) for line in own]
        models = len({row.model for row in rows} - LAYERS)
        last = {**own[-1], "threads": "as named"}
        parts.append(f"{conditions(last, 'make bench-machines')} {models} models\n\n{cells.by_machine(rows)}")
    about = (
        "Speed of training against the fastest exact loop of stock torch in the same precision, in up to "
        f"{len(loops.PRECISIONS)} precisions: medians of ratios within a round, the worst with its 95 % "
        "interval. All machines but the first two of a table are emulated on the same processor."
    )
    return "\n\n".join([about, *parts])


def speed(lines: Sequence[Line]) -> str:
    """The range of speeds over all devices and machines, in a sentence."""
    of_devices = cells.by_device(lines)
    if not of_devices:
        return ""
    rows = [cells.parsed(line) for own in of_devices.values() for line in own]
    rows = [row for row in rows if row.ratio and row.model not in LAYERS]
    ranges = []
    for loop in (loops.PLAIN, loops.MODEL, loops.KEPT):
        own = [row.ratio for row in rows if row.loop == loop]
        ranges += [(min(own), max(own), statistics.median(own))] if own else []
    (low, high, median), (model_low, model_high, model_median), *kept = ranges
    casts = "".join(
        f" Under autocast `keep_casts=True` ran at {least:.2f} to {most:.2f} times the speed of `model=` "
        f"alone, median {middle:.2f}."
        for least, most, middle in kept
    )
    models = len({row.model for row in rows})
    devices = " and ".join(f"{device} (commit {own[-1]['commit']})" for device, own in of_devices.items())
    held_back = len({row.machine for row in rows} - {WHOLE})
    return (
        f"Training ran at {low:.2f} to {high:.2f} times the speed of the best plain PyTorch loop, "
        f"median {median:.2f}. "
        f"With `model=` it ran at {model_low:.2f} to {model_high:.2f} times that speed, "
        f"median {model_median:.2f}."
        f"{casts} These are {models} models in up to {len(loops.PRECISIONS)} precisions on {devices}, on the "
        f"whole processor and limited to fewer threads or instructions in {held_back} ways. "
        "[Every figure](figures.md) has a table for each machine."
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
