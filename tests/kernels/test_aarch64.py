"""The C++ sources compile for aarch64 (Grace) without warnings, and the programs without torch run there.

It needs Debian's g++-aarch64-linux-gnu and qemu-user. No library of PyTorch for aarch64 is needed, because
nothing is linked with it.
"""

import platform
import runpy
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import sweeps
import torch
from build_cache import cached, contents, version_of
from test_host_headers import FLAGS, OUTPUTS

from fusedacc.kernels import engine_command

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc"
NATIVE = Path(__file__).with_name("native")
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="aarch64-linux-gnu-g++ is not installed")


def compile_once(name: str, *command: str) -> Path:
    """Run a command with `-o` and the result's path, unless the cache has the result. Return its path."""
    made_from = [name, *command, version_of(COMPILER), torch.__version__, *contents(SOURCES, NATIVE)]

    def compile_in(folder: Path) -> None:
        subprocess.run([*command, "-o", str(folder / name)], check=True)

    return cached(name, made_from, compile_in) / name


@pytest.mark.skipif(EMULATOR is None, reason="qemu-user is not installed")
@pytest.mark.parametrize("name", OUTPUTS)
def test_the_arithmetic_is_the_same(name: str) -> None:
    options = [*FLAGS, "-O2", "-static", f"-I{SOURCES}"]
    program = compile_once(f"{name}-aarch64", COMPILER, *options, str(NATIVE / f"{name}.cpp"))
    result = subprocess.run([EMULATOR, program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == OUTPUTS[name]


@pytest.mark.skipif(not sweeps.FULL, reason="takes a minute; FUSEDACC_FULL_TESTS=1 runs it")
def test_the_kernels_compile_without_warnings(monkeypatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with mock.patch("setuptools.setup"):
        setup = runpy.run_path(str(ROOT / "setup.py"))
    toolchain = setup["Toolchain"]([COMPILER], None)
    sources = toolchain.sources()
    assert SOURCES / "cpu" / "loops_baseline.cpp" in sources
    assert not any("avx" in source.name for source in sources)
    for source in sources:
        compile_once(f"{source.name}-aarch64.o", *toolchain.cxx, "-Werror", "-c", str(source))


@pytest.mark.skipif(not sweeps.FULL, reason="takes a minute; FUSEDACC_FULL_TESTS=1 runs it")
def test_the_engine_compiles_without_warnings(tmp_path: Path) -> None:
    headers = engine_command.python_headers()
    if not (headers / "Python.h").exists():
        pytest.skip(f"the engine includes Python.h, which is not in {headers}: install Python's headers")
    unit = tmp_path / "engine.cpp"
    engine_command.write_unit(SOURCES, unit)
    package = Path(torch.__file__).parent
    command = engine_command.compilation([COMPILER, "-Werror"], package, headers, unit, tmp_path / "engine.o")
    subprocess.run(command, check=True)
