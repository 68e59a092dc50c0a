"""Command line: `python -m fusedacc` with `audit`, `info`, `bench`, `plan` or `selftest`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import __version__
from .commands.arguments import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit status (`commands.exit_status`)."""
    parser = argparse.ArgumentParser(prog="python -m fusedacc", description=__doc__)
    parser.add_argument("--version", action="version", version=f"fusedacc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (line, add_arguments) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=line))
    chosen = parser.parse_args(arguments)
    module = importlib.import_module(f".commands.{chosen.command}", __package__)
    return int(module.run(chosen))


if __name__ == "__main__":
    sys.exit(main())
