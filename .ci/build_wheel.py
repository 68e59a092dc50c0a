"""Builds the source distribution and the wheel of a release in dist/, from the source distribution.

    python .ci/build_wheel.py [--engines "2.10.0 2.11.0" | all] [--pythons "python3.10 python3.12"]

It needs auditwheel and patchelf on PATH.

The wheel has the CPU kernels, the CUDA kernels if there is nvcc, Triton's sources, and the native engine for
several versions of PyTorch and Python. It runs on systems with glibc 2.28 or newer (`manylinux_2_28`), as
PyTorch's own wheels do: `old_glibc.py` and `old_libraries.cpp` see to that, and auditwheel checks it.

An engine needs the headers of its PyTorch. Those of the installed PyTorch are always used. Each other version
is downloaded once from the package index (up to 1 GB), and only its headers are kept, in build/release. `all`
means each version on the index that fusedacc supports.

Environment: that of `setup.py`; its default of `TORCH_CUDA_ARCH_LIST` is longer here.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import old_glibc
import torch
from try_versions import oldest_torch

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
#: What later builds use again.
KEPT = ROOT / "build" / "release"
ARCHITECTURES = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
#: Libraries that the wheel uses and does not contain.
PYTORCH = ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so")
COMMANDS = ROOT / "fusedacc" / "kernels" / "engine_command.py"
engine_command = SimpleNamespace(**runpy.run_path(str(COMMANDS)))


@dataclass
class PyTorch:
    """Headers of a version of PyTorch.

    Attributes:
        folder: the folder of the package torch.
        version: such as `2.13.0+cpu`.
        commit: the commit of PyTorch that it was built from.
    """

    folder: Path
    version: str
    commit: str


@dataclass
class Python:
    """A version of Python.

    Attributes:
        name: the command.
        soabi: what the names of its modules contain.
        headers: the folder of its headers.
    """

    name: str
    soabi: str
    headers: Path


def run(*command: str | Path, **variables: str) -> str:
    """Run a command in the repository and return what it prints. Raises SystemExit with that if it fails."""
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def compiler() -> list[str]:
    """Return the command of the C++ compiler. Raises SystemExit if there is none."""
    found = engine_command.find_compiler()
    if found is None:
        raise SystemExit("no C++ compiler was found: install g++, or set CXX")
    return found


def python_of(name: str) -> Python | None:
    """Return a Python on PATH, or None if it does not run or has no headers."""
    program = "from sysconfig import *; print(get_config_var('SOABI'), get_paths()['include'])"
    try:
        done = subprocess.run([name, "-c", program], capture_output=True, text=True)
    except OSError:
        return None
    if done.returncode:
        return None
    soabi, headers = done.stdout.strip().split(" ", 1)
    if not (Path(headers) / "Python.h").exists():
        print(f"{name}: no engine, because Python.h is not in {headers}", flush=True)
        return None
    return Python(name, soabi, Path(headers))


def pythons(names: Iterable[str]) -> list[Python]:
    """Return these versions of Python, each once."""
    found = [python for python in map(python_of, names) if python is not None]
    return list({python.soabi: python for python in reversed(found)}.values())[::-1]


def versions_on_the_index() -> list[str]:
    """Return the versions of PyTorch on the package index that fusedacc supports."""
    listed = run(sys.executable, "-m", "pip", "index", "versions", "torch")
    versions = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)
    oldest = re.search(r"[\d.]+\d", oldest_torch())
    assert versions is not None
    assert oldest is not None

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    found = {version.partition("+")[0] for version in versions[1].split(", ")}
    return sorted((each for each in found if numbers(each) >= numbers(oldest[0])), key=numbers)


def headers_of(version: str) -> PyTorch:
    """Return the headers of a version of PyTorch. Download it if they are not there."""
    if version == torch.__version__.partition("+")[0]:
        return PyTorch(Path(torch.__file__).parent, torch.__version__, str(torch.version.git_version))
    kept = KEPT / "torch" / version
    if not kept.exists():
        print(f"downloading PyTorch {version} for its headers", flush=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            options = "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"
            run(sys.executable, "-m", "pip", "download", *options, "-d", folder, f"torch=={version}")
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                wanted = [name for name in packed.namelist() if name.startswith("torch/include/")]
                packed.extractall(Path(folder) / "unpacked", [*wanted, "torch/version.py"])
            (Path(folder) / "unpacked").rename(kept)
    facts = (kept / "torch" / "version.py").read_text()
    full, commit = (
        re.search(rf"^{name} = '(.*)'$", facts, re.MULTILINE) for name in ("__version__", "git_version")
    )
    assert full is not None
    assert commit is not None
    return PyTorch(kept / "torch", full[1], commit[1])


def old_libraries() -> list[str]:
    """Write the libraries of an older glibc, compile old_libraries.cpp, and return the linker's options."""
    folder = KEPT / f"glibc-{GLIBC}"
    old_glibc.write_all(folder, GLIBC)
    extra = folder / "old_libraries.o"
    run(*compiler(), "-std=c++17", "-O2", "-fPIC", "-c", ROOT / ".ci" / "old_libraries.cpp", "-o", extra)
    return [f"-L{folder}", "-Xlinker", "--no-as-needed", "-lpthread", "-ldl", "-lrt", str(extra)]


def build_from_sources(ldflags: list[str]) -> Path:
    """Build the source distribution, and a wheel from it. Return the wheel."""
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", DIST)
    (archive,) = DIST.glob("*.tar.gz")
    folder = KEPT / "sources"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():  # the objects in build/native are used again
        if old.name != "build":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for old in (folder / "build").glob("lib*"):  # a wheel would contain what was deleted from the sources
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory(dir=KEPT) as unpacked:
        with tarfile.open(archive) as packed:
            packed.extractall(unpacked, filter="data")
        (inner,) = Path(unpacked).iterdir()
        for item in inner.iterdir():
            item.rename(folder / item.name)
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(KEPT / "plain")]
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURES
    variables = {"LDFLAGS": shlex.join(ldflags), "TORCH_CUDA_ARCH_LIST": architectures}
    variables["PYTHONWARNINGS"] = "ignore"  # of setuptools, which wants `build`
    shutil.rmtree(KEPT / "plain", ignore_errors=True)
    subprocess.run(command, cwd=folder, env={**os.environ, **variables}, check=True)
    (wheel,) = (KEPT / "plain").iterdir()
    return wheel


def build_engine(pytorch: PyTorch, python: Python, ldflags: list[str]) -> Path:
    """Build an engine, unless an earlier run has built it from the same sources. Return its file."""
    digest = hashlib.sha256("\0".join([*ldflags, run(*compiler(), "--version")]).encode())
    used = [Path(ldflags[-1]), COMMANDS, *engine_command.sources(ROOT / "csrc")]
    for path in used:
        digest.update(path.read_bytes())
    name = engine_command.released_file_name(pytorch.version, pytorch.commit, python.soabi)
    folder = KEPT / "engines" / digest.hexdigest()[:16]
    target = folder / name
    if not target.exists():
        print(f"building the engine for PyTorch {pytorch.version} and {python.name}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        unit, made, linked = (target.with_suffix(suffix) for suffix in (".cpp", ".o", ".new"))
        engine_command.write_unit(ROOT / "csrc", unit)
        run(*engine_command.compilation(compiler(), pytorch.folder, python.headers, unit, made))
        # The libraries of any version will do: the linker only records their names.
        run(*engine_command.link(compiler(), Path(torch.__file__).parent, [made], linked, ldflags))
        linked.rename(target)
    return target


def check_no_newer_symbols(library: Path) -> None:
    """Raise SystemExit if a library uses a function of glibc that `old_glibc` has left out."""
    listed = run("nm", "--dynamic", "--undefined-only", library)
    undefined = set(re.findall(r" U ([^@\s]+)$", listed, re.MULTILINE))
    known = {name for each in old_glibc.LIBRARIES for name in old_glibc.symbols(old_glibc.find(each), "99.0")}
    if undefined & known:
        names = ", ".join(sorted(undefined & known))
        raise SystemExit(f"{library} needs a glibc newer than {GLIBC} for: {names}")


def add_engines(wheel: Path, engines: list[Path]) -> Path:
    """Replace the engine in a wheel, check the libraries, and write a wheel with the new tag to dist/."""
    folder = KEPT / "unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "wheel", "unpack", wheel, "--dest", folder)
    (unpacked,) = folder.iterdir()
    for engine in (unpacked / "fusedacc").glob("_autograd*.so"):
        engine.unlink()
    for engine in engines:
        shutil.copy(engine, unpacked / "fusedacc")
    for library in (unpacked / "fusedacc").glob("*.so"):
        check_no_newer_symbols(library)
    wheel.unlink()
    run(sys.executable, "-m", "wheel", "pack", unpacked, "--dest-dir", wheel.parent)
    (packed,) = wheel.parent.glob("*.whl")
    excluded = [word for name in PYTORCH for word in ("--exclude", name)]
    run("auditwheel", "repair", "--plat", PLATFORM, "--only-plat", *excluded, "--wheel-dir", DIST, packed)
    (released,) = DIST.glob("*.whl")
    return released


def cuda_architectures(wheel: Path) -> str:
    """Return the architectures of a wheel's CUDA kernels; empty without CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        library = zipfile.ZipFile(wheel).extract("fusedacc/libfusedacc.so", folder)
        torch.ops.load_library(library)
    return str(json.loads(torch.ops.fusedacc.build_info())["cuda_architectures"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", default="", help="more versions of PyTorch, or all")
    everywhere = "python3.10 python3.11 python3.12 python3.13 python3.14"
    parser.add_argument(
        "--pythons", default=everywhere, help=f"commands; those missing are left out: {everywhere}"
    )
    options = parser.parse_args()
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    ldflags = old_libraries()
    wheel = build_from_sources(ldflags)
    versions = versions_on_the_index() if options.engines == "all" else options.engines.split()
    installed = torch.__version__.partition("+")[0]
    each_python = pythons([sys.executable, *options.pythons.split()])
    pairs = []
    for version in dict.fromkeys([installed, *versions]):
        try:
            pytorch = headers_of(version)
        except SystemExit as error:  # pip refuses it, for example because of a constraint
            if options.engines != "all":
                raise
            print(f"NO engine for PyTorch {version}, because pip cannot download it: {error}", flush=True)
            continue
        pairs += [(pytorch, python) for python in each_python]
    with concurrent.futures.ThreadPoolExecutor(
        int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    ) as pool:
        engines = [*pool.map(lambda pair: build_engine(*pair, ldflags), pairs)]
    released = add_engines(wheel, engines)
    size = released.stat().st_size / 2**20
    print(f"{released.name}, {size:.1f} MiB, has {len(engines)} engines:")
    print(*(f"  {engine.name}" for engine in engines), sep="\n")
    architectures = cuda_architectures(released)
    if architectures:
        print(f"It has CUDA kernels for {architectures}.")
    else:
        print("It has NO CUDA kernels, because nvcc was not found or FORCE_CUDA=0.")


if __name__ == "__main__":
    main()
