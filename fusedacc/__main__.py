"""Commands: `python -m fusedacc` with `info`, `bench`, `plan` or `selftest`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from . import __version__
from .commands import bench, info, plan, selftest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 where something is wrong, 2 where it was misused."""
    parser = argparse.ArgumentParser(prog="python -m fusedacc", description=__doc__)
    parser.add_argument("--version", action="version", version=f"fusedacc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "info",
        help="what is built, which backends work on which devices, and why others do not",
        description="Runs and checks one small sum of each dtype pair on each backend and device. "
        "Measures the choices of autotuning that are not cached yet.",
    )
    command.add_argument(
        "--verbose",
        action="store_true",
        help="print everything: each choice of autotuning with its times, each backend on each device",
    )
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    command = commands.add_parser(
        "bench",
        help="how fast our kernels are here, against every form that stock torch has",
        description="Checks and times our kernels and every stock form, in about a minute.",
    )
    bench.add_arguments(command)
    command = commands.add_parser(
        "plan", help="which micro-batch fits in a budget, and where the memory goes"
    )
    plan.add_arguments(command)
    command = commands.add_parser(
        "selftest",
        help="check and measure every backend here, and write a report to attach to an issue",
        description=selftest.DESCRIPTION,
    )
    selftest.add_arguments(command)
    chosen = parser.parse_args(arguments)
    if chosen.command == "bench":
        return bench.run(chosen)
    if chosen.command == "plan":
        return plan.run(chosen)
    if chosen.command == "selftest":
        return selftest.run(chosen)
    facts = info.collect()
    if chosen.json:
        print(json.dumps(facts, indent=2))
    else:
        print(info.details(facts) if chosen.verbose else info.summary(facts))
    return 0 if info.healthy(facts) else 1


if __name__ == "__main__":
    sys.exit(main())
