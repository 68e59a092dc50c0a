"""The wheel's tag and contents, and an installation without a compiler."""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import forked
import pytest
import sweeps
import torch
from loops import TRAINS

from fusedacc.kernels import engine_command, installation, library, native_module

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ["setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]
PACKAGED += ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
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


def copy_sources(tmp_path: Path) -> Path:
    """Copy what a build needs, without compiled files, and return the folder of the copy."""
    source = tmp_path / "source"
    source.mkdir()
    for name in PACKAGED:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "csrc", source / "csrc")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "fusedacc", source / "fusedacc", ignore=ignored)
    return source


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
    source = copy_sources(tmp_path)
    if through_sdist:
        source = unpack_sdist(source, tmp_path / "unpacked")
    program = before + SETUP.format(str(source / "setup.py"))
    running = forked.start(program, "bdist_wheel", folder=source, FORCE_CUDA="0", **environment)
    result = running.wait(seconds=3600)  # `make test-full` compiles
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (source / "dist").iterdir()
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    return wheel, result.stdout + result.stderr


def run_installed(tmp_path: Path, program: str, installed: str = "installed", **variables: str | None) -> str:
    # The user's cache folder may have an engine.
    cache = str(tmp_path / "cache")
    variables |= {"FUSEDACC_CACHE": cache}
    result = forked.run(program, root=tmp_path / installed, folder=tmp_path, **variables)
    assert result.returncode == 0, result.stderr
    assert ("fusedacc" in result.stderr) == ("FUSEDACC_BUILD" in variables)  # a build says so
    return result.stdout.strip()


def assert_has_engine_sources(folder: Path) -> None:
    """Preprocess the engine's sources in a folder. A header that is missing there is an error."""
    unit = folder.parent / "engine.cpp"
    engine_command.write_unit(folder, unit)
    package, headers = Path(torch.__file__).parent, engine_command.python_headers()
    preprocessing = [COMPILER, "-MM"]
    command = engine_command.compilation(preprocessing, package, headers, unit, unit.with_suffix(".d"))
    subprocess.run(command, check=True)
    used = unit.with_suffix(".d").read_text()
    assert f"{folder}/autograd/engine.cpp" in used
    assert f"{folder}/autograd/../common/dtypes.h" in used


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
#: Makes empty files, but fails for the module of the native engine.
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
        assert f"none is installed for torch {torch.__version__}" in run_installed(tmp_path, TRAINS)
        assert_has_engine_sources(tmp_path / "installed" / "fusedacc" / "csrc")
        if sweeps.FULL:
            assert run_installed(tmp_path, TRAINS, FUSEDACC_BUILD=None) == "None"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(library.load_error() is not None, reason=str(library.load_error()))
def test_a_library_from_another_machine_is_copied(tmp_path: Path) -> None:
    ready = tmp_path / "ready.so"
    shutil.copy(library.LIBRARY, ready)
    compiler = fake_compiler(tmp_path, COPIES)
    _, said = build_wheel(tmp_path, CXX=compiler, FUSEDACC_LIBRARY=str(ready))
    assert (tmp_path / "installed/fusedacc/libfusedacc.so").read_bytes() == ready.read_bytes()
    compiled = re.findall(r"^fusedacc: \[(\d)/2\] (\S+)$", said, re.MULTILINE)
    assert compiled == [("1", "csrc/autograd"), ("2", native_module.file_name())]


def test_a_library_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    program = SETUP.format(str(ROOT / "setup.py"))
    compiler = fake_compiler(tmp_path, COPIES)
    result = forked.run(program, "build_ext", folder=tmp_path, CXX=compiler, FUSEDACC_LIBRARY="missing.so")
    assert result.returncode == 1
    assert "FUSEDACC_LIBRARY=missing.so: there is no such file" in result.stderr


#: Makes Python.h appear to be missing.
NO_HEADERS = """
import sysconfig
found = sysconfig.get_paths
sysconfig.get_paths = lambda *args, **kwargs: {**found(*args, **kwargs), "include": "/nowhere"}
"""


@pytest.mark.parametrize("missing", [False, True])
def test_an_installation_without_the_native_engine_says_so(tmp_path: Path, missing: bool) -> None:
    """Python.h is missing, or the compiler fails for the module."""
    compiler = fake_compiler(tmp_path, REFUSES_HOOKS)
    wheel, said = build_wheel(tmp_path, NO_HEADERS if missing else "", CXX=compiler)
    assert ("Python.h was not found" if missing else "the native engine was not built") in said
    assert "when it is first needed" in said.replace("\n", " ")
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
total = torch.zeros(3)
functional.scale_accumulate_([total], [torch.ones(3)], 0.5)
assert total.tolist() == [0.5, 0.5, 0.5]
print(library.load_error())
"""
    assert "installed without a C++ compiler" in run_installed(tmp_path, program)


#: Prints why native code is missing.
WHY_NOT = "from fusedacc.kernels import native_module; print(native_module.why_not())"


def describe_installation(package: Path, source: Path | None) -> None:
    """Write the files in which pip records that it has installed the package from a folder or an archive."""
    folder = package / "fusedacc-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: fusedacc\nVersion: 0.1.0\n")
    if source is not None:
        kind = {"dir_info": {}} if source.is_dir() else {"archive_info": {}}
        (folder / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), **kind}))


@pytest.mark.skipif(native_module.loaded() is None, reason="no native code")
@pytest.mark.parametrize("installed", ["checkout", "copy", "folder", "sdist"])
def test_what_a_message_tells_to_run_builds_what_is_missing(tmp_path: Path, installed: str) -> None:
    """The message fits how the package was installed. A copy of the package knows nothing of its sources."""
    checkout = package = copy_sources(tmp_path)
    if installed != "checkout":
        # Do not import pip: setuptools would no longer replace distutils in this process, as Inductor needs.
        if not any(importlib.metadata.distributions(name="pip")):
            pytest.skip("this case runs pip, and pip is not installed")
        package = tmp_path / "installed"
        shutil.copytree(checkout / "fusedacc", package / "fusedacc")
    if installed == "folder":
        describe_installation(package, checkout)
    elif installed == "sdist":
        unpack_sdist(checkout, tmp_path / "unpacked")
        describe_installation(package, *(checkout / "dist").iterdir())
    missing = run_installed(tmp_path, WHY_NOT, package.name)
    assert "libfusedacc.so does not exist" in missing
    where, said = missing.split(". Then run")[1].split(": ")
    assert where.strip() == {"checkout": f"in {checkout}", "copy": "in a checkout of fusedacc"}.get(
        installed, ""
    )
    words = shlex.split(said)
    words += ["--upgrade", "--target", package] if "pip" in words else []
    variables = {"CXX": fake_compiler(tmp_path, COPIES), "FORCE_CUDA": "0"}
    folder = checkout if where else tmp_path
    subprocess.run(words, cwd=folder, env={**os.environ, **variables}, check=True, capture_output=True)
    assert run_installed(tmp_path, WHY_NOT, package.name) == "None"


FROM_AN_INDEX = "--no-cache-dir --no-binary fusedacc fusedacc==0.1.0"


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        (None, FROM_AN_INDEX),
        ({"url": "file:///gone/dist/fusedacc-0.1.0-py3-none-any.whl", "archive_info": {}}, "in a checkout"),
        ({"url": "file:///gone/checkout", "dir_info": {}}, "in a checkout"),
        (
            {"url": "https://host/fusedacc.tar.gz", "archive_info": {}},
            "--no-cache-dir https://host/fusedacc.t",
        ),
        (
            {"url": "https://host/fusedacc.git", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}},
            "git+https://host/fusedacc.git@0123abc",
        ),
    ],
)
def test_messages_name_where_pip_got_the_package(tmp_path: Path, monkeypatch, origin, said: str) -> None:
    describe_installation(tmp_path, None)
    if origin is not None:
        (tmp_path / "fusedacc-0.1.0.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(installation, "FOLDER", tmp_path / "fusedacc")
    assert said in installation.how_to_build()
    assert (
        f"{sys.executable} -m pip install --no-build-isolation --no-deps --force-reinstall"
        in installation.how_to_build()
    )


#: A source whose object holds the names of everything that it was compiled with.
SOURCE = '#include <torch.h>\nextern "C" __attribute__((visibility("default"))) const char names[] = {};\n'
#: Runs `setup.py` as if under another version of Python.
OTHER_PYTHON = """
import platform, sysconfig
found = sysconfig.get_paths
sysconfig.get_paths = lambda *args, **kwargs: {{**found(*args, **kwargs), "include": {!r}}}
platform.python_version = lambda: {!r}
"""


def small_project(folder: Path) -> None:
    """Write a library and a module of one file each, and the libraries of torch that they are linked with."""
    shutil.copy(ROOT / "setup.py", folder)
    (folder / "fusedacc" / "kernels").mkdir(parents=True)
    shutil.copy(ROOT / "fusedacc/kernels/engine_command.py", folder / "fusedacc/kernels")
    module, libraries = folder / "csrc" / "autograd", folder / "site" / "torch" / "lib"
    for new in (
        module,
        libraries,
        folder / "site" / "torch" / "include",
        folder / "python",
    ):
        new.mkdir(parents=True)
    (folder / "csrc" / "library.cpp").write_text(SOURCE.format("TORCH COMPILER"))
    (module / "module.cpp").write_text("#include <Python.h>\n" + SOURCE.format("TORCH COMPILER PYTHON"))
    for name in ("torch", "torch_cpu", "torch_python", "c10"):
        command = [COMPILER, "-shared", "-x", "c++", os.devnull, "-o", libraries / f"lib{name}.so"]
        subprocess.run(command, check=True)


def build_small_project(folder: Path, torch: str, commit: str, python: str, compiler: str) -> str:
    """Replace torch, Python's headers and the compiler with these versions, and build. Return the output."""
    package, says = folder / "site" / "torch", f'[ "$*" = --version ] && echo {compiler} && exit'
    program = "import types\n__version__, version = {!r}, types.SimpleNamespace(git_version={!r})\n"
    (package / "__init__.py").write_text(program.format(torch, commit))
    (package / "include" / "torch.h").write_text(f'#define TORCH "torch {torch} {commit}, "\n')
    (folder / "python" / "Python.h").write_text(f'#define PYTHON "Python {python}"\n')
    script = f'{says}\nexec {COMPILER} \'-DCOMPILER="compiler {compiler}, "\' "$@"\n'
    variables = {"PYTHONPATH": str(folder / "site"), "CXX": fake_compiler(folder, script)}
    # Python would not notice that a module was replaced within a second.
    variables |= {"FORCE_CUDA": "0", "MAX_JOBS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    program = OTHER_PYTHON.format(str(folder / "python"), python) + SETUP.format(str(folder / "setup.py"))
    done = subprocess.run(
        [sys.executable, "-c", program, "build_ext", "--inplace"],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_after_an_upgrade_everything_is_compiled_again(tmp_path: Path) -> None:
    """Each upgrade replaces headers in their folder. No object may be of the headers before."""
    small_project(tmp_path)
    versions = dict.fromkeys(["torch", "commit", "python", "compiler"], "1")
    for upgraded in ("nothing yet", *versions):
        versions |= {upgraded: "2"} if upgraded in versions else {}
        said = build_small_project(tmp_path, **versions)
        assert "[1/4] csrc/autograd\n" in said  # the file that takes longest comes first
        names = "torch {torch} {commit}, compiler {compiler}, ".format(**versions)
        assert f"{names}\0".encode() in (tmp_path / "fusedacc" / library.LIBRARY.name).read_bytes(), upgraded
        (module,) = (tmp_path / "fusedacc").glob(f"_autograd.torch-{versions['torch']}.*")
        assert f"{names}Python {versions['python']}\0".encode() in module.read_bytes(), upgraded
    assert "[" not in build_small_project(tmp_path, **versions)  # without an upgrade nothing is compiled
