"""Sources that call torch and cuBLAS for a GPU, run without one: on a torch and a cuBLAS made up here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
COMPILER = next((found for found in map(shutil.which, ("g++", "c++", "clang++")) if found), None)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("name", "says"), [("cublas_check", "13 calls\n"), ("finish_check", "ends of norms agree\n")]
)
def test_what_torch_and_cublas_are_asked_for(name: str, says: str, tmp_path: Path) -> None:
    program = tmp_path / name
    include = Path(torch.__file__).parent / "include"
    flags = ["-std=c++17", "-O1", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-Wall", "-Wextra", "-Werror"]
    flags += ["-ffp-contract=off", '-DFUSEDACC_CUDA_ARCHITECTURES="9.0"']
    paths = [f"-I{ROOT / 'csrc'}", "-isystem", str(include)]
    # The library is looked for as torch's is: among what the process has loaded.
    link = ["-rdynamic", "-ldl", "-Wl,--unresolved-symbols=ignore-all"]
    source = str(ROOT / "tests" / "native" / f"{name}.cpp")
    subprocess.run([COMPILER, *flags, *paths, source, *link, "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == says
