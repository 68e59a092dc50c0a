"""Tests the wheel with other versions of torch and Python, each in a new virtual environment.

    python .ci/try_versions.py dist/*.whl [python3.10 ...]

For each Python (default: the one that runs this script), there are two environments: one with the oldest
torch that pyproject.toml allows, and one with the newest torch on the index. In each environment, `info`,
`try_wheel.py` and a quick part of the test suite run twice:

- with the wheel, whose library must load although it was built with another torch. If the wheel has no native
  engine for this torch and Python, `info` must build it;
- with an install from the sources, which also builds the native engine. All environments install from one
  checkout, and have the same path. So each build finds the objects of the build before, made with the headers
  of another torch in the same folder, and must compile every file again.

The tests run from a copy without the package's sources, so that they import the installed package. The script
prints a table and fails if any run fails. An environment takes gigabytes of disk space, so each is removed
before the next is made.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
#: The checkout that is installed from. It outlives the environments.
CHECKOUT = ROOT / "build" / "versions-checkout"
#: Tests of behavior that depends on the versions of torch and Python: operators and their fake
#: implementations, autograd nodes, private members of torch that the wrapper uses, and torch's
#: optimizers and compiler.
QUICK = (
    "tests/kernels/test_native_ops.py",
    "tests/kernels/test_compile.py",
    "tests/accumulators/test_p_grad.py",
    "tests/autograd/test_reasons.py",
    "tests/autograd/test_reshaped_parameters.py",
    "tests/autograd/test_unusual_gradients.py",
    "tests/nn/test_autograd.py",
    "tests/nn/test_compiled.py",
    "tests/nn/test_compiled_sums.py",
    "tests/nn/test_flops.py",
    "tests/nn/test_patches.py",
    "tests/optimizer/test_amp.py",
    "tests/optimizer/test_distributed_checkpoint.py",
    "tests/optimizer/test_schedulers.py",
    "tests/optimizer/test_torch_optimizers.py",
    "tests/optimizer/test_update.py",
    "tests/distributed/test_one_rank.py",
    "tests/property/test_property.py",
    "tests/commands/test_info.py",
)
#: Tests of the native engine.
NATIVE = ("tests/autograd/test_engine.py", "tests/nn/test_native_functions.py")
TOOLS = ("setuptools>=77", "wheel", "numpy", "pytest", "expecttest")
#: The package's sources. The copy for the tests leaves them out.
SOURCES = ("fusedacc", "csrc", "setup.py")


def copy_tracked(target: Path, without: Sequence[str] = ()) -> None:
    """Copy the tracked files, except those in the top-level files or folders `without`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if Path(name).parts[0] not in without:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


class Environment:
    """A virtual environment with torch. It replaces the previous environment.

    Args:
        python: the command of the interpreter.
        torch: the requirement for pip, such as `torch==2.10.*`.
    """

    def __init__(self, python: str, torch: str) -> None:
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.run([python, "-m", "venv", FOLDER], check=True)
        self.python = FOLDER / "bin" / "python"
        self.variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.variables |= {"FUSEDACC_CACHE": str(FOLDER / "cache"), "OMP_WAIT_POLICY": "passive"}
        # Disable Triton's interpreter: Triton 3.6's needs an older numpy, and 3.9's rejects scalar masks.
        self.variables["TRITON_INTERPRET"] = "0"
        self.suite = FOLDER / "suite"
        copy_tracked(self.suite, SOURCES)
        # Install torch first and alone, so that no other requirement selects another version.
        self.pip("install", "--quiet", torch).check_returncode()
        self.pip("install", "--quiet", *TOOLS).check_returncode()
        program = "import platform, torch; print(platform.python_version(), torch.__version__)"
        self.name = self.run("-c", program).stdout.split()

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pip, and print its output if it fails."""
        return self.run("-m", "pip", "--disable-pip-version-check", *arguments)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python in the folder with the tests and without the package."""
        command = [str(self.python), *arguments]
        result = subprocess.run(command, cwd=self.suite, env=self.variables, capture_output=True, text=True)
        if result.returncode:
            print(*result.args, result.stdout, result.stderr, sep="\n", flush=True)
        return result

    def row(self, package: str) -> tuple[list[str], bool]:
        """Install a package and test it.

        Args:
            package: the wheel or the folder with the sources.

        Returns:
            The cells of the table, and whether everything was compiled and passed.
        """
        options = "--verbose", "--no-build-isolation", "--no-deps", "--force-reinstall"
        installing = self.pip("install", *options, package)
        if installing.returncode:
            return ["-", "-", "not installed", *["-"] * 5], False
        steps = re.findall(r"fusedacc: \[(\d+)/(\d+)\]", installing.stdout + installing.stderr)
        compiled = f"{len(steps)} of {steps[-1][1]}" if steps else "-"
        info = self.run("-m", "fusedacc", "info")
        engine = re.search(r"^engine: (native|none)", info.stdout, re.MULTILINE)
        training = self.run(".ci/try_wheel.py")
        chosen = [*QUICK, *(NATIVE if engine and engine[1] == "native" else ())]
        begin = time.monotonic()
        tests = self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
        seconds = time.monotonic() - begin
        last = tests.stdout.splitlines()[-1:]
        counts = {word: number for line in last for number, word in re.findall(r"(\d+) (\w+)", line)}
        results = ["fails" if result.returncode else "runs" for result in (info, training)]
        numbers = [counts.get(word, "0") for word in ("passed", "failed", "skipped")]
        kind = engine[1] if engine else "?"
        if kind == "native":
            kind = "built at first use" if "building the native engine" in info.stderr else "installed"
        cells = [compiled, kind, *results, *numbers, f"{seconds:.0f}"]
        # An object that was not compiled again still has the headers of the previous torch.
        is_complete = package != str(CHECKOUT) or (bool(steps) and len(steps) == int(steps[-1][1]))
        has_engine = kind not in ("none", "?")
        failed = any(result.returncode for result in (info, training, tests))
        return cells, is_complete and has_engine and not failed


def oldest_torch() -> str:
    """Return the requirement for the oldest torch that pyproject.toml allows."""
    allowed = re.search(
        r'^dependencies = \["torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    if allowed is None:
        raise SystemExit("pyproject.toml has no lower bound for torch in `dependencies`")
    return f"torch=={allowed[1]}.*"


def main() -> None:
    wheel, *pythons = sys.argv[1:]
    if not Path(wheel).is_file():
        raise SystemExit(f"{wheel}: there is no such file; `make wheel` builds it")
    packages = {"wheel": str(Path(wheel).resolve()), "built there": str(CHECKOUT)}
    head = [
        "Python",
        "torch",
        "installed",
        "compiled",
        "engine",
        "info",
        "training",
        "passed",
        "failed",
        "skipped",
        "seconds",
    ]
    shutil.rmtree(CHECKOUT, ignore_errors=True)
    copy_tracked(CHECKOUT)
    rows, well = [], True
    for python in pythons or [sys.executable]:
        for torch in (oldest_torch(), "torch"):
            environment = Environment(python, torch)
            for installed, package in packages.items():
                cells, good = environment.row(package)
                rows.append([*environment.name, installed, *cells])
                well &= good
                print(*rows[-1], flush=True)
    shutil.rmtree(FOLDER)
    shutil.rmtree(CHECKOUT)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    if not well:
        raise SystemExit("not everything passed")


if __name__ == "__main__":
    main()
