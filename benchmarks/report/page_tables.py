"""Rewrites tables of docs/benchmarks.md, docs/figures.md and docs/memory.md from the newest rows. Run `make
bench` first.

The overview, docs/benchmarks.md, gets the bytes per parameter of one window, and the range of times of real
models. The page, docs/figures.md, gets these times by model and machine, and every figure with a goal.
docs/memory.md gets how well peaks are predicted (suites/planner.py): the newest row of each architecture,
precision and loop, also from runs of only some of them. Each table is written between its markers.
"""

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence

from ..contestants.zoo.training import KEPT as KEPT_LOOP
from ..contestants.zoo.training import MODEL as MODEL_LOOP
from ..contestants.zoo.training import PLAIN, PRECISIONS
from ..harness import RESULTS, ROOT
from ..records import Line, markdown, newest_runs
from ..run_all import APART, SHOWN
from ..suites import planner
from . import pages
from .pages import NoRows, conditions, figure, markers, newest_with, only, table

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
SPEED, FIGURES, BYTES, MODELS = map(markers, ("speed", "figures", "bytes", "real-models"))
ACCURACY = ("<!-- accuracy -->", "<!-- /accuracy -->")
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


def against_best(counted: Counted, by_role: Mapping[str, Counted]) -> str:
    """Return the difference from the best of stock; empty if `own`, by role, has none."""
    best = by_role.get("best stock")
    return f"{100 * (counted.total / best.total - 1):+.0f} %" if best else ""


def headline(rows: Sequence[Line]) -> dict[str, dict[str, Counted]]:
    """Return the newest count by title and role, in the order of TITLES and ROLES. Raises NoRows."""
    of = only(rows, case="counted", mode=MODE, unit="B/param")
    newest_rows = newest_with(of, "models", lambda row: True, "a counted window of 8")
    found: dict[str, dict[str, Counted]] = {}
    for dtypes, title in TITLES.items():
        for role in ROLES:
            here = [row for row in only(newest_rows, dtypes=dtypes) if row["note"].startswith(f"{role}: ")]
            parts = {row["metric"].removeprefix("bytes: "): float(row["median"]) for row in here}
            if "total" in parts:
                (row,) = only(here, metric="bytes: total")
                counted = Counted(title, role, parts.pop("total"), parts, row)
                found.setdefault(title, {})[role] = counted
    return found


def outcome(row: Line, of: dict[tuple[str, ...], Line]) -> str:
    ratio = float(row["speedup"])
    goal = float(row["goal"])
    missed = " **missed**" if row["reached"] == "no" else ""
    name = row["against"].removesuffix(" (bytes/s)")
    if row["unit"] != "us":
        limit = figure(row | {"median": str(ratio * float(row["median"]))})
        return f"at most {limit}: {name}{missed}"
    text = f"{ratio:.2f} times the {'bytes/s' if name != row['against'] else 'speed'} of `{name}`"
    baseline = of.get((*(row[column] for column in CASE), name))
    return text + (f" ({figure(baseline)})" if baseline else "") + f", goal {goal:.3g}{missed}"


def goals(rows: Sequence[Line]) -> str:
    """Return a table per benchmark: each goal in the newest run that has any, and whether it was reached."""
    parts = []
    for name in SHOWN:
        try:
            with_goals = newest_with(rows, name, lambda row: row["goal"], "a goal")
        except NoRows as why:
            print(why, file=sys.stderr)
            continue
        of_run = only(rows, benchmark=name, date=with_goals[-1]["date"])
        of = {(*(row[column] for column in CASE), row["provider"]): row for row in of_run if row["median"]}
        lines = (
            (f"{r['case']}, {r['mode']}", r["dtypes"], r["provider"], figure(r), outcome(r, of))
            for r in with_goals
        )
        head = ("case", "dtypes", "way", "median", "against")
        parts.append(table(of_run[-1], APART.get(name, ""), head, lines))
    if not parts:
        raise NoRows("there is no figure with a goal")
    return "\n\n".join(parts)


def window_bytes(rows: Sequence[Line]) -> str:
    found = headline(rows)
    about = next(counted.row for by_role in found.values() for counted in by_role.values())
    columns = {
        role: titles for role, titles in COLUMNS.items() if any(role in by_role for by_role in found.values())
    }
    text = (
        "Bytes read and written per parameter in one window of 8 micro-batches, with clipping and AdamW. "
        f"Each operand of each operator counts once. The model is {about['shapes']}."
    )
    if MODEL in columns:
        text += " With `model=` the parameters are weights of Linear layers. "
        text += "No column counts what matrix products read."
    lines = []
    for title, by_role in found.items():
        line = [title]
        for role, titles in columns.items():
            cells_of = [""] * len(titles)
            if counted := by_role.get(role):
                way = "" if counted.ours or not counted.way else f" ({counted.way})"
                cells_of = [f"{counted.total:.1f}{way}", against_best(counted, by_role)][: len(titles)]
            line += cells_of
        lines.append(line)
    head = ["", *(title for titles in columns.values() for title in titles)]
    return f"{text}\n\n{conditions(about)}\n\n{markdown(head, lines)}"


def real_models(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Return the newest times of our loops on real models, by device. Raises NoRows."""
    of_suite = [line for line in lines if line["benchmark"] == "real_models"]
    newest = [line for line in newest_runs(of_suite) if line["metric"] == "time" and line["speedup"]]
    if not newest:
        raise NoRows(f"there are no rows of benchmarks/suites/real_models.py: {APART['real_models']}")
    devices = dict.fromkeys(line["device"] for line in newest)
    return {device: only(newest, device=device) for device in devices}


def relative_time(line: Line) -> float:
    """Return a loop's time relative to the loop that it is compared with."""
    return 1 / float(line["speedup"])


def speed(lines: Sequence[Line]) -> str:
    """Return the range of times over all devices, models and precisions, in sentences."""
    found = real_models(lines)
    every = [line for of_device in found.values() for line in of_device]

    def range_of(loop: str) -> str:
        times = [relative_time(line) for line in every if line["provider"] == loop]
        return f"{min(times):.2f} to {max(times):.2f}, median {statistics.median(times):.2f}"

    text = (
        f"Relative to the best plain PyTorch loop, a window took this time: {range_of(PLAIN)}. With "
        f"`model=`: {range_of(MODEL_LOOP)}."
    )
    if any(line["provider"] == KEPT_LOOP for line in every):
        text += f" Under autocast with `keep_casts=True`, relative to `model=` alone: {range_of(KEPT_LOOP)}."
    models = len({line["case"] for line in every})
    precisions = len({line["dtypes"] for line in every})
    devices = [f"{device} (commit {of_device[-1]['commit']})" for device, of_device in found.items()]
    return (
        f"{text} These are {models} models in up to {precisions} precisions on {' and '.join(devices)}. "
        "[Every figure](figures.md) has a table for each machine."
    )


def times_by_model(lines: Sequence[Line]) -> str:
    """Return a table per device: a row per model, and a column per precision."""
    parts = [
        "Time of a window relative to the fastest exact loop of plain PyTorch in the same precision, without "
        "and with `model=`: medians of ratios within a round. Under autocast a third number is the time of "
        "`keep_casts=True` relative to `model=` alone."
    ]
    for of_device in real_models(lines).values():
        times = {(line["case"], line["dtypes"], line["provider"]): relative_time(line) for line in of_device}
        table_lines = []
        for model in dict.fromkeys(line["case"] for line in of_device):
            cells = [model]
            for precision in PRECISIONS:
                loops = [loop for loop in (PLAIN, MODEL_LOOP, KEPT_LOOP) if (model, precision, loop) in times]
                cells.append(" / ".join(f"{times[model, precision, loop]:.2f}" for loop in loops))
            table_lines.append(cells)
        parts.append(table(of_device[-1], APART["real_models"], ("model", *PRECISIONS), table_lines))
    return "\n\n".join(parts)


def predictions(rows: Sequence[Line]) -> str:
    """Return a row per architecture and precision, and a column per loop. Raises NoRows."""
    of_planner = [row for row in only(rows, benchmark="planner") if row["bytes"]]
    sizes = {
        (row["case"], row["dtypes"], *row["provider"].rsplit(": ", 1)): int(row["bytes"])
        for row in of_planner
    }
    found = {
        key[:3]: (sizes[(*key[:3], "predicted")] / size, size)
        for key, size in sizes.items()
        if key[3] == "measured" and (*key[:3], "predicted") in sizes
    }
    if not found:
        raise NoRows(f"there are no rows of benchmarks/suites/planner.py: {APART['planner']}")
    ways = [way for way in planner.LOOPS if any(key[2] == way for key in found)]
    off = [abs(ratio - 1) for ratio, _ in found.values()]
    cases = list(dict.fromkeys(key[0] for key in found))
    lines = []
    for case, precision in itertools.product(cases, planner.PRECISIONS):
        here = {way: found[case, precision, way] for way in ways if (case, precision, way) in found}
        if here:
            span = sorted({round(size / 1e6) for _, size in here.values()})
            measured = f"{' to '.join(map(str, span[:1] + span[1:][-1:]))} MB"
            ratios = [f"{here[way][0]:.3f}" if way in here else "" for way in ways]
            lines.append([case, precision, measured, *ratios])
    within = f"{sum(each <= planner.TOLERANCE for each in off)} of {len(off)} combinations"
    about = (
        f"Peak as predicted over peak as measured, the allocator's bytes counted: {within} of {len(cases)} "
        f"architectures within {planner.TOLERANCE:.0%}, the furthest {max(off):.1%} off."
    )
    head = ["", "", "measured", *(f"`{way}`" if "=" in way else way for way in ways)]
    return f"{about}\n\n{table(of_planner[-1], APART['planner'], head, lines)}"


def main() -> None:
    paths = {"overview": "benchmarks.md", "page": "figures.md", "memory": "memory.md"}
    found = {name: ROOT / "docs" / page for name, page in paths.items()}
    options, rows = pages.given(pages.arguments(__doc__, results=RESULTS, **found), "make bench")
    pages.rewrite(
        {
            options.overview: {BYTES: lambda: window_bytes(rows), SPEED: lambda: speed(rows)},
            options.page: {MODELS: lambda: times_by_model(rows), FIGURES: lambda: goals(rows)},
            options.memory: {ACCURACY: lambda: predictions(rows)},
        }
    )


if __name__ == "__main__":
    main()
