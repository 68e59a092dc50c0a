"""The parts of every page and plot: figures, sections between markers, and one command."""

import argparse
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fusedacc.commands import plots
from fusedacc.commands.plots import FAINT

from ..harness import ROOT
from ..records import Line, markdown, newest, read
from . import drawing

FIGURES = ROOT / "docs" / "figures"
Charts = Mapping[str, Callable[[Sequence[Line]], Figure]]
Tables = Mapping[str, Callable[[Sequence[Line]], str]]


class NoRows(Exception):
    """The file has no rows for a plot or a table. The message says which."""


def of(rows: Sequence[Line], suite: str, benchmark: str) -> list[Line]:
    """Return the newest rows of a part of a suite. Raises NoRows."""
    if not any(row["benchmark"] == benchmark for row in rows):
        raise NoRows(f"there are no rows of benchmarks/suites/{suite}.py --only {benchmark}")
    return newest(rows, benchmark)


def newest_with(
    rows: Sequence[Line], benchmark: str, wanted: Callable[[Line], object], what: str
) -> list[Line]:
    """Return the rows that are wanted, of the last run that has any. Raises NoRows."""
    of_benchmark = [row for row in rows if row["benchmark"] == benchmark and row["median"] and wanted(row)]
    if not of_benchmark:
        raise NoRows(f"there are no rows of benchmarks/suites/{benchmark}.py with {what}")
    return newest(of_benchmark, benchmark)


def only(rows: Iterable[Line], **columns: str) -> list[Line]:
    return [row for row in rows if all(row[name] == value for name, value in columns.items())]


def values(rows: Iterable[Line], column: str = "median") -> list[float]:
    return [float(row[column]) for row in rows]


def shown(name: str) -> str:
    """Return how pages and plots name a loop: the CSV says "stock" for PyTorch."""
    return name.replace("stock", "PyTorch")


def panels(rows: int, columns: int, size: tuple[float, float], **how: Any) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure and its axes by row and column, with a grid behind the drawing."""
    figure, found = plt.subplots(rows, columns, figsize=size, squeeze=False, **how)
    for axes in found.flat:
        axes.grid(axis="y", color=FAINT)
        axes.set_axisbelow(True)
    return figure, found.tolist()


def band(
    axes: Axes,
    at: Sequence[float],
    middle: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    colour: str,
    **line: Any,
) -> None:
    axes.plot(at, middle, color=colour, linewidth=2, **line)
    axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)


def finish(
    figure: Figure, title: str, about: Line, text: str, colours: Mapping[str, str] | None = None
) -> Figure:
    """Put the title and the key above, and `text` and the conditions of the row `about` beneath."""
    key = plots.swatches({shown(name): colour for name, colour in (colours or {}).items()})
    return plots.finish(figure, title, [text, drawing.conditions(about)], key)


def save(name: str, make: Callable[[], Figure], out: Path) -> None:
    """Write what `make` draws as a PNG and an SVG, or print why there are no rows for it."""
    out.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(plots.STYLE):
        try:
            figure = make()
        except NoRows as why:
            print(f"{name}: not drawn: {why}")
            return
        plots.save(figure, [out / f"{name}.png", out / f"{name}.svg"])
        plt.close(figure)
    print(f"{name}: {os.path.relpath(out / name)}.png, .svg")


def conditions(row: Line, command: str = "") -> str:
    """Return the conditions of a row. `command`: what measured it (default: its suite's)."""
    command = command or f"python -m benchmarks.suites.{row['benchmark']}"
    parts = [row["date"][:10], f"commit {row['commit']}", row["device"], f"threads {row['threads']}"]
    parts += [f"allocator {row['allocator']}", f"torch {row['torch']}"]
    parts += [f"CUDA {row['cuda']}"] if row["cuda"] else []
    return f"`{command}`, {', '.join(parts)}:"


def table(row: Line, command: str, head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return f"{conditions(row, command)}\n\n{markdown(head, lines)}"


def figure(row: Line) -> str:
    value = float(row["median"])
    if row["unit"] != "us":
        return f"{value:.1f} {row['unit']}" if row["unit"] else f"{value:.3g}"
    if value >= 1e6:
        return f"{value / 1e6:.2f} s"
    return f"{value / 1000:.2f} ms" if value >= 1000 else f"{value:.0f} µs"


def markers(name: str, target: str = "figures") -> tuple[str, str]:
    """Return the lines around a section that `make target` writes."""
    return f"<!-- {name}: written by make {target} -->", f"<!-- end of {name} -->"


def rewrite(pages: Mapping[Path, Mapping[tuple[str, str], Callable[[], str]]]) -> None:
    """Write what the functions return between the markers of their pages. Print why a section has no rows.

    Raises SystemExit, and changes nothing, if a page cannot be read or has no such markers.
    """
    texts = {}
    for page, sections in pages.items():
        try:
            texts[page] = page.read_text()
        except OSError as error:
            raise SystemExit(f"{page}: {error}") from None
        for (begin, end), made in sections.items():
            try:
                section = shown(made())
            except NoRows as why:
                print(f"{page.name}: not written: {why}")
                continue
            before, _, rest = texts[page].partition(begin)
            _, found, after = rest.partition(end)
            if not found:
                raise SystemExit(f"{page}: no line {begin!r} followed by {end!r}")
            texts[page] = f"{before}{begin}\n\n{section}\n\n{end}{after}"
    for page, text in texts.items():
        if text != page.read_text():
            page.write_text(text)


def arguments(description: str | None, **paths: Path) -> argparse.ArgumentParser:
    """Return a parser of options that are paths, such as --results, with their defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, path in paths.items():
        parser.add_argument(f"--{name}", type=Path, default=path, help="(%(default)s)")
    return parser


def given(parser: argparse.ArgumentParser, command: str) -> tuple[argparse.Namespace, list[Line]]:
    """Return the options and the rows of --results. Raises SystemExit if there is no such file."""
    options = parser.parse_args()
    try:
        return options, read(options.results)
    except FileNotFoundError as error:
        raise SystemExit(f"{error}: run `{command}` first") from None


def beside(options: argparse.Namespace, name: str) -> list[Line]:
    """Return the rows of the file of that name in the folder of --results, if there is one."""
    path = options.results.with_name(name)
    return read(path) if path.exists() else []


def run(
    description: str | None, results: Path, page: Path, suite: str, charts: Charts, tables: Tables
) -> None:
    """Run the command of the plots and tables of one page."""
    command = f"python -m benchmarks.suites.{suite}"
    options, rows = given(arguments(description, results=results, out=FIGURES, page=page), command)
    matplotlib.use("Agg")
    for name, chart in charts.items():
        save(f"{suite}_{name}", functools.partial(chart, rows), options.out)
    made = {name: functools.partial(table, rows) for name, table in tables.items()}
    sections = {markers(name, f"{suite}-figures"): section for name, section in made.items()}
    rewrite({options.page: sections})
