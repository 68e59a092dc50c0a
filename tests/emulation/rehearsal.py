"""Rehearses benchmarks/gpu_run.sh on the emulated device: every step of its parts, with the smallest sizes.

    python -m emulation.rehearsal [first] [second]

`nvidia-smi`, `compute-sanitizer`, `ncu` and `timeout` are replaced. No step has a limit, because the emulated
device is slow. One test in `SHARE` runs, because `python -m emulation.run` runs all of them.

The rehearsal fails if a step fails, or if a benchmark has a row without a figure, except for the reasons in
`EXPECTED`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from . import build

PARTS = ("first", "second")
#: One in this many tests runs: the same ones each time.
SHARE, SEED = 10, 0
#: Shell commands that replace programs.
TOOLS = {
    "nvidia-smi": "echo emulated",
    # Skips the options and the limit.
    "timeout": 'while [[ "$1" == --* ]]; do shift; done; shift; exec "$@"',
    # Runs the program without checks.
    "compute-sanitizer": 'while [ "$1" != "$PYTHON" ]; do shift; done; exec "$@"',
    # Runs the program, and finds no counters.
    "ncu": 'while [ "$1" != "$PYTHON" ]; do shift; done; "$@" || exit; echo ERR_NVGPUCTRPERM',
}
#: Steps that may be skipped, because the emulated device has no counters.
SKIPPED = ("dram_check",)
#: Tensor-core instructions are not translated, so the self-test of kernels with `tl.dot` fails.
UNTRANSLATED = "UnknownPtx"
#: Reasons for which a row may have no figure: no counters, or a variant that these dtypes do not need.
EXPECTED = r"ERR_NVGPUCTRPERM|nothing to cast"


def rehearse(part: str, folder: Path) -> list[str]:
    """Run one part, and return what went wrong."""
    from fusedacc.kernels import library

    tools = folder / "tools"
    out = folder / part
    tools.mkdir(exist_ok=True)
    for name, text in TOOLS.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{build.HERE / 'startup'}{os.pathsep}{build.ROOT / 'tests'}{os.pathsep}{build.ROOT}",
        "PYTHON": sys.executable,
        "PYTEST_ADDOPTS": "-p emulation.plugin",
        "EMULATION_SHARE": str(SHARE),
        "EMULATION_SEED": str(SEED),
        "FUSEDACC_LIBRARY": str(library.LIBRARY),
        "OMP_NUM_THREADS": "1",
        "OUT": str(out),
        "EFFORT": "quick",
    }
    subprocess.run(["bash", "benchmarks/gpu_run.sh", part], env=environment, cwd=build.ROOT)
    summary, log = (
        path.read_text() if path.exists() else "" for path in (out / "summary.txt", out / f"{part}.log")
    )
    steps = re.findall(r"^\w+  (\S+) +(\S.*?) +\d+ s of \d+$", summary, re.MULTILINE)
    wrong = [] if steps else ["no step ran"]
    checks = re.findall(r": FAILED: (.*)$", log, re.MULTILINE)
    only_untranslated = checks and all(UNTRANSLATED in why for why in checks)
    for name, result in steps:
        is_expected = result == "skipped" and name in SKIPPED
        is_expected |= result == "FAILED (1)" and name == "selftest" and bool(only_untranslated)
        if result != "passed" and not is_expected:
            wrong.append(f"{name}: {result}")
    rows = re.findall(r"^ *(\S.*not run: .*)$", log, re.MULTILINE)
    return wrong + [row for row in rows if not re.search(EXPECTED, row)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    options = parser.parse_args()
    problem = build.obstacle()
    if problem is not None:
        print(f"skipped: {problem}")
        return 0
    failed = False
    for part in options.parts or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            wrong = rehearse(part, Path(folder))
        for text in wrong:
            print(f"{part}: {text}")
        failed |= bool(wrong)
        print(f"{part}: {'FAILED' if wrong else 'passed'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
