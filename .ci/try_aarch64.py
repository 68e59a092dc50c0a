"""Builds fusedacc for aarch64 and tries it on an emulated CPU.

    make test-aarch64

Needs `apt-get` and Debian's packages g++-aarch64-linux-gnu and qemu-user-static. Installs nothing: Debian's
Python and libraries for arm64 are unpacked into build/aarch64, and pip puts PyTorch beside them. This is the
oldest PyTorch that fusedacc supports, because its wheel for aarch64 has no CUDA. Later runs use them again.

The emulated Python runs setup.py, which calls the cross compiler at full speed. Then it runs `info`,
`try_wheel.py`, and tests of the kernels and of the engine. The emulator orders memory accesses as an x86 CPU
does, so it cannot find a missing barrier.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from try_versions import copy_tracked, oldest_torch

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "aarch64"
#: Unpacked packages of Debian, and those of the package index. `try_wheel.py` looks for this name.
SYSTEM, SITE = FOLDER / "system", FOLDER / "site-packages"
#: A copy of the repository, which is built.
CHECKOUT = FOLDER / "checkout"
#: A script that runs the emulated Python.
PYTHON = FOLDER / "python"
COMPILER = "aarch64-linux-gnu-g++"
DEBIAN = ("python3", "libpython3-dev", "libstdc++6", "libgomp1")
#: What PyTorch imports, and what the tests need.
PACKAGES = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")
PACKAGES += ("numpy", "pytest", "expecttest")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux2014_aarch64")
TESTS = (
    "tests/kernels/test_native_ops.py",
    "tests/kernels/test_rows.py",
    "tests/autograd/test_engine.py",
    "tests/nn/test_native_functions.py",
)


def run(*command: str | Path, **variables: str) -> None:
    """Run a command in the copy of the repository. Raises SystemExit if it fails."""
    words = [*map(str, command)]
    done = subprocess.run(words, cwd=CHECKOUT, env={**os.environ, **variables})
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode}: {' '.join(words)}")


def install_system() -> None:
    """Download Debian's packages for arm64 with what they depend on, and unpack them."""
    apt = FOLDER / "apt"
    shutil.rmtree(apt, ignore_errors=True)
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True)
    status = apt / "status"
    status.touch()  # nothing is installed, so apt downloads everything
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "Dir::State": apt / "state",
        "Dir::State::status": status,
        "Dir::Cache": apt / "cache",
    }
    words = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    run(*words, "update")
    run(*words, "--download-only", "--yes", "install", *DEBIAN)
    unfinished = SYSTEM.with_suffix(".new")
    for package in (apt / "cache" / "archives").glob("*.deb"):
        run("dpkg-deb", "--extract", package, unfinished)
    unfinished.rename(SYSTEM)
    shutil.rmtree(apt)


def real_python() -> Path:
    """Return the Python to emulate, with its version in its name."""
    return (SYSTEM / "usr" / "bin" / "python3").resolve()


def write_script(emulator: str) -> None:
    """Write the script, and let Python start other processes with it."""
    command = shlex.join([emulator, "-L", str(SYSTEM), str(real_python())])
    PYTHON.write_text(f'#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(SITE))}\nexec {command} "$@"\n')
    PYTHON.chmod(0o755)
    (SITE / "sitecustomize.py").write_text(f"import sys\n\nsys.executable = {str(PYTHON)!r}\n")


def install_packages() -> None:
    version = real_python().name.removeprefix("python")
    unfinished = SITE.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    options = ["--quiet", "--target", unfinished, "--only-binary=:all:", "--python-version", version]
    options += [word for name in PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "install", *options]
    run(*pip, "--no-deps", oldest_torch())
    run(*pip, *PACKAGES)
    unfinished.rename(SITE)


def main() -> None:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None or shutil.which(COMPILER) is None:
        raise SystemExit("install g++-aarch64-linux-gnu and qemu-user-static")
    shutil.rmtree(CHECKOUT, ignore_errors=True)
    copy_tracked(CHECKOUT)
    if not SYSTEM.exists():
        install_system()
    if not SITE.exists():
        install_packages()
    write_script(emulator)
    headers = str(SYSTEM / "usr" / "include")  # pyconfig.h is in a folder of this one
    build = ("setup.py", "--quiet", "build_ext", "--inplace")
    run(PYTHON, *build, CXX=COMPILER, FORCE_CUDA="0", CPLUS_INCLUDE_PATH=headers)
    shutil.rmtree(SITE / "fusedacc", ignore_errors=True)
    shutil.move(CHECKOUT / "fusedacc", SITE / "fusedacc")
    built = {"FUSEDACC_ENGINE": "1", "FUSEDACC_BUILD": "0", "FUSEDACC_BACKEND": "cpu"}
    built["FUSEDACC_CACHE"] = str(FOLDER / "cache")
    run(PYTHON, "-m", "fusedacc", "info", **built)
    run(PYTHON, ".ci/try_wheel.py", **built)
    run(PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)


if __name__ == "__main__":
    main()
