"""Builds fusedacc for aarch64 and tries it on an emulated CPU.

    python .ci/try_aarch64.py

Needs `apt-get` and Debian's packages g++-aarch64-linux-gnu and qemu-user-static. Installs nothing: Debian's
Python and libraries for arm64 are unpacked into build/aarch64, and pip puts PyTorch beside them. This is the
oldest PyTorch that fusedacc supports, because its wheel for aarch64 has no CUDA.

The emulated Python runs setup.py, which calls the cross compiler at full speed. Then it runs `info`,
`try_wheel.py`, and the tests of the kernels and of the engine. All of it takes about 15 minutes. The emulator orders
memory accesses as an x86 CPU does, so it cannot find a missing barrier.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from try_versions import oldest_torch

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "aarch64"
#: Unpacked packages of Debian, and those of the package index. `try_wheel.py` looks for this name.
SYSTEM, SITE = FOLDER / "system", FOLDER / "site-packages"
#: A copy of the repository, which is built.
CHECKOUT = FOLDER / "checkout"
COMPILER = "aarch64-linux-gnu-g++"
DEBIAN = ("python3", "libpython3-dev", "libstdc++6", "libgomp1")
#: What PyTorch imports, and what the tests need.
PACKAGES = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")
PACKAGES += ("numpy", "pytest", "expecttest")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux2014_aarch64")
TESTS = (
    "tests/kernels/test_native_ops.py",
    "tests/kernels/test_rows.py",
    "tests/kernels/test_matmul.py",
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
    for package in (apt / "cache" / "archives").glob("*.deb"):
        run("dpkg-deb", "--extract", package, SYSTEM)
    shutil.rmtree(apt)


def python() -> Path:
    """Return the emulated Python, with its version in its name."""
    return (SYSTEM / "usr" / "bin" / "python3").resolve()


def install_packages() -> None:
    version = python().name.removeprefix("python")
    options = ["--quiet", "--target", SITE, "--only-binary=:all:", "--python-version", version]
    options += [word for name in PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "install", *options]
    run(*pip, "--no-deps", oldest_torch())
    run(*pip, *PACKAGES)


def emulate(emulator: str, *arguments: str | Path, **variables: str) -> None:
    """Run the emulated Python."""
    run(emulator, "-L", SYSTEM, python(), *arguments, PYTHONPATH=str(SITE), **variables)


def main() -> None:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None or shutil.which(COMPILER) is None:
        raise SystemExit("install g++-aarch64-linux-gnu and qemu-user-static")
    shutil.rmtree(CHECKOUT, ignore_errors=True)
    tracked = ("git", "ls-files", "-z")
    listed = subprocess.run(tracked, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        (CHECKOUT / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, CHECKOUT / name)
    if not SYSTEM.exists():
        install_system()
    if not SITE.exists():
        install_packages()
    headers = str(SYSTEM / "usr" / "include")  # pyconfig.h is in a folder of this one
    build = ("setup.py", "--quiet", "build_ext", "--inplace")
    emulate(emulator, *build, CXX=COMPILER, FORCE_CUDA="0", CPLUS_INCLUDE_PATH=headers)
    shutil.rmtree(SITE / "fusedacc", ignore_errors=True)
    shutil.move(CHECKOUT / "fusedacc", SITE / "fusedacc")
    emulate(emulator, "-m", "fusedacc", "info")
    emulate(emulator, ".ci/try_wheel.py")
    emulate(emulator, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)


if __name__ == "__main__":
    main()
