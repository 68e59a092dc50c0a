"""The command line of a suite."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .results import RESULTS, Results

#: The exit status of what the user has stopped.
INTERRUPTED = 130


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes: --quick, --full, --results, --device."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sweep = parser.add_mutually_exclusive_group()
    sweep.add_argument("--quick", action="store_true", help="tiny sizes, to try it: nothing is recorded")
    sweep.add_argument("--full", action="store_true", help="the whole sweep, not the one of ten minutes")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the CSV that rows are appended to (%(default)s)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def effort(options: argparse.Namespace) -> str:
    """How much to measure: "quick", "short" (make bench: ten minutes for all) or "full"."""
    return "quick" if options.quick else "full" if options.full else "short"


def results(options: argparse.Namespace) -> Results:
    return Results(None if options.quick else options.results, options.device)


def chosen(text: str | None, allowed: Sequence[str], what: str) -> list[str]:
    """The names in a comma-separated list; all where there is none.

    Raises SystemExit, with what is allowed, for any other name.
    """
    names = [name.strip() for name in text.split(",")] if text else list(allowed)
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise SystemExit(f"unknown {what} {', '.join(map(repr, unknown))}; allowed: {', '.join(allowed)}")
    return names


def run(figures: Callable[..., object], options: argparse.Namespace, **own: object) -> None:
    """Measures as the options say, and prints the table. `own`: arguments of `figures` beside the rest."""
    kept = results(options)
    figures(kept, effort(options), **own)
    kept.report()
