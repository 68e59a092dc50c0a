"""Compiles the GPU kernels for each architecture, caches the results, and disassembles them."""

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

from build_cache import built, cached, contents, version_of

ROOT = Path(__file__).resolve().parents[2]
#: The folders to search for nvcc, as in setup.py.
FOLDERS = [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME') or '/usr/local/cuda'}/bin"]
NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc", path=os.pathsep.join(FOLDERS))
#: The flags of setup.py. Warnings are errors, as in the build of .ci/run.
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra"]


def triton_folder() -> Path | None:
    """Return the folder with Triton's parts of the CUDA toolkit, without importing Triton."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    return Path(triton.origin).parent / "backends" / "nvidia"


TRITON = triton_folder()


def find_disassembler() -> str | None:
    """Return the path of cuobjdump from a CUDA toolkit or from Triton's package, or None."""
    folders = ["/usr/local/cuda/bin", *([str(TRITON / "bin")] if TRITON else [])]
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=os.pathsep.join(folders))


CUOBJDUMP = find_disassembler()


def obstacle(backend: str) -> str | None:
    """Return why the machine code of a backend cannot be read here, or None."""
    if CUOBJDUMP is None:
        return "cuobjdump was not found: neither in a CUDA toolkit nor in Triton's package"
    if backend == "cuda":
        return None if NVCC else "nvcc was not found: not on PATH, CUDA_HOME or CUDACXX"
    return None if TRITON else "Triton is not installed"


@functools.cache
def nvcc_compiled(name: str, architecture: str = "sm_90") -> Path:
    """Compile a source of `csrc/cuda/`, named without its suffix, or take what `make build-cuda` made of it.

    Return a folder with the PTX and the machine code.
    """
    source = ROOT / "csrc" / "cuda" / f"{name}.cu"
    flags = [*FLAGS, f"-arch={architecture}"]
    headers = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cuh")]

    def compile_in(folder: Path) -> None:
        made = built(source, headers)
        if CUOBJDUMP and made is not None and extracted(made, folder, name, architecture):
            return
        with tempfile.TemporaryDirectory() as kept:
            command = [str(NVCC), *flags, "-cubin", "--keep", "--keep-dir", kept]
            command += [str(source), "-o", str(folder / f"{name}.cubin")]
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            shutil.copy(Path(kept) / f"{name}.ptx", folder)

    made_from = [name, *flags, version_of(str(NVCC)), *contents(source.parent, ROOT / "csrc" / "common")]
    return cached(f"cuda-{name}-{architecture}", made_from, compile_in)


def extracted(made: Path, folder: Path, name: str, architecture: str) -> bool:
    """Copy an object's PTX and machine code to a folder. Return whether the object has both."""
    for option, suffix in (("--extract-ptx", "ptx"), ("--extract-elf", "cubin")):
        with tempfile.TemporaryDirectory() as found:
            command = [str(CUOBJDUMP), option, f".{architecture}.", str(made)]
            subprocess.run(command, cwd=found, capture_output=True)
            files = list(Path(found).glob(f"*.{suffix}"))
            if len(files) != 1:
                return False
            shutil.copy(files[0], folder / f"{name}.{suffix}")
    return True


@functools.cache
def triton_compiled(wanted: tuple[tuple[Any, ...], ...]) -> Path:
    """Compile kernels, as `machine_code/triton_kernels.py` reads them.

    Return a folder with `compiled.json` and the cubins.
    """
    program = ROOT / "tests" / "machine_code" / "triton_kernels.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")])
    )

    def compile_in(folder: Path) -> None:
        (folder / "wanted.json").write_text(json.dumps(wanted))
        command = [sys.executable, "-m", "machine_code.triton_kernels", folder / "wanted.json", folder]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    made_from = [program.read_bytes(), json.dumps(wanted), importlib.metadata.version("triton")]
    return cached("triton", [*made_from, *contents(ROOT / "fusedacc" / "kernels")], compile_in)


def dumped(cubin: Path, what: str) -> str:
    """Return the output of `cuobjdump --dump-WHAT`."""
    command = [str(CUOBJDUMP), f"--dump-{what}", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: Path) -> dict[str, dict[str, int]]:
    """Return the resource usage of each kernel, with cuobjdump's names: `REG`, `STACK`, `SHARED`, `LOCAL`."""
    text = dumped(cubin, "resource-usage")
    found = re.findall(r"Function (\S+):\s+(.*)", text)
    return {name: {key: int(n) for key, n in re.findall(r"(\w+):(\d+)", usage)} for name, usage in found}
