"""The torch-free C++ headers, run on the host: launch plans, arithmetic, and the CUDA kernels' own bodies."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMPILER = next((found for found in map(shutil.which, ("g++", "c++", "clang++")) if found), None)


SAYS = {
    "host_check": "flat capacity 1167, arguments 32736 and 32752 bytes\n",
    "norm_check": "capacities 907 and 2043\n",
    "gemm_check": "products agree\n",
    "row_check": "runs of 64\n",
}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", SAYS)
def test_plans_arithmetic_and_kernel_bodies_on_the_host(name: str, tmp_path: Path) -> None:
    program = tmp_path / name
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    source = str(ROOT / "tests" / "native" / f"{name}.cpp")
    subprocess.run([COMPILER, *flags, source, "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout == SAYS[name]
