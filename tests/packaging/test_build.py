"""The wheel's tag and contents, and an installation without a compiler."""

import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import forked
import pytest
import sweeps
from loops import TRAINS

from fusedacc.kernels import library, native_module

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ["setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]
PACKAGED += ["CHANGELOG.md", "SECURITY.md"]
COMPILER = next((found for found in map(shutil.which, ("g++", "c++", "clang++")) if found), None)
#: Runs `setup.py` of a folder, as `python setup.py` does.
SETUP = "import runpy; runpy.run_path({!r}, run_name='__main__')"


def unpack_sdist(source: Path, folder: Path) -> Path:
    """Build a source distribution from `source`, unpack it in `folder` and return its folder."""
    result = forked.run(SETUP.format(str(source / "setup.py")), "sdist", folder=source)
    assert result.returncode == 0, result.stdout + result.stderr
    (archive,) = (source / "dist").iterdir()
    with tarfile.open(archive) as packed:
        # Python 3.11.4 and newer have the filter, and newer ones warn without it.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


def build_wheel(
    tmp_path: Path, before: str = "", through_sdist: bool = False, **environment: str
) -> tuple[Path, str]:
    """Build a wheel from a copy of the sources and unpack it.

    Args:
        tmp_path: the folder to build in.
        before: a program that runs before `setup.py`.
        through_sdist: build the wheel from the source distribution.
        **environment: variables of the build.

    Returns:
        The wheel and what the build printed.
    """
    source = tmp_path / "source"
    source.mkdir()
    for name in PACKAGED:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "csrc", source / "csrc")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "fusedacc", source / "fusedacc", ignore=ignored)
    if through_sdist:
        source = unpack_sdist(source, tmp_path / "unpacked")
    program = before + SETUP.format(str(source / "setup.py"))
    running = forked.start(program, "bdist_wheel", folder=source, FORCE_CUDA="0", **environment)
    result = running.wait(seconds=3600)  # `make test-full` compiles
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (source / "dist").iterdir()
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    return wheel, result.stdout + result.stderr


def run_installed(tmp_path: Path, program: str) -> str:
    result = forked.run(program, root=tmp_path / "installed", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "fusedacc" not in result.stderr
    return result.stdout.strip()


def fake_compiler(tmp_path: Path, script: str) -> str:
    """Write a shell script that acts as the compiler."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}")
    compiler.chmod(0o755)
    return str(compiler)


#: Makes empty object files, and copies the libraries that are built already instead of linking.
COPIES = f"""
while [ $# -gt 0 ]; do [ "$1" = -o ] && target="$2"; shift; done
case "$target" in
    *.so) cp "{library.LIBRARY.parent}/${{target##*/}}" "$target" ;;
    *) : > "$target" ;;
esac
"""
#: Makes empty files, but fails for the module of native hooks.
REFUSES_HOOKS = """
case "$*" in *autograd*) exit 1 ;; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
exit 0
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(library.load_error() is not None, reason=str(library.load_error()))
def test_the_wheel_fits_every_python_of_its_platform(tmp_path: Path) -> None:
    """`make test-full` compiles the sources again."""
    compiler = {} if sweeps.FULL else {"CXX": fake_compiler(tmp_path, COPIES)}
    wheel, said = build_wheel(tmp_path, through_sdist=True, **compiler)
    steps = re.findall(r"^fusedacc: \[(\d+)/(\d+)\] (\S+)$", said, re.MULTILINE)
    numbers, totals, names = zip(*steps, strict=True)
    assert [*map(int, numbers)] == [*range(1, len(steps) + 1)]
    assert set(totals) == {str(len(steps))}
    assert {"csrc/registration.cpp", "csrc/autograd", "libfusedacc.so"} <= set(names)
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == ("py3", "none")
    assert platform.startswith("linux_")
    program = "from fusedacc.kernels.library import built_with, load_error"
    program += "; print(load_error(), built_with()['cuda_architectures'])"
    architectures = [] if sweeps.FULL else library.built_with()["cuda_architectures"]
    assert run_installed(tmp_path, program) == f"None {architectures}"
    if native_module.module() is not None:
        native = tmp_path / "installed" / "fusedacc" / native_module.file_name()
        assert native.exists()
        assert run_installed(tmp_path, TRAINS) == "None"
        # A module that was built for another torch has another name and is not loaded.
        native.rename(native.with_name(native.name.replace("torch-", "torch-9.")))
        assert f"{native.name} does not exist" in run_installed(tmp_path, TRAINS)


#: Makes Python.h appear to be missing.
NO_HEADERS = """
import sysconfig
found = sysconfig.get_paths
sysconfig.get_paths = lambda *args, **kwargs: {**found(*args, **kwargs), "include": "/nowhere"}
"""


@pytest.mark.parametrize("missing", [False, True])
def test_an_installation_without_native_hooks_says_so(tmp_path: Path, missing: bool) -> None:
    """Python.h is missing, or the compiler fails for the module."""
    compiler = fake_compiler(tmp_path, REFUSES_HOOKS)
    wheel, said = build_wheel(tmp_path, NO_HEADERS if missing else "", CXX=compiler)
    assert ("Python.h was not found" if missing else "the module of native hooks was not built") in said
    assert "Python's own" in said
    names = zipfile.ZipFile(wheel).namelist()
    assert "fusedacc/libfusedacc.so" in names
    assert not any("_autograd" in name for name in names)


def test_an_installation_without_a_compiler_has_no_library_and_says_so(tmp_path: Path) -> None:
    wheel, said = build_wheel(tmp_path, CXX="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "no C++ compiler (no-such-compiler not found): installing without the native library" in said
    program = """
import torch
from fusedacc import functional
from fusedacc.kernels import library
assert "installed without a C++ compiler" in library.load_error()
total = torch.zeros(3)
functional.scale_accumulate_([total], [torch.ones(3)], 0.5)
print(total.tolist())
"""
    assert run_installed(tmp_path, program) == "[0.5, 0.5, 0.5]"
