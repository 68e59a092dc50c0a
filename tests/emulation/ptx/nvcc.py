"""Runs the PTX that nvcc generates from csrc/cuda/ in place of the kernels that g++ compiles from it."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine_code.compile import NVCC, nvcc_compiled

from .. import build

#: Those that take longest come first.
SOURCES = ("norm", "accumulate")


def obstacle() -> str | None:
    """Return why nvcc's PTX is not available, or None."""
    return None if NVCC else "nvcc was not found"


def plain_name(mangled: str) -> str:
    """Remove the anonymous namespace from a mangled name, because compilers name it differently."""
    match = re.search(r"(\d+)_GLOBAL__N_", mangled)
    if match is None:
        return mangled
    begin = match.start()
    return mangled[:begin] + mangled[match.end(1) + int(match[1]) :]


def symbols(library: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and offset of each function of a library, including local functions."""
    listed = subprocess.run(["nm", str(library)], capture_output=True, text=True, check=True).stdout
    for offset, name in re.findall(r"^([0-9a-f]+) [tT] (\S+)$", listed, re.MULTILINE):
        yield name, int(offset, 16)


def use(kernels: ctypes.CDLL, library: Path) -> int:
    """Make the emulated kernels run as PTX. Return their number.

    Raises RuntimeError if a kernel has no PTX, or PTX has no kernel.
    """
    offsets = dict(symbols(library))
    address = ctypes.cast(kernels.emu_use_ptx, ctypes.c_void_p).value
    assert address is not None
    base = address - offsets["emu_use_ptx"]
    compiled_by_gcc = {
        plain_name(name): base + offset
        for name, offset in offsets.items()
        if re.match(r"_ZN8fusedacc4cuda12_GLOBAL__N_1\d+\w*_kernelI", name)
    }
    kernels.emu_use_ptx.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    used = set()
    texts = [(nvcc_compiled(source) / f"{source}.ptx").read_text() for source in SOURCES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        libraries = list(pool.map(build.ptx_library, texts, (f"nvcc-{source}" for source in SOURCES)))
    for ptx, path in zip(texts, libraries, strict=True):
        run = ctypes.CDLL(str(path))
        for entry in re.findall(r"\.entry\s+([\w$]+)", ptx):
            name = plain_name(entry)
            if name not in compiled_by_gcc:
                raise RuntimeError(f"g++ has compiled no kernel {name}")
            function = ctypes.cast(getattr(run, f"ptx_{entry}"), ctypes.c_void_p)
            kernels.emu_use_ptx(compiled_by_gcc[name], function)
            used.add(name)
    # g++ emits every kernel, because the launches take the kernels' addresses.
    missing = compiled_by_gcc.keys() - used
    if missing:
        raise RuntimeError(f"no PTX from nvcc for {sorted(missing)[:3]} and {len(missing)} kernels in all")
    return len(used)
