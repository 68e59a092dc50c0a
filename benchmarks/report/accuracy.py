"""Writes into docs/memory.md how well peaks are predicted, from the newest rows of suites/planner.py, and
what really runs under a limit, from those of suites/planner_limit.py.

    python -m benchmarks.report.accuracy [--results CSV] [--page docs/memory.md]

Of each architecture, precision and loop its newest row, also where a run has measured some of them only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fusedacc.commands.measuring.records import Line

from ..harness import RESULTS, ROOT
from ..run_all import APART
from ..suites.planner import LOOPS, PRECISIONS, TOLERANCE
from ..suites.planner_limit import ALLOCATORS, LARGEST, MAPPED, OURS
from .pages import arguments, conditions, given, markers, rewrite

MARKERS = ("<!-- accuracy -->", "<!-- /accuracy -->")
LIMIT_MARKERS = markers("limit")


def ratios(rows: Sequence[Line]) -> dict[tuple[str, str, str], tuple[float, int]]:
    """Predicted to measured, and bytes measured, by architecture, precision and loop."""
    bytes_of = {}
    for row in rows:
        if row["benchmark"] == "planner" and row["bytes"]:
            way, _, what = row["provider"].rpartition(": ")
            bytes_of[row["case"], row["dtypes"], way, what] = int(row["bytes"])
    measured = {key[:3]: size for key, size in bytes_of.items() if key[3] == "measured"}
    return {
        key: (bytes_of[(*key, "predicted")] / size, size)
        for key, size in measured.items()
        if (*key, "predicted") in bytes_of
    }


def table(rows: Sequence[Line]) -> str:
    """A row per architecture and precision, a column per loop; "" where there is nothing to tell."""
    found = ratios(rows)
    if not found:
        print(f"no rows of benchmarks/suites/planner.py: {APART['planner']}", file=sys.stderr)
        return ""
    about = next(row for row in reversed(rows) if row["benchmark"] == "planner" and row["bytes"])
    ways = [way for way in LOOPS if any(key[2] == way for key in found)]
    off = [abs(ratio - 1) for ratio, _ in found.values()]
    within = sum(own <= TOLERANCE for own in off)
    cases = list(dict.fromkeys(key[0] for key in found))
    worst = max(off)
    lines = [
        f"Peak as predicted over peak as measured, the allocator's bytes counted: {within} of {len(off)} "
        f"combinations of {len(cases)} architectures within {TOLERANCE:.0%}, the furthest {worst:.1%} off.",
        "",
        conditions(about, APART["planner"]),
        "",
        f"| | | measured | {' | '.join(f'`{way}`' if '=' in way else way for way in ways)} |",
        "|---|---|---|" + "---|" * len(ways),
    ]
    for case in cases:
        for precision in PRECISIONS:
            own = {way: found[case, precision, way] for way in ways if (case, precision, way) in found}
            if own:
                sizes = sorted({round(size / 1e6) for _, size in own.values()})
                span = f"{' to '.join(map(str, sizes[:1] + sizes[1:][-1:]))} MB"
                told = [f"{own[way][0]:.3f}" if way in own else "" for way in ways]
                lines.append(f"| {case} | {precision} | {span} | {' | '.join(told)} |")
    return "\n".join(lines)


def limits(rows: Sequence[Line]) -> str:
    """A row per model: the planner's micro-batch, and the largest that runs; "" where there is nothing."""
    own = [row for row in rows if row["benchmark"] == "planner limit" and row["median"]]
    if not own:
        print(f"no rows of benchmarks/suites/planner_limit.py: {APART['planner_limit']}", file=sys.stderr)
        return ""
    found = {(row["case"], row["mode"], row["provider"]): row for row in own}
    lines = ["| model; budget | planned | runs, memory mapped | runs, defaults |", "|---|---|---|---|"]
    for case in dict.fromkeys(row["case"] for row in own):
        planned = found[case, MAPPED, OURS]
        told = [found[case, mode, LARGEST]["median"] for mode in ALLOCATORS if (case, mode, LARGEST) in found]
        lines.append(f"| {case}: {planned['shapes']} | {planned['median']} | {' | '.join(told)} |")
    return "\n".join([conditions(own[-1], APART["planner_limit"]), "", *lines])


def main() -> None:
    parser = arguments(__doc__, results=RESULTS, page=ROOT / "docs" / "memory.md")
    options, rows = given(parser, APART["planner"])
    rewrite({options.page: {MARKERS: table(rows), LIMIT_MARKERS: limits(rows)}})


if __name__ == "__main__":
    main()
