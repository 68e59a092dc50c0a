"""Command line: `python -m fusedacc` with `audit`, `info`, `bench`, `plan` or `selftest`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .commands import audit, bench, info, plan, selftest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit status: 0; 1 if something is wrong; 2 if an argument is."""
    parser = argparse.ArgumentParser(prog="python -m fusedacc", description=__doc__)
    parser.add_argument("--version", action="version", version=f"fusedacc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "audit",
        help="run a training script and check that it accumulates gradients correctly",
        description=audit.DESCRIPTION,
    )
    audit.add_arguments(command)
    command = commands.add_parser(
        "info",
        help="show what is built, which backends work on which devices, and why others do not",
        description="Runs one small sum per dtype pair, backend and device, and checks the results.",
    )
    info.add_arguments(command)
    command = commands.add_parser(
        "bench",
        help="compare the speed of fusedacc's kernels with that of plain PyTorch",
        description="Checks and times fusedacc's kernels and the equivalent PyTorch code, in about a minute.",
    )
    bench.add_arguments(command)
    command = commands.add_parser(
        "plan", help="predict which micro-batch fits in memory, and where the memory goes"
    )
    plan.add_arguments(command)
    command = commands.add_parser(
        "selftest",
        help="check and measure every backend here, and write a report to attach to an issue",
        description=selftest.DESCRIPTION,
    )
    selftest.add_arguments(command)
    chosen = parser.parse_args(arguments)
    modules = {"audit": audit, "info": info, "bench": bench, "plan": plan, "selftest": selftest}
    return modules[chosen.command].run(chosen)


if __name__ == "__main__":
    sys.exit(main())
