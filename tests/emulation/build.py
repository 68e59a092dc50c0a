"""Compiles the emulated device and the project's kernels for it.

Unchanged parts come from the cache. The device uses torch's internals, so it is built against one version of
torch. The kernel library is the project's native library, with csrc/cuda/*.cu compiled by g++.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build_cache import built, cached, contents, version_of

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "emulation"
#: The torch whose internals the device is written for.
TORCH = "2.13.0"
COMPILER = "g++"
#: `--no-as-needed` makes the linker keep torch's libraries.
TORCH_LIBRARIES = ("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10")
#: As in the real builds: fuse a multiplication and an addition only where the source says so.
EXACT = ("-ffp-contract=off", "-fno-trapping-math", "-fno-strict-aliasing")
VECTOR_FLAGS = {
    "cpu/loops_avx2.cpp": ("-mavx2", "-mfma"),
    "cpu/loops_avx512.cpp": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"),
}
VECTOR_FLAGS["cpu/loops_avx512_bf16.cpp"] = (*VECTOR_FLAGS["cpu/loops_avx512.cpp"], "-mavx512bf16")
#: kernel<<<blocks, threads, 0, stream>>>(arguments);
LAUNCH = re.compile(r"(\w+)((?:<[^<>;]*>)?)<<<([^;]+?), (\w+), 0, (\w+)>>>\((\w+)\);")


def torch_folder() -> Path:
    """Return torch's folder without importing torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def torch_version() -> str:
    return importlib.metadata.version("torch")


def obstacle() -> str | None:
    """Return why the device cannot be emulated here, or None."""
    if torch_version().partition("+")[0] != TORCH:
        return f"the emulated device is written for torch {TORCH}, and this is {torch_version()}"
    if any((torch_folder() / "lib" / name).exists() for name in ("libtorch_cuda.so", "libtorch_hip.so")):
        return "this torch was built with CUDA or ROCm, whose dispatch key the emulated device needs"
    if shutil.which(COMPILER) is None:
        return f"{COMPILER} was not found"
    return None


def run(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def compiled(
    source: Path, flags: Sequence[str], folders: Sequence[Path], included: Sequence[bytes] = ()
) -> Path:
    """Compile a C++ source, unless the object is in the cache.

    Args:
        source: the file to compile.
        flags: options for g++.
        folders: the project's folders to search for headers. A change in any of them causes a recompilation.
        included: the contents of other headers that the source includes.

    Returns:
        The object file.
    """
    include = torch_folder() / "include"
    search = [f"-I{folder}" for folder in folders] + ["-isystem", include]
    search += ["-isystem", include / "torch" / "csrc" / "api" / "include"]

    def make(folder: Path) -> None:
        run(COMPILER, *flags, "-fPIC", *search, "-c", source, "-o", folder / "object.o")

    made_from = [source.name, source.read_bytes(), *flags, *contents(*folders), *included]
    made_from += [version_of(COMPILER), torch_version()]
    return cached(f"emulated-{source.stem}", made_from, make) / "object.o"


def compile_all(
    sources: Sequence[tuple[Path, Sequence[str]]], folders: Sequence[Path], included: Sequence[bytes] = ()
) -> list[Path]:
    """Compile several sources, `MAX_JOBS` at a time.

    Args:
        sources: each source with its options for g++.
        folders: see `compiled`.
        included: see `compiled`.

    Returns:
        The object files, in the order of the sources.
    """
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda each: compiled(each[0], each[1], folders, included), sources))


def linked(name: str, objects: Sequence[Path], *options: object) -> Path:
    """Link objects into a shared library and return its path."""

    def make(folder: Path) -> None:
        run(COMPILER, "-shared", *objects, *options, "-o", folder / name)

    made_from = [name, *map(str, options), *(path.read_bytes() for path in objects)]
    return cached("emulated-library", made_from, make) / name


def device_library() -> Path:
    """Build the library of the emulated device and return its path."""
    flags = ["-std=c++20", "-O1", "-fvisibility=hidden"]
    sources = [(source, flags) for source in sorted((HERE / "device").glob("*.cpp"))]
    objects = compile_all(sources, [HERE / "device"])
    return linked("libemulated_cuda.so", objects, "-L", torch_folder() / "lib", *TORCH_LIBRARIES)


def translated(source: Path) -> str:
    """Return a source of csrc/cuda/ as C++: launches become function calls that declare their accesses."""
    text, launches = LAUNCH.subn(r'::emulation::launch("\1", \1\2, \3, \4, \5, \6);', source.read_text())
    if launches == 0 or "<<<" in text:
        raise ValueError(
            f"{source}: a launch is not written as kernel<<<blocks, threads, 0, stream>>>(arguments)"
        )
    kind = f"#define EMULATED_{source.stem.upper()}\n"
    return f'#include "cuda_language.h"\n{text}\n{kind}#include "accesses.h"\n'


def kernel_library(device: Path) -> Path:
    """Build the project's native library with its CUDA kernels for the emulated device.

    Code for the CPU comes from `make build-cuda`, or is compiled if that is not up to date.
    """
    csrc = ROOT / "csrc"
    kernels = HERE / "kernels"
    flags = ["-std=c++17", "-O2", "-fvisibility=hidden", *EXACT, "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    flags += [f'-DFUSEDACC_TORCH_VERSION="{torch_version()}"', "-DFUSEDACC_CUDA"]
    flags += ['-DFUSEDACC_CUDA_ARCHITECTURES="9.0"']
    on_host = [
        source
        for source in sorted(csrc.rglob("*.cpp"))
        if source.parent.name not in ("autograd", "cuda")
        and (on_x86() or relative(source) not in VECTOR_FLAGS)
    ]
    # These sources include only one header of csrc/cuda/. So a change to a kernel recompiles none of them.
    folders = [csrc / "common", csrc / "cpu", csrc / "ops"]
    cuda = csrc / "cuda" / "cuda.h"
    headers = [cuda, *(path for folder in folders for path in folder.glob("*.h"))]
    made = {source: built(source, headers) for source in on_host}
    missing = [
        (source, [*flags, *VECTOR_FLAGS.get(relative(source), ())])
        for source, target in made.items()
        if target is None
    ]
    objects = [target for target in made.values() if target is not None]
    objects += compile_all(missing, folders, [cuda.read_bytes()])
    objects += compile_all([(source, flags) for source in sorted((csrc / "cuda").glob("*.cpp"))], [csrc])
    flags += ["-mfma"] if has_fma() else []
    with tempfile.TemporaryDirectory() as folder:
        sources = [(source, flags) for source in sorted(kernels.glob("*.cpp"))]
        for source in sorted((csrc / "cuda").glob("*.cu")):
            target = Path(folder) / f"{source.stem}.cpp"
            target.write_text(translated(source))
            sources.append((target, flags))
        objects += compile_all(sources, [csrc, csrc / "cuda", kernels])
    return linked("libfusedacc.so", objects, device, "-L", torch_folder() / "lib", *TORCH_LIBRARIES)


def relative(source: Path) -> str:
    return source.relative_to(ROOT / "csrc").as_posix()


def on_x86() -> bool:
    return os.uname().machine == "x86_64"


def has_fma() -> bool:
    """Return whether this CPU has FMA instructions. Without them the C library emulates FMA, slowly."""
    return on_x86() and " fma " in Path("/proc/cpuinfo").read_text()


def ptx_library(ptx: str, name: str) -> Path:
    """Translate PTX into a library with a function `ptx_NAME` for each kernel NAME.

    Before you load it, load the libraries with the emulated threads and memory, with global symbols.

    Args:
        ptx: the PTX to translate.
        name: a readable part of the name of the cache folder.

    Returns:
        The path of the library.
    """
    from .ptx import translate

    folders = [HERE / "kernels", HERE / "ptx"]
    flags = ["-std=c++17", "-O1", *EXACT, *(["-mfma"] if has_fma() else [])]

    def make(folder: Path) -> None:
        source = folder / "ptx.cpp"
        source.write_text(translate.to_cpp(ptx))
        search = [f"-I{folder}" for folder in folders]
        run(COMPILER, *flags, "-w", "-fPIC", "-shared", *search, source, "-o", folder / "ptx.so")
        source.unlink()

    made_from = [ptx, *flags, *contents(*folders), version_of(COMPILER)]
    return cached(f"emulated-ptx-{name}", made_from, make) / "ptx.so"
