"""The calls of cuBLAS, without a GPU: the sources that make them, run on a cuBLAS made up for the test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
COMPILER = next((found for found in map(shutil.which, ("g++", "c++", "clang++")) if found), None)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_arguments_modes_and_scalars(tmp_path: Path) -> None:
    program = tmp_path / "cublas_check"
    include = Path(torch.__file__).parent / "include"
    flags = ["-std=c++17", "-O1", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-Wall", "-Wextra", "-Werror"]
    paths = [f"-I{ROOT / 'csrc'}", "-isystem", str(include)]
    # The library is looked for as torch's is: among what the process has loaded.
    link = ["-rdynamic", "-ldl", "-Wl,--unresolved-symbols=ignore-all"]
    source = str(ROOT / "tests" / "native" / "cublas_check.cpp")
    subprocess.run([COMPILER, *flags, *paths, source, *link, "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == "13 calls\n"
