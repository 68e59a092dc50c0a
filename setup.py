"""Builds the package with fusedacc/libfusedacc.so, a shared library that uses the LibTorch stable ABI.

It also builds a Python module from csrc/autograd/, the engine that adds gradients. PyTorch's autograd has no
stable ABI, so the module works with only one version of torch and of Python. Its file name contains both
versions. The package also gets the module's sources, and builds the module for other versions when it is
first needed.

The build needs no GPU and no network.

Environment:
    CXX: the C++ compiler.
    FORCE_CUDA: 1 fails without nvcc, 0 builds without CUDA. Default: build with CUDA if nvcc is found.
    CUDACXX: the path of nvcc.
    CUDA_HOME: the CUDA toolkit, which contains nvcc.
    TORCH_CUDA_ARCH_LIST: the architectures to build for. Default: "8.0;9.0;10.0+PTX".
    FUSEDACC_LIBRARY: a libfusedacc.so that was built from the same sources on another machine. It is copied
        instead of compiled, so that only the module is compiled, without nvcc.
    LDFLAGS: options for the linker.
    MAX_JOBS: the number of parallel compilations. Default: the number of CPUs.
    VERBOSE: 1 prints the commands.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1, the command was in the package `wheel`
    try:
        from wheel.bdist_wheel import bdist_wheel
    except ImportError:
        bdist_wheel = None

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "csrc"
OBJECTS = ROOT / "build" / "native"
NAME = "libfusedacc.so"
MODULE = "autograd"
DEFAULT_ARCHITECTURES = ("8.0", "9.0", "10.0")
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # torch 2.10

# -ffp-contract=off: fuse a multiplication and an addition only where the source says so, so that results are
# the same on every machine. -fno-trapping-math: the code never checks floating-point exceptions, and without
# this flag compilers do not vectorize selects.
EXACT = ["-ffp-contract=off", "-fno-trapping-math"]
VECTOR_FLAGS = {
    "cpu/loops_avx2.cpp": ["-mavx2", "-mfma"],
    "cpu/loops_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
}
VECTOR_FLAGS["cpu/loops_avx512_bf16.cpp"] = [*VECTOR_FLAGS["cpu/loops_avx512.cpp"], "-mavx512bf16"]


#: The commands that compile the native engine. They are loaded by path, because the package needs torch.
engine_command = SimpleNamespace(**runpy.run_path(str(ROOT / "fusedacc" / "kernels" / "engine_command.py")))


def find_nvcc() -> str | None:
    """Return nvcc's path, or None to build without CUDA.

    Raises:
        SystemExit: `FORCE_CUDA` has an unknown value, or is 1 and nvcc was not found.
    """
    choice = os.environ.get("FORCE_CUDA", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"FORCE_CUDA={choice}: allowed are 0 (no CUDA) and 1 (fail without nvcc)")
    if choice == "0":
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [
        os.environ.get("CUDACXX"),
        *(f"{home}/bin/nvcc" for home in homes if home),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
    ]
    found = next((path for path in candidates if path and shutil.which(path)), None)
    if found is None and choice == "1":
        raise SystemExit("FORCE_CUDA=1 but nvcc was not found: set CUDA_HOME or CUDACXX, or put nvcc on PATH")
    return found


def version_of(compiler: list[str]) -> str:
    """Return the output of `compiler --version`."""
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout


def default_architectures(nvcc: str) -> str:
    """Return the default architectures that this nvcc supports, and PTX for newer architectures."""
    listed = subprocess.run(
        [nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True
    ).stdout.split()
    known = [name for name in DEFAULT_ARCHITECTURES if f"compute_{name.replace('.', '')}" in listed]
    return ";".join(known) + "+PTX"


def architecture_flags(architectures: str) -> list[str]:
    """Return nvcc's flags for a list of architectures such as `8.0;9.0+PTX`."""
    flags = []
    for entry in re.split(r"[;, ]+", architectures.strip()):
        match = re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", entry)
        if match is None:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST={architectures!r}: {entry!r} is not like 9.0 or 9.0+PTX")
        number = match[1] + match[2]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


class Toolchain:
    """Runs the commands that compile and link.

    It builds a file again only if the command, an input, any header, or the version of a compiler, of PyTorch
    or of Python has changed.

    Args:
        cxx: the command of the C++ compiler.
        nvcc: the path of nvcc, or None to build without CUDA.
    """

    def __init__(self, cxx: list[str], nvcc: str | None) -> None:
        # Builds with and without CUDA use separate folders, so that switching between them compiles nothing.
        self.objects = OBJECTS / ("cuda" if nvcc else "cpu")
        self.objects.mkdir(parents=True, exist_ok=True)
        #: Files that were begun, and all of them, for the lines of progress.
        self.started = 0
        self.steps = 0
        self._lock = threading.Lock()
        # Imported here, because an install without a compiler must also work without torch.
        import torch

        self.torch = Path(torch.__file__).parent
        self.nvcc = nvcc
        self.plain = cxx
        self.link_options = shlex.split(os.environ.get("LDFLAGS", ""))
        common = ["-std=c++17", "-O3", STABLE_ABI, f'-DFUSEDACC_TORCH_VERSION="{torch.__version__}"']
        if nvcc is not None:
            architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or default_architectures(nvcc)
            common += ["-DFUSEDACC_CUDA", f'-DFUSEDACC_CUDA_ARCHITECTURES="{architectures}"']
        warnings = engine_command.WARNINGS
        host = ["-fPIC", "-fvisibility=hidden", *EXACT]
        include = ["-isystem", str(self.torch / "include")]
        self.cxx = [*cxx, *common, *warnings, *host, *include]
        if nvcc is None:
            self.linker = [*cxx, "-shared"]
        else:
            launchers = ("ccache", "sccache")
            compiler = ["-ccbin", next(part for part in cxx if Path(part).name not in launchers)]
            options = ["-Xcompiler", ",".join([*warnings, *host]), "-fmad=false"]
            self.cuda = [nvcc, *common, *compiler, *options, *architecture_flags(architectures)]
            self.linker = [nvcc, *compiler, "-shared", "-cudart", "static"]
            self.linker += ["-Xlinker", "--exclude-libs=ALL"]
        headers = sorted(path for path in SOURCES.rglob("*") if path.suffix in (".h", ".cuh"))
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in headers))
        # An upgrade replaces these in their folders, so that the commands stay the same.
        versions = [torch.__version__, str(torch.version.git_version), platform.python_version()]
        versions += map(version_of, [cxx, [nvcc]] if nvcc else [cxx])
        digest.update("\0".join(versions).encode())
        self.common = digest.hexdigest()

    def sources(self) -> list[Path]:
        suffixes = [".cpp", ".cu"] if self.nvcc else [".cpp"]
        found = sorted(path for path in SOURCES.rglob("*") if path.suffix in suffixes)
        found.sort(key=lambda path: path.suffix != ".cu")  # nvcc takes longer than g++
        found = [path for path in found if path.parent.name != MODULE]
        if self.nvcc is None:
            found = [path for path in found if "cuda" not in path.relative_to(SOURCES).parts]
        if platform.machine().lower() not in ("x86_64", "amd64"):
            found = [path for path in found if path.relative_to(SOURCES).as_posix() not in VECTOR_FLAGS]
        return found

    def compile(self, source: Path) -> Path:
        relative = source.relative_to(SOURCES).as_posix()
        target = self.objects / f"{relative.replace('/', '_')}.o"
        command = self.cuda if source.suffix == ".cu" else self.cxx + VECTOR_FLAGS.get(relative, [])
        name = source.relative_to(ROOT).as_posix()
        self.run([*command, "-c", str(source), "-o", str(target)], target, [source], name)
        return target

    def compile_module(self, folder: Path) -> Path:
        """Compile all sources of the native engine as one file."""
        unit = self.objects / f"{folder.name}.cpp"
        target = self.objects / f"{folder.name}.o"
        engine_command.write_unit(SOURCES, unit)
        command = engine_command.compilation(
            self.plain, self.torch, engine_command.python_headers(), unit, target
        )
        self.run(command, target, sorted(folder.glob("*.cpp")), folder.relative_to(ROOT).as_posix())
        return target

    def link(self, objects: list[Path], target: Path) -> None:
        # If torch has libtorch_cuda.so, libtorch.so loads it. Its symbols are weak in this library, so they
        # are null if torch has no CUDA.
        torch = ["-L", str(self.torch / "lib"), "-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu"]
        command = [*self.linker, *map(str, objects), *self.link_options, *torch, "-o", str(target)]
        self.run(command, target, objects, target.name)

    def link_module(self, objects: list[Path], target: Path) -> None:
        command = engine_command.link(self.plain, self.torch, objects, target, self.link_options)
        self.run(command, target, objects, target.name)

    def report(self, name: str, is_made: bool) -> None:
        """Count a file, and print a line if it must be compiled or linked."""
        with self._lock:
            self.started += 1
            if not is_made:
                print(f"fusedacc: [{self.started}/{self.steps}] {name}", flush=True)

    def run(self, command: list[str], target: Path, inputs: list[Path], name: str) -> None:
        digest = hashlib.sha256("\0".join([*command, self.common]).encode())
        for path in inputs:
            digest.update(path.read_bytes())
        stamp = self.objects / f"{target.name}.stamp"
        is_made = target.exists() and stamp.exists() and stamp.read_text() == digest.hexdigest()
        self.report(name, is_made)
        if is_made:
            return
        if os.environ.get("VERBOSE") == "1":
            print(shlex.join(command), flush=True)
        # Remove the stamp first, because an interrupted command may leave a partial output file.
        stamp.unlink(missing_ok=True)
        subprocess.run(command, check=True, cwd=ROOT)
        stamp.write_text(digest.hexdigest())


class BuildLibrary(build_ext):
    """Builds the library and the module with plain commands, because the library is not a Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        *package, name = fullname.split(".")
        return str(Path(*package, NAME if name == "libfusedacc" else module_name()))

    def build_extensions(self) -> None:
        """Compile the sources of all extensions in parallel, with one progress count, and link each."""
        self.ready = os.environ.get("FUSEDACC_LIBRARY")
        if self.ready and not Path(self.ready).is_file():
            raise SystemExit(f"FUSEDACC_LIBRARY={self.ready}: there is no such file")
        toolchain = self.toolchain = Toolchain(
            engine_command.find_compiler() or [], None if self.ready else find_nvcc()
        )
        sources = [] if self.ready else toolchain.sources()
        # The module is one file, which takes longest. It starts first, so that no core waits for it at the
        # end.
        tasks: dict[str, list[tuple[Callable[[Path], Path], Path]]] = {}
        for extension in reversed(self.extensions):
            if extension.name.endswith("libfusedacc"):
                tasks[extension.name] = [(toolchain.compile, source) for source in sources]
            else:
                tasks[extension.name] = [(toolchain.compile_module, SOURCES / MODULE)]
        # Each extension is also linked, unless a library was given.
        toolchain.steps = sum(len(compilations) + 1 for compilations in tasks.values())
        if self.ready:
            toolchain.steps -= 1
        pool = concurrent.futures.ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))
        try:
            self.compiled = {
                name: [pool.submit(compile_, source) for compile_, source in compilations]
                for name, compilations in tasks.items()
            }
            super().build_extensions()
        finally:
            # After a failure, cancel the remaining compilations.
            pool.shutdown(cancel_futures=True)

    def build_extension(self, extension: Extension) -> None:
        toolchain = self.toolchain
        is_library = extension.name.endswith("libfusedacc")
        target = Path(self.get_ext_fullpath(extension.name))
        built = toolchain.objects / target.name
        if not is_library:
            remove_modules(target.parent)
        try:
            objects = [compiling.result() for compiling in self.compiled[extension.name]]
            if is_library and self.ready:
                built = Path(self.ready)
            elif is_library:
                toolchain.link(objects, built)
            else:
                toolchain.link_module(objects, built)
        except subprocess.CalledProcessError as error:
            if not is_library:
                print(
                    f"fusedacc: the native engine was not built (exit status {error.returncode}). "
                    "fusedacc tries to build it when it is first needed",
                    file=sys.stderr,
                    flush=True,
                )
                return
            hint = "; FORCE_CUDA=0 builds without CUDA" if toolchain.nvcc else ""
            raise SystemExit(
                f"fusedacc: a build command failed (exit status {error.returncode}){hint}"
            ) from error
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replace the file instead of overwriting it: running processes may have the old library mapped.
        shutil.copyfile(built, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)
        kind = ""
        if is_library and self.ready:
            kind = f" from {built}"
        elif is_library:
            kind = " with CUDA" if toolchain.nvcc else " without CUDA"
        print(f"fusedacc: built {target}{kind}", flush=True)

    def copy_extensions_to_source(self) -> None:
        remove_modules(ROOT / "fusedacc")
        super().copy_extensions_to_source()


def remove_modules(folder: Path) -> None:
    """Delete the native engines of earlier builds, which may be for other versions and of older sources.

    The package builds what is missing then.
    """
    for module in folder.glob(f"_{MODULE}.torch-*.so"):
        module.unlink()


def module_name() -> str:
    """Return the file name of the native engine for the installed torch and this Python."""
    import torch

    return engine_command.file_name(torch.__version__)


class CopyEngineSources(build_py):
    """Copies the native engine's sources into the package, which builds it for other versions of torch."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the package finds them in the checkout
            return
        for source in engine_command.sources(SOURCES):
            target = Path(self.build_lib, "fusedacc", "csrc", source.relative_to(SOURCES))
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))


if engine_command.find_compiler() is None:
    wanted = os.environ.get("CXX", "g++, c++ or clang++")
    print(
        f"fusedacc: no C++ compiler ({wanted} not found): installing without the native library; "
        "fusedacc will use Triton and PyTorch operators instead",
        file=sys.stderr,
        flush=True,
    )
    extensions = []
else:
    extensions = [Extension("fusedacc.libfusedacc", sources=[])]
    if (engine_command.python_headers() / "Python.h").exists():
        extensions.append(Extension("fusedacc._autograd", sources=[], optional=True))
    else:
        print(
            f"fusedacc: Python.h was not found in {engine_command.python_headers()}: building without the "
            "native engine. With Python's headers, fusedacc builds it when it is first needed",
            file=sys.stderr,
            flush=True,
        )

commands = {"build_ext": BuildLibrary, "build_py": CopyEngineSources}
if bdist_wheel is not None:

    class AnyPythonWheel(bdist_wheel):
        """Tags a wheel for any Python, because the library does not use the CPython API."""

        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    commands["bdist_wheel"] = AnyPythonWheel

setup(ext_modules=extensions, cmdclass=commands)
