"""Compiles the GPU kernels for each architecture, once for all runs, and disassembles them."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "tests") not in sys.path:
    sys.path.append(str(ROOT / "tests"))

from build_cache import cached, contents, version_of  # noqa: E402  (tests/ is on the path now)

#: Where nvcc is looked for, as by setup.py.
FOLDERS = [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME') or '/usr/local/cuda'}/bin"]
NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc", path=os.pathsep.join(FOLDERS))
#: As setup.py has them, and no warnings.
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra"]


def triton_folder() -> Path | None:
    """Where Triton keeps what it has of the CUDA toolkit, without importing it."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    return Path(triton.origin).parent / "backends" / "nvidia"


TRITON = triton_folder()


def find_disassembler() -> str | None:
    """cuobjdump, of a CUDA toolkit or of Triton's package."""
    folders = ["/usr/local/cuda/bin", *([str(TRITON / "bin")] if TRITON else [])]
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=os.pathsep.join(folders))


CUOBJDUMP = find_disassembler()


def obstacle(backend: str) -> str | None:
    """Why there is no machine code of a backend to look at, or None."""
    if CUOBJDUMP is None:
        return "cuobjdump was not found: neither in a CUDA toolkit nor in Triton's package"
    if backend == "cuda":
        return None if NVCC else "nvcc was not found: not on PATH, CUDA_HOME or CUDACXX"
    return None if TRITON else "Triton is not installed"


@functools.cache
def nvcc_compiled(name: str, architecture: str = "sm_90") -> Path:
    """Compile a source of `csrc/cuda/`.

    Returns:
        A folder with its PTX and its machine code.
    """
    source = ROOT / "csrc" / "cuda" / f"{name}.cu"
    flags = [*FLAGS, f"-arch={architecture}"]

    def compile_in(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as kept:
            command = [str(NVCC), *flags, "-cubin", "--keep", "--keep-dir", kept]
            command += [str(source), "-o", str(folder / f"{name}.cubin")]
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            shutil.copy(Path(kept) / f"{name}.ptx", folder)

    made_from = [name, *flags, version_of(str(NVCC)), *contents(source.parent, ROOT / "csrc" / "common")]
    return cached(f"cuda-{name}-{architecture}", made_from, compile_in)


@functools.cache
def triton_compiled(wanted: tuple[tuple[Any, ...], ...]) -> Path:
    """Compile Triton kernels, as `machine_code/triton_kernels.py` names them.

    Returns:
        A folder with `compiled.json` and the cubins.
    """
    program = ROOT / "machine_code" / "triton_kernels.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    def compile_in(folder: Path) -> None:
        (folder / "wanted.json").write_text(json.dumps(wanted))
        command = [sys.executable, "-m", "machine_code.triton_kernels", folder / "wanted.json", folder]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    made_from = [program.read_bytes(), json.dumps(wanted), importlib.metadata.version("triton")]
    return cached("triton", [*made_from, *contents(ROOT / "fusedacc" / "kernels")], compile_in)


def dumped(cubin: Path, what: str) -> str:
    """What `cuobjdump --dump-WHAT` prints."""
    command = [str(CUOBJDUMP), f"--dump-{what}", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: Path) -> dict[str, dict[str, int]]:
    """Of each kernel: `REG`, `STACK`, `SHARED`, `LOCAL` and so on, as cuobjdump calls them."""
    text = dumped(cubin, "resource-usage")
    found = re.findall(r"Function (\S+):\s+(.*)", text)
    return {name: {key: int(n) for key, n in re.findall(r"(\w+):(\d+)", usage)} for name, usage in found}
