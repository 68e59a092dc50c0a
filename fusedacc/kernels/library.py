"""The native library: loaded once, or why not and what to do.

It registers `torch.ops.fusedacc.*` by itself; it uses no CPython API, so one file serves every Python, and
the LibTorch stable ABI, so it serves torch 2.10 and later.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import fakes, flops

#: The package's own folder, where compiled files lie.
FOLDER = Path(__file__).parents[1]
LIBRARY = FOLDER / "libfusedacc.so"
REINSTALL = "pip install --no-build-isolation --no-deps --force-reinstall fusedacc"


@functools.cache
def load_error() -> str | None:
    """Loads the library on the first call; returns None if it is loaded, else why not and what to do."""
    if not LIBRARY.exists():
        return (
            f"{LIBRARY.name} is not there: fusedacc was installed without a C++ compiler. "
            f"Install g++ (and nvcc for CUDA), then run: {REINSTALL}"
        )
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        problem = (
            f"{LIBRARY} does not load under torch {torch.__version__}: {error}. "
            f"It needs torch 2.10 or later; to build it again run: {REINSTALL}"
        )
        warnings.warn(f"fusedacc: {problem}. Triton or plain torch is used instead.", stacklevel=2)
        return problem
    fakes.register()
    return None


def built_with() -> dict[str, Any]:
    """What the loaded library is: its path, the torch and CUDA it was built with, its CUDA architectures
    (an empty list: built without CUDA) and the vector instructions its CPU kernels use on this machine.

    Raises RuntimeError if the library is not loaded.
    """
    problem = load_error()
    if problem is not None:
        raise RuntimeError(problem)
    info = json.loads(torch.ops.fusedacc.build_info())
    return {
        "path": str(LIBRARY),
        **info,
        "cuda_architectures": re.findall(r"[^; ,]+", info["cuda_architectures"]),
    }


@functools.cache
def functions() -> ctypes.CDLL:
    """The library's plain C functions; it must be there."""
    return ctypes.CDLL(str(LIBRARY))


def address_of(function: str) -> int:
    """Where one of the library's plain C functions is, for `native_module` to call."""
    return ctypes.cast(getattr(functions(), function), ctypes.c_void_p).value or 0


@functools.cache
def launch_problem(device_index: int) -> str | None:
    """Why CUDA kernels of the library cannot be launched on a GPU, or None; it is asked once for each GPU."""
    function = functions().fusedacc_launch_problem
    function.argtypes, function.restype = [ctypes.c_int32], ctypes.c_char_p
    problem = function(device_index)
    return None if problem is None else problem.decode()


@functools.cache
def _reference_brackets() -> tuple[Callable[[], None], Callable[[], None]]:
    library = ctypes.PyDLL(str(LIBRARY))  # its functions are called with the GIL held
    brackets = library.fusedacc_keep_references, library.fusedacc_drop_references
    for function in brackets:
        function.argtypes, function.restype = (), None
    return brackets


def call(operator: Callable[..., Any], *arguments: Any) -> Any:
    """`operator(*arguments)` of the loaded library, at three quarters of the cost for lists of small tensors.

    Operators run without the GIL, and recent torch takes it once for every tensor that is let go without it;
    here the library keeps its references until the GIL is held again.
    """
    keep, drop = _reference_brackets()
    keep()
    try:
        return operator(*arguments)
    finally:
        drop()


load_error()
flops.register_in_time()
