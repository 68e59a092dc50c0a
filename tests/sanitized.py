"""Runs tests with the native code compiled with sanitizers, and checks that these find planted faults.

    python tests/sanitized.py [address] [thread] [--tests "PATH ..."] [--without-faults]

Each kind has a copy of the project in build/sanitized, in which the engine and the CPU kernels are compiled
with its sanitizers. First its tests must pass there without a report. Then one fault after another is put
into the copy, and its tests must cause a report.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mutant import Mutant, read_mutants
from mutant_copies import files

ROOT = Path(__file__).resolve().parents[1]
COPIES = ROOT / "build" / "sanitized"
#: What is copied. All other files of the root become links.
COPIED = ("csrc", "fusedacc", "tests", "setup.py")
SUPPRESSIONS = ROOT / "tests" / "sanitizer_suppressions.txt"
COMPILER = "g++"


@dataclass(frozen=True)
class Kind:
    """Sanitizers that are used together.

    Attributes:
        flags: for the compiler.
        preloaded: libraries to load before Python. C++ exceptions of PyTorch need the standard library there.
        settings: environment variables.
        tests: arguments of pytest that select the tests.
        faults: mutants that the sanitizers must find.
    """

    flags: tuple[str, ...]
    preloaded: tuple[str, ...]
    settings: dict[str, str]
    tests: tuple[str, ...]
    faults: tuple[Mutant, ...]


KINDS = {
    "address": Kind(
        flags=("-fsanitize=address,undefined", "-fno-sanitize=vptr"),
        preloaded=("libasan.so", "libubsan.so", "libstdc++.so"),
        settings={
            # Python does not free everything at exit, which would be reported as leaks.
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            # Python's own allocator would hide the memory of its objects.
            "PYTHONMALLOC": "malloc",
        },
        # Without tests that measure memory, and without torch.compile, which these settings make very slow.
        tests=(
            "tests/kernels/test_rows.py",
            "tests/kernels/test_native_ops.py",
            "--deselect=tests/kernels/test_native_ops.py::test_calls_keep_no_reference",
            "tests/kernels/test_norm.py",
            "tests/kernels/test_functional.py",
            "tests/kernels/test_matmul.py",
            "tests/kernels/test_grouped.py",
            "tests/autograd",
            "tests/accumulators",
            "--ignore=tests/accumulators/test_peak_memory.py",
            "tests/nn/test_native_functions.py",
            "tests/nn/test_autograd.py",
            "tests/nn/test_edge_cases.py",
            "tests/nn/test_patches.py",
            "tests/nn/test_sink.py",
            "tests/nn/test_experts.py",
            "tests/nn/test_whole_gradients.py",
            "tests/nn/test_hooks_that_look.py",
            "tests/optimizer/test_middle_of_window.py",
            "tests/optimizer/test_contract.py",
            "tests/optimizer/test_lifetime.py",
            "tests/property",
        ),
        faults=read_mutants(
            r"""
csrc/cpu/rows.cpp: tests/kernels/test_rows.py
# an index is off by one
-  firsts.push_back(count);
+  firsts.push_back(count + 1);
csrc/autograd: tests/autograd/test_engine.py
# memory is used after it was freed
-        backwards_.erase(found);
-        return;
+        backwards_.erase(found);
+        return found->second.reset();
"""
        ),
    ),
    "thread": Kind(
        flags=("-fsanitize=thread",),
        preloaded=("libtsan.so", "libstdc++.so"),
        settings={
            # The ranks of tests are forked from a process with threads.
            "TSAN_OPTIONS": f"suppressions={SUPPRESSIONS}:die_after_fork=0:history_size=4",
            # Threads of OpenMP synchronize without functions that the sanitizer knows.
            "OMP_NUM_THREADS": "1",
        },
        tests=(
            "tests/nn/test_sink_threads.py",
            "tests/nn/test_edge_cases.py::test_backwards_in_several_threads",
            "tests/nn/test_expert_parts.py::test_backwards_of_several_threads",
            "tests/optimizer/test_reading_threads.py",
            "tests/autograd/test_engine.py",
            "tests/autograd/test_engine_conditions.py",
            "tests/autograd/test_ignored.py",
            "tests/autograd/test_new_nodes.py",
            "tests/autograd/test_unusual_gradients.py",
            "tests/distributed/test_data_parallel.py",
        ),
        faults=read_mutants(
            r"""
csrc/autograd: tests/nn/test_sink_threads.py
# a lock is missing
-  const Lock lock(mutex_);
-  if (left.dim() != 2
+  if (left.dim() != 2
fusedacc/accumulators/accumulators.py: tests/optimizer/test_reading_threads.py
# a thread counts accumulators while another one replaces them
-        with self.passes.lock:  # a backward pass replaces accumulators without Python's global lock
-            return self._count_bytes()
+        return self._count_bytes()
"""
        ),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """How the tests have ended, and what the sanitizers have reported.

    passed: whether all tests passed. reports: the summary of each report. in_our_code: whether one of them
    names a line of csrc/. seconds: how long the tests took.
    """

    passed: bool
    reports: tuple[str, ...]
    in_our_code: bool
    seconds: float


def make_copy(folder: Path, fault: Mutant | None = None) -> None:
    """Copy the project, and put the fault into the copy. Objects of an earlier build stay there."""
    (folder / "build").mkdir(parents=True, exist_ok=True)
    for source in ROOT.iterdir():
        target = folder / source.name
        if source.name in COPIED:
            if source.is_dir():
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            else:
                shutil.copyfile(source, target)
        elif source.name not in ("build", ".pytest_cache") and not target.is_symlink():
            target.symlink_to(source)
    if fault is not None:
        (target,) = files(folder, fault)
        target.write_text(target.read_text().replace(fault.old, fault.new))


def build(folder: Path, kind: Kind) -> None:
    """Compile what has changed in a copy. Raises subprocess.CalledProcessError if it does not compile."""
    # The last flags win over those of setup.py. The sanitizers make the compiler warn of PyTorch's headers.
    compiler = folder / "build" / "compiler"
    flags = " ".join(("-g1", "-O1", "-w", "-fno-omit-frame-pointer", *kind.flags))
    compiler.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" {flags}\n')
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": shlex.quote(str(compiler)), "FORCE_CUDA": "0"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    if not list((folder / "fusedacc").glob("_autograd.*.so")):  # setup.py goes on without it
        raise SystemExit(f"the engine of {folder} was not compiled")


def library(name: str) -> str:
    """Return the path of one of the compiler's libraries."""
    command = [COMPILER, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(folder: Path, kind: Kind, tests: tuple[str, ...], *options: str) -> Outcome:
    """Run tests in a copy."""
    reports = folder / "build" / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    # pytest would keep the reports of a process that ends at once.
    settings = {
        name: f"{value}:log_path={reports / 'report'}" if name.endswith("SAN_OPTIONS") else value
        for name, value in kind.settings.items()
    }
    environment = os.environ | settings | {"PYTHONPATH": str(folder), "OMP_WAIT_POLICY": "passive"}
    environment["LD_PRELOAD"] = " ".join(map(library, kind.preloaded))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    began = time.monotonic()
    done = subprocess.run([*command, *options, *tests], cwd=folder, env=environment)
    seconds = time.monotonic() - began
    text = "\n".join(path.read_text() for path in sorted(reports.iterdir()))
    found = [line for line in text.splitlines() if line.startswith("SUMMARY:") or ": runtime error:" in line]
    return Outcome(done.returncode == 0, tuple(dict.fromkeys(found)), f"{folder}/csrc/" in text, seconds)


def check(name: str, tests: tuple[str, ...], with_faults: bool) -> list[tuple[str, Outcome, bool]]:
    """Run the tests of a kind, and those of its faults. Return what was run, its outcome, and whether this is
    the expected one.
    """
    kind, folder = KINDS[name], COPIES / name
    make_copy(folder)
    build(folder, kind)
    outcome = run(folder, kind, tests or kind.tests)
    rows = [(f"{name}: no fault", outcome, outcome.passed and not outcome.reports)]
    for fault in kind.faults if with_faults else ():
        make_copy(folder, fault)
        build(folder, kind)
        outcome = run(folder, kind, tuple(fault.tests.split()), "-x")
        rows.append((f"{name}: {fault.name}", outcome, outcome.in_our_code))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"some of {', '.join(KINDS)} (all)")
    parser.add_argument("--tests", default="", help="arguments of pytest instead of the kind's tests")
    parser.add_argument("--without-faults", action="store_true", help="plant no faults")
    options = parser.parse_args()
    unknown = [name for name in options.kinds if name not in KINDS]
    if unknown:
        parser.error(f"KIND={unknown[0]}; allowed: {', '.join(KINDS)}")
    rows = []
    for name in options.kinds or KINDS:
        rows += check(name, tuple(shlex.split(options.tests)), not options.without_faults)
    for what, outcome, is_right in rows:
        print(f"{'right' if is_right else 'WRONG'}: {what}: {outcome.seconds:.0f} s")
        print("tests passed" if outcome.passed else "tests failed", *outcome.reports, sep="\n  ")
    return 0 if all(is_right for _, _, is_right in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
