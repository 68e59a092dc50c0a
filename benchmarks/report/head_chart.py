"""Draws docs/figures/head_memory.png and .svg and writes the tables of docs/head.md: `make head-figures`.

python -m benchmarks.report.head_chart [--results CSV] [--out docs/figures] [--page docs/head.md]
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from fusedacc.commands.measuring.plots import BLUE, FAINT, GREY
from fusedacc.commands.measuring.records import Line, markdown, newest_runs

from ..harness import RESULTS, ROOT
from ..suites.head import OURS, PEAK_TOKENS, PEAK_WIDTH, PLAIN, TOKENS, formulas
from .pages import conditions, figure, finish, of, run

COLOURS = {PLAIN: GREY, OURS: BLUE}
#: The size of the table of other ways.
_TOKENS, _VOCABULARY, _WIDTH = 128, 50_257, 768


def memory(rows: Sequence[Line]) -> Figure:
    """The peak of a head's forward and backward against the vocabulary."""
    own = of(rows, "head", "head_memory")
    figure, axes = plt.subplots(figsize=(7.5, 4.4))
    for way, colour in COLOURS.items():
        points = [(int(row["case"]) / 1000, float(row["median"])) for row in own if row["provider"] == way]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", linewidth=2)
        axes.annotate(f"{points[-1][1]:.0f} MB", points[-1], (0, 7), textcoords="offset points", ha="center")
    axes.set_xlabel("classes in the vocabulary, thousands")
    axes.set_ylabel("MB at the peak")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=FAINT)
    text = (
        f"Live bytes of one forward and backward beside weight, sum and input: {PEAK_TOKENS} tokens, width "
        f"{PEAK_WIDTH}, float32. PyTorch holds the logits, their gradient and the weight's gradient."
    )
    return finish(figure, "Memory of a language model's head", own[0], text, COLOURS)


def by_case(rows: Sequence[Line]) -> dict[tuple[str, str], dict[tuple[str, str], Line]]:
    """Rows by case and dtype, then by provider and metric; without what could not run."""
    found: dict[tuple[str, str], dict[tuple[str, str], Line]] = {}
    for row in rows:
        if row["median"]:
            found.setdefault((row["case"], row["dtypes"]), {})[row["provider"], row["metric"]] = row
    return found


def pair(row: Line) -> tuple[float, str]:
    """Ours: the share of PyTorch's time, and p20 to p80."""
    ends = [f"{float(row[end]) / 1000:,.0f}" for end in ("p20", "p80")]
    return 1 / float(row["speedup"]), f"{figure(row)} ({ends[0]} to {ends[1]})"


def goals(rows: Sequence[Line]) -> str:
    """Time and peak of the sizes that have goals: a table for each device."""
    of(rows, "head", "head")
    parts = []
    own = newest_runs([row for row in rows if row["benchmark"] == "head"])
    for device in dict.fromkeys(row["device"] for row in own):
        lines = []
        of_device = [row for row in own if row["device"] == device]
        for (case, dtypes), cells in by_case(of_device).items():
            share, ours = pair(cells[OURS, "time"])
            peaks = [figure(cells[way, "peak memory"]) for way in (PLAIN, OURS)]
            lines.append((case, dtypes, figure(cells[PLAIN, "time"]), ours, f"{share:.3f}", *peaks))
        head = ("case", "dtype", "PyTorch", "fusedacc (p20 to p80)", "share of PyTorch's time")
        table = markdown((*head, "peak, PyTorch", "peak, fusedacc"), lines)
        parts.append(f"{conditions({**of_device[-1], 'threads': 'as named'})}\n\n{table}")
    return "\n\n".join(parts)


def sweep(rows: Sequence[Line]) -> str:
    """A row for each dtype and weight, a column for each number of tokens."""
    own = of(rows, "head", "head_sweep")
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for (case, dtypes), cells in by_case(own).items():
        sizes, tokens = case.removesuffix(" tokens").split(", ")
        before, after = (float(cells[way, "peak memory"]["median"]) for way in (PLAIN, OURS))
        share, _ = pair(cells[OURS, "time"])
        lines.setdefault((dtypes, sizes), {})[int(tokens)] = f"{share:.2f}; {before:,.0f} → {after:.1f}"
    table = markdown(
        ("dtype", "weight", *(f"{tokens:,}" for tokens in TOKENS)),
        (
            (*key, *(line.get(tokens, "") for tokens in TOKENS))
            for key, line in sorted(lines.items(), key=lambda item: (item[0][0], _weight(item[0][1])))
        ),
    )
    return f"{conditions(own[-1], 'python -m benchmarks.suites.head --full --only head_sweep')}\n\n{table}"


def _weight(sizes: str) -> tuple[int, ...]:
    return tuple(map(int, sizes.split(" x ")))


def ways(rows: Sequence[Line]) -> str:
    """PyTorch, ours, torch's chunks, and the others by formula, at one size."""
    own = [row for name in ("head", "head_chunks") for row in of(rows, "head", name)]
    case = f"{_VOCABULARY} x {_WIDTH}, {_TOKENS} tokens"
    wanted = [row for row in own if row["case"].startswith(case) and row["dtypes"] == "float32"]
    cells = {(row["provider"], row["metric"]): row for row in reversed(wanted) if "AVX2" not in row["case"]}
    lines = []
    for way in dict.fromkeys(row["provider"] for row in wanted):
        time, peak = cells[way, "time"], figure(cells[way, "peak memory"])
        moved = f"{int(time['bytes']) / 1e6:,.0f} MB" if time["bytes"] else ""
        lines.append((way, figure(time), moved, peak))
    for way, (total, most) in formulas(_VOCABULARY, _WIDTH, _TOKENS, 4).items():
        lines.append((f"{way}, by formula", "", f"{total / 1e6:,.0f} MB", f"{most / 1e6:.1f} MB"))
    about = f"{case}, float32. {conditions({**own[-1], 'threads': own[0]['threads']})}"
    return f"{about}\n\n{markdown(('way', 'time', 'bytes moved', 'peak'), lines)}"


def limit(rows: Sequence[Line]) -> str:
    """A small GPT under a limit of live memory."""
    own = of(rows, "head", "head_limit")
    cells = {(row["provider"], row["metric"]): row for row in own if row["median"]}
    lines = [
        (way, *(f"{float(cells[way, metric]['median']):,.0f}" for metric in ("micro-batch", "speed")))
        for way in (PLAIN, OURS)
        if (way, "speed") in cells
    ]
    about = f"{own[0]['shapes']}, float32, AdamW, at most {own[0]['case']} of live bytes."
    head = ("way", "sequences of the largest micro-batch", "tokens per second")
    command = "python -m benchmarks.suites.head --only head_limit"
    return f"{about} {conditions(own[-1], command)}\n\n{markdown(head, lines)}"


PAGE = ROOT / "docs" / "head.md"
TABLES = {"goals": goals, "sweep": sweep}

if __name__ == "__main__":
    run(__doc__, RESULTS, PAGE, "head", {"memory": memory}, TABLES)
