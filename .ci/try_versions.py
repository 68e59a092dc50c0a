"""Tries the wheel under other releases of torch and other Pythons, each in an environment of its own.

    python .ci/try_versions.py dist/*.whl [python3.10 ...]

Each of the Pythons (default: this one) has the oldest torch that pyproject.toml allows and the newest on the
index. In each environment `info`, `try_wheel.py` and the quick part of the suite run twice: with the wheel,
whose library has to load although it was built under another torch, and with what an install from the sources
makes there, native hooks too. The sources are out of reach meanwhile: the tests run from a copy without them.
Prints a table, and fails if anything has. Environments are gigabytes large; each is removed before the next.
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
#: What follows from torch and Python too: the operators and their fakes, autograd's nodes, torch's private
#: members that the wrapper stands on, its optimizers, its compiler; and files of another version.
QUICK = (
    "tests/kernels/test_native_ops.py",
    "tests/kernels/test_compile.py",
    "tests/accumulators/test_p_grad.py",
    "tests/autograd/test_eligibility.py",
    "tests/autograd/test_reshaped_parameters.py",
    "tests/autograd/test_unusual_gradients.py",
    "tests/nn/test_autograd.py",
    "tests/nn/test_compiled.py",
    "tests/nn/test_compiled_sums.py",
    "tests/nn/test_flops.py",
    "tests/nn/test_patches.py",
    "tests/optimizer/test_amp.py",
    "tests/optimizer/test_distributed_checkpoint.py",
    "tests/optimizer/test_old_files.py",
    "tests/optimizer/test_schedulers.py",
    "tests/optimizer/test_torch_optimizers.py",
    "tests/optimizer/test_update.py",
    "tests/distributed/test_one_rank.py",
    "tests/property/test_property.py",
    "tests/commands/test_info.py",
)
#: Where there are native hooks, which need a build under the same torch.
NATIVE = ("tests/autograd/test_native_hooks.py", "tests/nn/test_native_functions.py")
TOOLS = ("setuptools", "wheel", "numpy", "pytest", "expecttest")
#: What the installed package is made of, and the tests must not find beside themselves.
SOURCES = ("fusedacc", "csrc", "setup.py")


def copy_tracked(target: Path, without: Sequence[str] = ()) -> None:
    """The tracked files, but for those of top-level names `without`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if Path(name).parts[0] not in without:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


class Environment:
    """A virtual environment with a torch, removed in the end.

    Args:
        python: the command of the interpreter.
        torch: as pip wants it named.
    """

    def __init__(self, python: str, torch: str) -> None:
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.run([python, "-m", "venv", FOLDER], check=True)
        self.python = FOLDER / "bin" / "python"
        self.variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.variables |= {"FUSEDACC_CACHE": str(FOLDER / "cache"), "OMP_WAIT_POLICY": "passive"}
        # Triton's interpreter is a tool of tests: 3.6's needs an older numpy, 3.9's takes no scalar mask.
        self.variables["TRITON_INTERPRET"] = "0"
        self.suite = FOLDER / "suite"
        copy_tracked(self.suite, SOURCES)
        copy_tracked(FOLDER / "source")
        # First and alone, so that no later requirement can pull another release.
        self.pip("install", torch, check=True)
        self.pip("install", *TOOLS, check=True)
        program = "import platform, torch; print(platform.python_version(), torch.__version__)"
        self.name = self.run("-c", program).stdout.split()

    def pip(self, *arguments: str, check: bool) -> bool:
        """Whether pip has done it; raises where it has not and `check` is true."""
        command = [str(self.python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
        return subprocess.run(command, check=check, env=self.variables).returncode == 0

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The environment's Python, from the folder that holds the tests and no package."""
        command = [str(self.python), *arguments]
        result = subprocess.run(command, cwd=self.suite, env=self.variables, capture_output=True, text=True)
        if result.returncode:
            print(*result.args, result.stdout, result.stderr, sep="\n", flush=True)
        return result

    def row(self, package: str) -> tuple[list[str], bool]:
        """What the table says of an installed package, and whether all is well."""
        if not self.pip(
            "install", "--no-build-isolation", "--no-deps", "--force-reinstall", package, check=False
        ):
            return ["-", "not installed", *["-"] * 5], False
        info = self.run("-m", "fusedacc", "info")
        hooks = re.search(r"^hooks: (native|in Python)", info.stdout, re.MULTILINE)
        training = self.run(".ci/try_wheel.py")
        chosen = [*QUICK, *(NATIVE if hooks and hooks[1] == "native" else ())]
        begin = time.monotonic()
        tests = self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
        seconds = time.monotonic() - begin
        last = tests.stdout.splitlines()[-1:]
        counts = {word: number for line in last for number, word in re.findall(r"(\d+) (\w+)", line)}
        results = ["fails" if result.returncode else "runs" for result in (info, training)]
        numbers = [counts.get(word, "0") for word in ("passed", "failed", "skipped")]
        cells = [hooks[1] if hooks else "?", *results, *numbers, f"{seconds:.0f}"]
        return cells, not any(result.returncode for result in (info, training, tests))


def oldest_torch() -> str:
    """torch's oldest release that pyproject.toml allows."""
    allowed = re.search(
        r'^dependencies = \["torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    if allowed is None:
        raise SystemExit("pyproject.toml does not say which torch is the oldest")
    return f"torch=={allowed[1]}.*"


def main() -> None:
    wheel, *pythons = sys.argv[1:]
    packages = {"wheel": str(Path(wheel).resolve()), "built there": str(FOLDER / "source")}
    head = [
        "Python",
        "torch",
        "installed",
        "hooks",
        "info",
        "training",
        "passed",
        "failed",
        "skipped",
        "seconds",
    ]
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
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    if not well:
        raise SystemExit("not everything passed")


if __name__ == "__main__":
    main()
