"""What every page and plot is made by: figures, sections between markers, one command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from fusedacc.commands.measuring import plots
from fusedacc.commands.measuring.records import Line, newest, read

from ..harness import ROOT

FIGURES = ROOT / "docs" / "figures"


class NoRows(Exception):
    """The file holds no rows for a plot or a table; the message says which."""


def of(rows: Sequence[Line], suite: str, benchmark: str) -> list[Line]:
    """The newest rows of a part of a suite. Raises NoRows."""
    if not any(row["benchmark"] == benchmark for row in rows):
        raise NoRows(f"there are no rows of benchmarks/suites/{suite}.py --only {benchmark}")
    return newest(rows, benchmark)


def finish(
    figure: Figure, title: str, about: Line, text: str, colours: Mapping[str, str] | None = None
) -> Figure:
    """Title and key above; beneath, `text` and the conditions of the row `about`."""
    return plots.finish(figure, title, [text, plots.conditions(about)], plots.swatches(colours or {}))


def save(name: str, make: Callable[[], Figure], out: Path) -> list[Path]:
    """Write what `make` draws as a PNG and an SVG, or print why there are no rows for it."""
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{name}.png", out / f"{name}.svg"]
    with plt.rc_context(plots.STYLE):
        try:
            figure = make()
        except NoRows as why:
            print(f"{name}: not drawn: {why}")
            return []
        plots.save(figure, written)
        plt.close(figure)
    print(f"{name}: {os.path.relpath(out / name)}.png, .svg")
    return written


def conditions(row: Line, command: str = "") -> str:
    """`command`: what measured it; of a suite where none is given."""
    command = command or f"python -m benchmarks.suites.{row['benchmark']}"
    parts = [row["date"][:10], f"commit {row['commit']}", row["device"], f"threads {row['threads']}"]
    parts += [f"allocator {row['allocator']}", f"torch {row['torch']}"]
    parts += [f"CUDA {row['cuda']}"] if row["cuda"] else []
    return f"`{command}`, {', '.join(parts)}:"


def figure(row: Line) -> str:
    value = float(row["median"])
    if row["unit"] != "us":
        return f"{value:.1f} {row['unit']}"
    if value >= 1e6:
        return f"{value / 1e6:.2f} s"
    return f"{value / 1000:.2f} ms" if value >= 1000 else f"{value:.0f} µs"


def markers(name: str, target: str = "figures") -> tuple[str, str]:
    """The lines around a section that `make target` writes."""
    return f"<!-- {name}: written by make {target} -->", f"<!-- end of {name} -->"


def rewritten(text: str, around: tuple[str, str], section: str) -> str:
    """The text with the section between the markers. ValueError if they are not there."""
    begin, end = around
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"no line {begin!r} followed by {end!r}")
    return f"{before}{begin}\n\n{section}\n\n{end}{after}"


def rewrite(pages: Mapping[Path, Mapping[tuple[str, str], str]]) -> None:
    """Write the sections into their pages; an empty one leaves what is there.

    If a page cannot be written: SystemExit, and none is changed.
    """
    texts = {}
    for page, sections in pages.items():
        try:
            texts[page] = page.read_text()
            for around, section in sections.items():
                texts[page] = rewritten(texts[page], around, section) if section else texts[page]
        except (OSError, ValueError) as error:
            raise SystemExit(f"{page}: {error}") from None
    for page, text in texts.items():
        page.write_text(text)


def arguments(description: str | None, **paths: Path) -> argparse.ArgumentParser:
    """A parser of options that are paths, such as --results, and their defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, path in paths.items():
        parser.add_argument(f"--{name}", type=Path, default=path, help="(%(default)s)")
    return parser


def given(parser: argparse.ArgumentParser, command: str) -> tuple[argparse.Namespace, list[Line]]:
    """The options and the rows of --results; SystemExit, with what makes them, if there is no such file."""
    options = parser.parse_args()
    try:
        return options, read(options.results)
    except FileNotFoundError as error:
        raise SystemExit(f"{error}: run `{command}` first") from None


def beside(options: argparse.Namespace, name: str) -> list[Line]:
    """The rows of the file of that name in the folder of --results, if it is there."""
    path = options.results.with_name(name)
    return read(path) if path.exists() else []


def run(
    description: str | None,
    results: Path,
    page: Path,
    suite: str,
    charts: Mapping[str, Callable[[Sequence[Line]], Figure]],
    tables: Mapping[str, Callable[[Sequence[Line]], str]],
) -> None:
    """The command of the plots and tables of one page."""
    command = f"python -m benchmarks.suites.{suite}"
    options, rows = given(arguments(description, results=results, out=FIGURES, page=page), command)
    matplotlib.use("Agg")
    for name, chart in charts.items():
        save(f"{suite}_{name}", lambda chart=chart: chart(rows), options.out)
    sections = {}
    for name, table in tables.items():
        try:
            sections[markers(name, f"{suite}-figures")] = table(rows)
        except NoRows as why:
            print(f"{name}: not written: {why}")
    rewrite({options.page: sections})
