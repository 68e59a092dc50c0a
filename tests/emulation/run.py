"""Runs the GPU tests on the emulated device, as `make test-emulated-gpu` does.

    python -m emulation.run [--seed N] [--seeds N] [--jobs N]

The first part runs the tests marked `cuda`, with the kernels as g++ and Triton compile them, and the tests of
the emulation with its random programs. It runs few cases of each sweep, and all with FUSEDACC_FULL_TESTS=1.
The second part runs a third of the tests with the native kernels as the PTX that nvcc generates.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys

from . import build
from .ptx import nvcc

PATHS = (
    "tests/emulation/tests",
    "tests/cuda",
    "tests/optimizer/test_torch_optimizers.py",
    "tests/planner/test_find.py",
    "tests/benchmarks",
)
#: One in this many tests runs on nvcc's PTX.
PTX_SHARE = 3


def run(seed: int, jobs: int, **settings: str) -> bool:
    """Run the tests with this seed and return whether they pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-rsfE", "-p", "emulation.plugin", "-m", "cuda"]
    # worksteal gives neighboring tests to one worker, so that they share their module's fixtures.
    command += ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else ["-p", "no:xdist"]
    environment = os.environ | {"EMULATION_SEED": str(seed), "OMP_NUM_THREADS": "1"} | settings
    print(f"EMULATION_SEED={seed}", *(f"{name}={value}" for name, value in settings.items()), flush=True)
    return subprocess.run([*command, *PATHS], env=environment, cwd=build.ROOT).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="seed for the order of blocks and threads and the programs")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs, with consecutive seeds (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (one for each core)")
    options = parser.parse_args()
    problem = build.obstacle()
    if problem is not None:
        print(f"skipped: {problem}")
        return 0
    no_ptx = nvcc.obstacle()
    first = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    passed = True
    for seed in range(first, first + options.seeds):
        passed &= run(seed, options.jobs)
        if no_ptx is None:
            passed &= run(seed, options.jobs, EMULATION_PTX="1", EMULATION_SHARE=str(PTX_SHARE))
        else:
            print(f"nvcc's PTX is skipped: {no_ptx}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
