"""Starts the emulated device in this process and makes the package use the emulated kernels."""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from . import build

#: The module that loads the native library.
LOADER = "fusedacc.kernels.library"


class LibraryInPlace(importlib.abc.MetaPathFinder):
    """Makes the package load another native library by changing `LIBRARY`.

    Other modules read `LIBRARY` while they are imported, so it must change during the package's import.
    """

    def __init__(self, library: Path) -> None:
        self.library = library

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != LOADER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        run = functools.partial(self.exec_module, spec.loader)
        spec.loader.exec_module = run  # type: ignore[method-assign]  # only this spec has the loader
        return spec

    def exec_module(self, loader: importlib.machinery.SourceFileLoader, module: ModuleType) -> None:
        import torch

        load_library = torch.ops.load_library
        torch.ops.load_library = lambda path: load_library(self.library)
        try:
            importlib.machinery.SourceFileLoader.exec_module(loader, module)
        finally:
            torch.ops.load_library = load_library
        vars(module)["LIBRARY"] = self.library


@functools.cache
def activate(ptx: bool = False) -> Any:
    """Start the emulated device. Return the library with the emulated kernels.

    Call this function before you import torch, because torch checks for CUDA only once. Otherwise it
    raises RuntimeError.

    ptx: run the kernels as the PTX that nvcc generates.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the device must be emulated before torch is imported")
    # Load the libraries with global symbols, because the native library looks up torch's CUDA shims there.
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(build.torch_folder() / "lib" / name), ctypes.RTLD_GLOBAL)
    path = build.device_library()
    device = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    library = build.kernel_library(path)
    from . import torch_cuda

    torch_cuda.activate(device)
    sys.meta_path.insert(0, LibraryInPlace(library))
    kernels = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    kernels.emu_set_seed.argtypes = [ctypes.c_uint64]
    if ptx:
        from .ptx import nvcc

        nvcc.use(kernels, library)
    if importlib.util.find_spec("triton") is not None:
        from .ptx import triton_driver

        triton_driver.use(kernels)
    return kernels
