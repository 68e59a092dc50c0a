"""Tests deliberately broken versions of the package. The tests of each version must fail.

    python tests/mutants.py [PART_OF_A_NAME ...] [--list] [--jobs N]

Each mutant of `broken_*.py` replaces one piece of text in a copy of the project. If it changes the native
module, the module is compiled again. Its tests must fail in that copy, and must pass in a copy without the
replacement. Tests may be removed from `make test` as long as every mutant is still caught.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from broken_audit import AUDIT_BREAKS
from broken_engine import ENGINE_BREAKS
from broken_fixes import FIXES
from broken_likely import BREAKS
from broken_ranks import RANK_BREAKS
from mutant import Mutant
from mutant_copies import occurrences, project

MUTANTS = (*FIXES, *BREAKS, *ENGINE_BREAKS, *RANK_BREAKS, *AUDIT_BREAKS)
#: Seconds after which hanging tests count as failed, so that they catch the mutant.
PATIENCE = 300


@dataclass(frozen=True)
class Outcome:
    """What the tests of a mutant did.

    failed: the test that failed, or how the tests ended otherwise; "" if all passed. seconds: how long they
    took. problem: why they could not run; "" if they did.
    """

    failed: str
    seconds: float
    problem: str = ""


def run(copy: Path, tests: Iterable[str]) -> Outcome:
    """Run tests in a copy of the project until one fails, crashes or hangs."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", *tests]
    path = os.pathsep.join(filter(None, (str(copy), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}
    began = time.monotonic()
    # Start a new session, so that the tests' ranks can be stopped with the tests: ranks keep the pipe open.
    tests_run = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = tests_run.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(tests_run.pid, signal.SIGKILL)
        tests_run.communicate()
        return Outcome(f"none has ended in {PATIENCE} s", time.monotonic() - began)
    seconds = time.monotonic() - began
    if tests_run.returncode < 0:
        return Outcome(f"a test crashed with {signal.Signals(-tests_run.returncode).name}", seconds)
    if tests_run.returncode > 1:
        return Outcome("", seconds, problem=f"{' '.join(command)}: {output[-6000:]}")
    failed = ""
    if tests_run.returncode == 1:
        (failed,) = json.loads((copy / ".pytest_cache/v/cache/lastfailed").read_text())
    return Outcome(failed, seconds)


def try_mutant(mutant: Mutant) -> Outcome:
    """Run a mutant's tests in a copy of the project that contains the mutant."""
    try:
        with project(mutant) as copy:
            return run(copy, mutant.tests.split())
    except subprocess.CalledProcessError as error:
        return Outcome("", 0.0, problem=f"it does not compile: {error}")


def try_all(chosen: Iterable[Mutant], jobs: int) -> dict[Mutant, Outcome]:
    """Run all mutants and return their outcomes. Print a line for each as soon as it is known."""
    outcomes = {}
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(try_mutant, mutant): mutant for mutant in chosen}
        for future in as_completed(running):
            mutant, outcome = running[future], future.result()
            outcomes[mutant] = outcome
            line = f"{len(outcomes)} of {len(running)}: {found_by(outcome)}: {mutant.name} {outcome.problem}"
            print(line.rstrip(), flush=True)
    return outcomes


def found_by(outcome: Outcome) -> str:
    """Return a cell of the table: what caught a mutant."""
    return outcome.failed or ("NOT TRIED" if outcome.problem else "NOT CAUGHT")


def table(outcomes: dict[Mutant, Outcome]) -> str:
    """Return the outcome of each mutant, in order."""
    rows = [
        f"| {mutant.name} | {found_by(outcomes[mutant])} | {outcomes[mutant].seconds:.0f} |"
        for mutant in MUTANTS
        if mutant in outcomes
    ]
    return "\n".join(("| mutant | caught by | s |", "|---|---|---|", *rows))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="try those whose name has one of these in it (all)")
    parser.add_argument("--list", action="store_true", help="print their names only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time (all cores)")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.parts or any(part in m.name for part in options.parts)]
    if options.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return 0
    gone = [mutant for mutant in chosen if occurrences(mutant) != 1]
    for mutant in gone:
        print(f"{mutant.name}: its text occurs {occurrences(mutant)} times in {mutant.where}, not once")
    if gone:
        return 1
    outcomes = try_all(chosen, options.jobs)
    print(table(outcomes))
    survived = [mutant.name for mutant in chosen if not outcomes[mutant].failed]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} were caught")
    with project() as copy:
        catchers = {outcome.failed for outcome in outcomes.values() if "::" in outcome.failed}
        wrong = run(copy, sorted(catchers)).failed if catchers else ""
    if wrong:
        print(f"{wrong} fails without a mutant too, so it has caught nothing")
    return 1 if survived or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
