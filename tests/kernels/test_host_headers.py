"""C++ code for GPUs that is compiled for and run on the host: launch plans, arithmetic and kernels."""

import shutil
import subprocess
from pathlib import Path

import pytest
import sweeps
import torch
from build_cache import cached, contents, version_of

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "csrc"
COMPILER = next((found for found in map(shutil.which, ("g++", "c++", "clang++")) if found), None)
FLAGS = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
OUTPUTS = {
    "arithmetic_check": "rounded once\n",
    "host_check": "flat capacity 1167, arguments 32736 and 32752 bytes\n",
    "rounding_check": "random bits agree\n",
}

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def output_of(name: str, *options: str) -> str:
    """Compile a program, unless it is in the cache, and run it."""
    flags = [*FLAGS, *options]
    source = HERE / "native" / f"{name}.cpp"
    headers = contents(*(SOURCES / folder for folder in ("common", "cpu", "cuda", "ops")), source.parent)
    made_from = [name, *flags, version_of(COMPILER), torch.__version__, *headers]

    def compile_in(folder: Path) -> None:
        command = [COMPILER, *flags, f"-I{SOURCES}", str(source), "-o", str(folder / name)]
        subprocess.run(command, check=True)

    program = cached(name, made_from, compile_in) / name
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", OUTPUTS)
def test_plans_arithmetic_and_kernel_bodies_on_the_host(name: str) -> None:
    """These headers do not need torch. Without optimization they compile in half the time."""
    assert output_of(name, "-O2" if sweeps.FULL else "-O0") == OUTPUTS[name]


@pytest.mark.parametrize("added", ["", "ROW(float8, kFloat8) ", "ROW(float8, kFloat8, Float8, Float8) "])
def test_a_dtype_without_an_element_does_not_compile(added: str, tmp_path: Path) -> None:
    """The size, name and element type of a dtype come only from its row in the table."""
    shutil.copytree(SOURCES / "common", tmp_path / "common")
    header = tmp_path / "common" / "dtypes.h"
    text = header.read_text()
    assert text.count("ROW(float64,") == 1
    header.write_text(text.replace("ROW(float64,", f"{added}ROW(float64,"))
    source = tmp_path / "source.cpp"
    source.write_text('#include "common/dtypes.h"\n')
    command = [COMPILER, "-std=c++17", "-fsyntax-only", f"-I{tmp_path}", str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode != 0) == bool(added), result.stderr
