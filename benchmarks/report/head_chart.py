"""Draws docs/figures/head_memory.png and .svg and writes the tables of docs/head.md: `make head-figures`."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from fusedacc.commands.plots import BLUE, GREY

from ..harness import INSIDE, RESULTS, ROOT, STOCK
from ..records import Line, newest_runs
from ..suites.head import PEAK_TOKENS, PEAK_WIDTH, TOKENS, formulas
from .pages import figure, finish, of, only, panels, run, table, values

COLOURS = {STOCK: GREY, INSIDE: BLUE}
#: The size of the table of other ways.
_TOKENS, _VOCABULARY, _WIDTH = 128, 50_257, 768


def memory(rows: Sequence[Line]) -> Figure:
    """Draw the peak of a head's forward and backward against the vocabulary."""
    newest_rows = of(rows, "head", "head_memory")
    figure, [[axes]] = panels(1, 1, (7.5, 4.4))
    for way, colour in COLOURS.items():
        line = only(newest_rows, provider=way)
        at = [int(row["case"]) / 1000 for row in line]
        peaks = values(line)
        axes.plot(at, peaks, color=colour, marker="o", linewidth=2)
        last = (at[-1], peaks[-1])
        axes.annotate(f"{peaks[-1]:.0f} MB", last, (0, 7), textcoords="offset points", ha="center")
    axes.set_xlabel("classes in the vocabulary, thousands")
    axes.set_ylabel("MB at the peak")
    axes.set_ylim(bottom=0)
    text = (
        f"Live bytes of one forward and backward besides weight, sum and input: {PEAK_TOKENS} tokens, width "
        f"{PEAK_WIDTH}, float32. PyTorch holds the logits, their gradient and the weight's gradient."
    )
    return finish(figure, "Memory of a language model's head", newest_rows[0], text, COLOURS)


def by_case(rows: Sequence[Line]) -> dict[tuple[str, str], dict[tuple[str, str], Line]]:
    """Return the measured rows by case and dtype, then by provider and metric."""
    found: dict[tuple[str, str], dict[tuple[str, str], Line]] = {}
    for row in rows:
        if row["median"]:
            found.setdefault((row["case"], row["dtypes"]), {})[row["provider"], row["metric"]] = row
    return found


def pair(row: Line) -> tuple[float, str]:
    """Return the share of PyTorch's time, and the time with p20 and p80."""
    ends = [f"{float(row[end]) / 1000:,.0f}" for end in ("p20", "p80")]
    return 1 / float(row["speedup"]), f"{figure(row)} ({ends[0]} to {ends[1]})"


def goals(rows: Sequence[Line]) -> str:
    """Return a table per device: time and peak of the sizes that have goals."""
    of(rows, "head", "head")
    parts = []
    newest_rows = newest_runs(only(rows, benchmark="head"))
    for device in dict.fromkeys(row["device"] for row in newest_rows):
        lines = []
        of_device = only(newest_rows, device=device)
        for (case, dtypes), cells in by_case(of_device).items():
            share, ours = pair(cells[INSIDE, "time"])
            peaks = [figure(cells[way, "peak memory"]) for way in (STOCK, INSIDE)]
            lines.append((case, dtypes, figure(cells[STOCK, "time"]), ours, f"{share:.3f}", *peaks))
        head = ("case", "dtype", "PyTorch", "fusedacc (p20 to p80)", "share of PyTorch's time")
        commits = " and ".join(dict.fromkeys(row["commit"] for row in of_device))
        about = {**of_device[-1], "threads": "as named", "commit": commits}
        parts.append(table(about, "", (*head, "peak, PyTorch", "peak, fusedacc"), lines))
    return "\n\n".join(parts)


def sweep(rows: Sequence[Line]) -> str:
    """Return a row per dtype and weight, and a column per number of tokens."""
    newest_rows = of(rows, "head", "head_sweep")
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for (case, dtypes), cells in by_case(newest_rows).items():
        sizes, tokens = case.removesuffix(" tokens").split(", ")
        before, after = (float(cells[way, "peak memory"]["median"]) for way in (STOCK, INSIDE))
        share, _ = pair(cells[INSIDE, "time"])
        lines.setdefault((dtypes, sizes), {})[int(tokens)] = f"{share:.2f}; {before:,.0f} → {after:.1f}"
    ordered = sorted(lines, key=lambda key: (key[0], *map(int, key[1].split(" x "))))
    body = [(*key, *(lines[key].get(tokens, "") for tokens in TOKENS)) for key in ordered]
    command = "python -m benchmarks.suites.head --full --only head_sweep"
    return table(newest_rows[-1], command, ("dtype", "weight", *(f"{tokens:,}" for tokens in TOKENS)), body)


def ways(rows: Sequence[Line]) -> str:
    """Return a row per way at one size: measured, or by the formula."""
    newest_rows = [row for name in ("head", "head_chunks") for row in of(rows, "head", name)]
    case = f"{_VOCABULARY} x {_WIDTH}, {_TOKENS} tokens"
    wanted = [row for row in only(newest_rows, dtypes="float32") if row["case"].startswith(case)]
    cells = {(row["provider"], row["metric"]): row for row in reversed(wanted)}
    lines = []
    for way in dict.fromkeys(row["provider"] for row in wanted):
        time = cells[way, "time"]
        peak = figure(cells[way, "peak memory"])
        moved = f"{int(time['bytes']) / 1e6:,.0f} MB" if time["bytes"] else ""
        lines.append((way, figure(time), moved, peak))
    for way, (total, most) in formulas(_VOCABULARY, _WIDTH, _TOKENS, 4).items():
        lines.append((f"{way}, by formula", "", f"{total / 1e6:,.0f} MB", f"{most / 1e6:.1f} MB"))
    command = "python -m benchmarks.suites.head --full --only head_chunks"
    return (
        f"{case}, float32. {table(newest_rows[-1], command, ('way', 'time', 'bytes moved', 'peak'), lines)}"
    )


def limit(rows: Sequence[Line]) -> str:
    """Return the largest micro-batch and the speed of a small GPT under a limit of live memory."""
    newest_rows = of(rows, "head", "head_limit")
    cells = {(row["provider"], row["metric"]): float(row["median"]) for row in newest_rows if row["median"]}
    lines = [
        (way, f"{cells[way, 'micro-batch']:.0f}", f"{cells[way, 'speed']:,.0f}")
        for way in (STOCK, INSIDE)
        if (way, "speed") in cells
    ]
    about = f"{newest_rows[0]['shapes']}, float32, AdamW, at most {newest_rows[0]['case']} of live bytes."
    head = ("way", "sequences of the largest micro-batch", "tokens per second")
    return (
        f"{about} {table(newest_rows[-1], 'python -m benchmarks.suites.head --only head_limit', head, lines)}"
    )


PAGE = ROOT / "docs" / "head.md"
TABLES = {"goals": goals, "sweep": sweep, "ways": ways, "limit": limit}

if __name__ == "__main__":
    run(__doc__, RESULTS, PAGE, "head", {"memory": memory}, TABLES)
