"""The commands that compile the native engine: its sources, its flags, and the names of its files.

`setup.py` and `.ci/build_wheel.py` load this file by its path. So it imports only the standard library.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

#: The engine's files in the folder of the C++ sources. An installed package has a copy of them.
SOURCES = ("autograd/*.cpp", "autograd/*.h", "common/*.h", "cpu/gemm.h")
WARNINGS = ("-Wall", "-Wextra")
FLAGS = (
    "-std=c++20",
    "-O2",
    *WARNINGS,
    "-fPIC",
    "-fvisibility=hidden",
    "-DTORCH_EXTENSION_NAME=_autograd",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
)
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10")


def file_name(torch_version: str) -> str:
    """Return the name of the engine that is built for an installed torch and this Python."""
    return f"_autograd.torch-{torch_version}.{sysconfig.get_config_var('SOABI')}.so"


def released_file_name(torch_version: str, commit: str, soabi: str) -> str:
    """Return the name of an engine in a released wheel. It fits all builds of one commit of PyTorch.

    The builds for CPUs and for each CUDA version have the same headers. Their versions differ in what follows
    the "+".
    """
    return f"_autograd.torch-{torch_version.partition('+')[0]}-{commit[:12]}.{soabi}.so"


def find_compiler() -> list[str] | None:
    """Return the command of the C++ compiler: `CXX` if it is set. None: there is none.

    Raises ValueError if `CXX` has a quote that is not closed.
    """
    named = os.environ.get("CXX", "")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise ValueError(f"CXX={named}: {error}") from None
    if command:
        return command if shutil.which(command[0]) else None
    return next(([name] for name in ("g++", "c++", "clang++") if shutil.which(name)), None)


def python_headers() -> Path:
    """Return the folder of this Python's headers. `Python.h` may be missing there."""
    return Path(sysconfig.get_paths()["include"])


def sources(folder: Path) -> list[Path]:
    """Return the engine's files in the folder of the C++ sources, sorted."""
    return sorted(path for pattern in SOURCES for path in folder.glob(pattern))


def write_unit(folder: Path, target: Path) -> None:
    """Write a file that includes all of the engine's `.cpp` files.

    They are compiled as one, because PyTorch's headers take longer to compile than the engine's code.
    """
    included = [path for path in sources(folder) if path.suffix == ".cpp"]
    target.write_text("".join(f'#include "{path}"\n' for path in included))


def compilation(compiler: list[str], torch: Path, python: Path, unit: Path, target: Path) -> list[str]:
    """Return the command that compiles the file of `write_unit` into an object file.

    Args:
        compiler: the command of the C++ compiler.
        torch: the folder of the package torch.
        python: the folder of Python's headers.
        unit: the file to compile.
        target: the object file.
    """
    include = torch / "include"
    folders = [include, include / "torch/csrc/api/include", python]
    search = [word for folder in folders for word in ("-isystem", str(folder))]
    return [*compiler, *FLAGS, *search, "-c", str(unit), "-o", str(target)]


def link(
    compiler: list[str], torch: Path, objects: list[Path], target: Path, options: Sequence[str] = ()
) -> list[str]:
    """Return the command that links object files to the engine.

    Args:
        compiler, torch: as in `compilation`.
        objects: the object files.
        target: the engine's file.
        options: more options for the linker.
    """
    libraries = [f"-L{torch / 'lib'}", *LIBRARIES]
    return [*compiler, "-shared", *map(str, objects), *options, *libraries, "-o", str(target)]
