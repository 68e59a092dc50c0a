"""Writes two tables of docs/memory.md: how well peaks are predicted (suites/planner.py), and which
micro-batch really runs under a limit (suites/planner_limit.py).

    python -m benchmarks.report.accuracy [--results CSV] [--page docs/memory.md]

The first shows the newest row of each architecture, precision and loop, also from runs of only some of them.
"""

import sys
from collections.abc import Sequence

from fusedacc.commands.measuring.records import Line, markdown

from ..harness import RESULTS, ROOT
from ..run_all import APART
from ..suites.planner import LOOPS, PRECISIONS, TOLERANCE
from ..suites.planner_limit import ALLOCATORS, LARGEST, MAPPED, OURS
from .pages import arguments, conditions, given, markers, rewrite, table

MARKERS = ("<!-- accuracy -->", "<!-- /accuracy -->")
LIMIT_MARKERS = markers("limit")


def predictions(rows: Sequence[Line]) -> str:
    """Return a row per architecture and precision, and a column per loop; "" without rows."""
    own = [row for row in rows if row["benchmark"] == "planner" and row["bytes"]]
    sizes = {(row["case"], row["dtypes"], *row["provider"].rsplit(": ", 1)): int(row["bytes"]) for row in own}
    found = {
        key[:3]: (sizes[(*key[:3], "predicted")] / size, size)
        for key, size in sizes.items()
        if key[3] == "measured" and (*key[:3], "predicted") in sizes
    }
    if not found:
        print(f"no rows of benchmarks/suites/planner.py: {APART['planner']}", file=sys.stderr)
        return ""
    ways = [way for way in LOOPS if any(key[2] == way for key in found)]
    off = [abs(ratio - 1) for ratio, _ in found.values()]
    cases, lines = list(dict.fromkeys(key[0] for key in found)), []
    for case in cases:
        for precision in PRECISIONS:
            here = {way: found[case, precision, way] for way in ways if (case, precision, way) in found}
            if here:
                span = sorted({round(size / 1e6) for _, size in here.values()})
                measured = f"{' to '.join(map(str, span[:1] + span[1:][-1:]))} MB"
                ratios = [f"{here[way][0]:.3f}" if way in here else "" for way in ways]
                lines.append([case, precision, measured, *ratios])
    within = f"{sum(each <= TOLERANCE for each in off)} of {len(off)} combinations"
    about = (
        f"Peak as predicted over peak as measured, the allocator's bytes counted: {within} of {len(cases)} "
        f"architectures within {TOLERANCE:.0%}, the furthest {max(off):.1%} off."
    )
    head = ["", "", "measured", *(f"`{way}`" if "=" in way else way for way in ways)]
    return f"{about}\n\n{conditions(own[-1], APART['planner'])}\n\n{markdown(head, lines)}"


def limits(rows: Sequence[Line]) -> str:
    """Return the planner's micro-batch and the largest that runs, per model; "" without rows."""
    own = [row for row in rows if row["benchmark"] == "planner limit" and row["median"]]
    if not own:
        print(f"no rows of benchmarks/suites/planner_limit.py: {APART['planner_limit']}", file=sys.stderr)
        return ""
    found = {(row["case"], row["mode"], row["provider"]): row for row in own}
    lines = []
    for case in dict.fromkeys(row["case"] for row in own):
        planned = found[case, MAPPED, OURS]
        runs = [found[case, mode, LARGEST]["median"] for mode in ALLOCATORS if (case, mode, LARGEST) in found]
        lines.append([f"{case}: {planned['shapes']}", planned["median"], *runs])
    head = ("model; budget", "planned", "runs, memory mapped", "runs, defaults")
    return table(own[-1], APART["planner_limit"], head, lines)


def main() -> None:
    parser = arguments(__doc__, results=RESULTS, page=ROOT / "docs" / "memory.md")
    options, rows = given(parser, APART["planner"])
    rewrite({options.page: {MARKERS: predictions(rows), LIMIT_MARKERS: limits(rows)}})


if __name__ == "__main__":
    main()
