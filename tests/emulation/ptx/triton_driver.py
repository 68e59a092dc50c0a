"""A Triton driver whose launches run the compiled PTX on the emulated device.

Triton compiles as it would for a GPU with the emulated compute capability. It also runs ptxas, but the driver
ignores the result.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.runtime import driver

from .. import build

#: The `struct` format that stores an argument of each Triton type in 64 bits.
FORMATS = {"i1": "q", "i8": "q", "i16": "q", "i32": "q", "i64": "q", "fp32": "f", "fp64": "d"}
SHARED_BYTES = 227 << 10
LANES = 32


class Utilities:
    """The functions that Triton calls instead of the CUDA driver."""

    def __init__(self) -> None:
        self.ptx = ""

    def note_kernel(
        self, module: Any, function: Any, name: str, metadata_group: dict[str, str], hash_: str
    ) -> None:
        """Store the PTX of the kernel that Triton is about to load."""
        (path,) = (path for name, path in metadata_group.items() if name.endswith(".ptx"))
        self.ptx = Path(path).read_text()

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Return the module, the function, its registers and spills, and the most threads per block."""
        library = ctypes.CDLL(str(build.ptx_library(self.ptx, f"triton-{name}")))
        (entry,) = re.findall(r"\.entry\s+([\w$]+)", self.ptx)
        return library, getattr(library, f"ptx_{entry}"), 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132, "warpSize": LANES}


class Launcher:
    """Runs a kernel's PTX. The source's signature has the types of the arguments."""

    launch: Callable[..., None]

    def __init__(self, source: Any, metadata: Any) -> None:
        self._types = list(source.signature.values())
        self._name = metadata.name.encode()
        self._threads = metadata.num_warps * LANES
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise NotImplementedError("scratch memory")

    def _bits(self, kind: str, value: Any) -> int:
        if kind.startswith("*"):
            return 0 if value is None else value.data_ptr()
        return struct.unpack("Q", struct.pack(FORMATS[kind], value).ljust(8, b"\0"))[0]

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: Any,
        packed: Any,
        launch: Any,
        enter: Any,
        leave: Any,
        *arguments: Any,
    ) -> None:
        given = zip(self._types, arguments, strict=True)
        values = [self._bits(kind, value) for kind, value in given if kind != "constexpr"]
        values += [0, 0]  # scratch memory
        numbers = (ctypes.c_uint64 * len(values))(*values)
        grid = (ctypes.c_uint * 3)(x, y, z)
        Launcher.launch(self._name, stream, function, grid, self._threads, numbers, len(values))


class EmulatedDriver(GPUDriver):
    """Replaces Triton's CUDA driver."""

    def __init__(self) -> None:
        super().__init__()
        self.utils = Utilities()
        self.launcher_cls = Launcher
        knobs.runtime.kernel_load_start_hook.add(self.utils.note_kernel)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        major, minor = torch.cuda.get_device_capability()
        return GPUTarget("cuda", 10 * major + minor, LANES)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def use(kernels: ctypes.CDLL) -> None:
    """Make Triton launch its kernels on the emulated device. `kernels` has the emulated threads."""
    launch = kernels.emu_launch_ptx
    pointer = ctypes.c_void_p
    number = ctypes.c_int
    launch.argtypes = [ctypes.c_char_p, ctypes.c_int64, pointer, pointer, number, pointer, number]
    launch.restype = None
    Launcher.launch = launch
    driver.set_active(EmulatedDriver())
