"""The tables of docs/rounding.md, from the newest rows of each part of suites/rounding.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fusedacc.commands.measuring.records import Line, markdown

from ..contestants.loops import KINDS
from ..contestants.rounded import FLOAT32, NEAREST, STOCHASTIC, STOCK
from .charts import MODELS
from .pages import conditions, figure, of

COMMAND = "python -m benchmarks.suites.rounding --only"
#: Micro-batches whose sums have a line.
COUNTS = (8, 64, 256, 512, 1024, 2048)
STATES = {"after 0 updates": "initial weights"}


def of_training(rows: Sequence[Line]) -> list[Line]:
    """Of each k the newest, which may be of several runs. Raises NoRows."""
    last = {row["case"]: row["date"] for row in rows if row["benchmark"] == "training"}
    found = [row for row in rows if last.get(row["case"]) == row["date"] and row["benchmark"] == "training"]
    return found or of(rows, "rounding", "training")


def by_seed(rows: Sequence[Line]) -> dict[float, list[float]]:
    """What was found with each seed, by `at`, in ascending order."""
    found: dict[float, list[float]] = {}
    for row in sorted(rows, key=lambda row: (float(row["at"]), int(row["seed"]))):
        found.setdefault(float(row["at"]), []).append(float(row["median"]))
    return found


def written(row: Line, part: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """The conditions and the table."""
    about = conditions(row, f"{COMMAND} {part}")
    return about + "\n\n" + markdown(head, lines)


def mean_and_spread(values: Sequence[float], digits: int) -> str:
    """The mean and the standard deviation over seeds."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}"


def training(rows: Sequence[Line]) -> str:
    """The loss on unseen text, and how far it is above that with float32 sums."""
    own = of_training(rows)
    lines = []
    for k in sorted({int(row["k"]) for row in own}):
        for name in (FLOAT32, NEAREST, STOCHASTIC):
            mine = [row for row in own if (row["k"], row["provider"]) == (str(k), name)]
            (losses,) = by_seed([row for row in mine if row["metric"] == "unseen loss"]).values()
            cells = [str(k), name, str(len(losses)), mean_and_spread(losses, 4)]
            above = by_seed([row for row in mine if row["metric"] == f"unseen loss above {FLOAT32}"])
            for off in above.values() or [None]:
                cells += ["", ""] if off is None else [mean_and_spread(off, 5), f"{max(map(abs, off)):.5f}"]
            lines.append(cells)
    head = ("k", "", "seeds", "loss on unseen text, nats", "above float32 sums", "the furthest seed")
    return written(own[0], "training", head, lines)


def sums(rows: Sequence[Line]) -> str:
    """The error of a window's sum and what is left of it, by micro-batches, for each case."""
    own = of(rows, "rounding", "sums")
    cases = sorted(dict.fromkeys(row["case"] for row in own))
    lines = []
    for case in cases:
        size, state = case.split(", ")
        for name in (NEAREST, STOCHASTIC):
            cells = []
            for at in COUNTS:
                found = {
                    row["metric"]: float(row["median"])
                    for row in own
                    if (row["case"], row["provider"], float(row["at"])) == (case, name, at)
                }
                told = f"{100 * found['apart']:.1f} % / {100 * found['share kept']:.1f} %" if found else ""
                cells.append(told)
            lines.append(
                [f"{size}, {STATES.get(state, state)}", name.removeprefix("bfloat16 sums, "), *cells]
            )
    return written(own[0], "sums", ("error / share kept", "", *(f"k = {at}" for at in COUNTS)), lines)


def additions(rows: Sequence[Line]) -> str:
    """What the elements are at the end."""
    own = of(rows, "rounding", "statistics")
    last = max(float(row["at"]) for row in own if row["metric"] == "mean")
    lines = []
    for name in (NEAREST, STOCHASTIC):
        found = {
            row["metric"]: float(row["median"])
            for row in own
            if row["provider"] == name and row["metric"] != "elements" and float(row["at"]) == last
        }
        off = f"{found['off by']:+.2f}" if "off by" in found else ""
        cells = [f"{found['mean']:.5g}", f"{found['standard error']:.2g}", off]
        lines.append([name, *cells, f"{100 * found['share kept']:.2f} %"])
    head = (own[0]["case"], "mean", "standard error", "off by, in standard errors", "share kept")
    return written(own[0], "statistics", head, lines)


def speed(rows: Sequence[Line]) -> str:
    """One addition to one large tensor."""
    own = of(rows, "rounding", "speed")
    lines = []
    for name in dict.fromkeys(row["provider"] for row in own):
        mine = [row for row in own if row["provider"] == name]
        ratios = {row["against"]: f"{float(row['speedup']):.2f}" for row in mine if row["against"]}
        share, rate = float(mine[0]["percent_of_peak"]), float(mine[0]["gb_per_s"])
        cells = [f"`{name}`" if name in ("copy", "triad") else name, figure(mine[0]), f"{rate:.1f}"]
        lines.append([*cells, f"{share:.0f} %", ratios.get(FLOAT32, ""), ratios.get(NEAREST, "")])
    head = (own[0]["case"], "median", "GB/s", "of the bandwidth", "x float32 sums", "x to nearest")
    return written(own[0], "speed", head, lines)


def lists(rows: Sequence[Line]) -> str:
    """One addition to all parameters of a model."""
    own = of(rows, "rounding", "lists")
    lines = []
    for model in dict.fromkeys(row["case"] for row in own):
        mine = [row for row in own if row["case"] == model and row["median"]]
        if not mine:
            continue
        times = [figure(next(r for r in mine if r["provider"] == n)) for n in (FLOAT32, NEAREST, STOCHASTIC)]
        ratios = [
            next(f"{float(r['speedup']):.2f}" for r in mine if r["against"] == n) for n in (FLOAT32, NEAREST)
        ]
        lines.append([MODELS[model], mine[0]["shapes"], *times, *ratios])
    head = ("", "", "float32 sums", "to nearest", "stochastic", "x float32 sums", "x to nearest")
    return written(own[0], "speed", head, lines)


def memory(rows: Sequence[Line]) -> str:
    """Bytes a parameter at the peak, and their kinds."""
    own = of(rows, "rounding", "memory")
    lines = []
    for name in (FLOAT32, NEAREST, STOCHASTIC, STOCK):
        mine = {row["metric"]: float(row["median"]) for row in own if row["provider"] == name}
        kinds = [f"{mine[f'peak memory: {kind}']:.2f}" for kind in KINDS]
        lines.append([name, f"{mine['peak memory']:.2f}", *kinds])
    head = ("bytes a parameter", "peak", *KINDS)
    return written(own[0], "memory", head, lines)


TABLES = {
    "training": training,
    "sums": sums,
    "statistics": additions,
    "speed": speed,
    "lists": lists,
    "memory": memory,
}
