"""How a release is built: for an older glibc than that of the machine, and with several engines."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import build_wheel
import old_glibc
import pytest

needs_tools = pytest.mark.skipif(
    not all(map(shutil.which, ("g++", "nm", "readelf"))) or not os.confstr("CS_GNU_LIBC_VERSION"),
    reason="needs g++, binutils and glibc",
)
#: In glibc 2.34 these functions came into libc, with new versions.
PROGRAM = """
#include <dlfcn.h>
#include <pthread.h>
#include <cmath>
static void* body(void* place) {
  double* value = static_cast<double*>(place);
  *value = std::pow(*value, 2);
  return nullptr;
}
extern "C" double square(double value) {
  pthread_t thread;
  if (dlopen(nullptr, RTLD_NOW) == nullptr || pthread_create(&thread, nullptr, body, &value)) return 0;
  pthread_join(thread, nullptr);
  return value;
}
"""
#: This variable came with glibc 2.32.
NEWER = '#include <sys/single_threaded.h>\nextern "C" bool single() { return __libc_single_threaded; }\n'


def link(folder: Path, program: str) -> Path:
    """Compile a library, and link it against the libraries of glibc 2.28."""
    old_glibc.write_all(folder / "glibc", "2.28")
    (folder / "program.cpp").write_text(program)
    command = ["g++", "-O2", "-fPIC", "-shared", "program.cpp", f"-L{folder / 'glibc'}", "-o", "program.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "program.so"


@needs_tools
def test_a_library_for_an_older_glibc_names_no_newer_version_and_runs(tmp_path: Path) -> None:
    library = link(tmp_path, PROGRAM)
    listed = subprocess.run(["readelf", "-V", library], capture_output=True, text=True, check=True).stdout
    needed = {tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([\d.]+)", listed)}
    assert needed
    assert max(needed) <= (2, 28)
    square = ctypes.CDLL(str(library)).square
    square.argtypes, square.restype = [ctypes.c_double], ctypes.c_double
    assert square(3.0) == 9.0
    build_wheel.check_no_newer_symbols(library)


@needs_tools
def test_what_only_a_newer_glibc_has_is_an_error(tmp_path: Path) -> None:
    if not Path("/usr/include/x86_64-linux-gnu/sys/single_threaded.h").exists():
        pytest.skip("this glibc is older than 2.32, so it has no symbol __libc_single_threaded to find")
    with pytest.raises(SystemExit, match=r"needs a glibc newer than 2\.28 for: __libc_single_threaded"):
        build_wheel.check_no_newer_symbols(link(tmp_path, NEWER))


def test_an_engine_is_built_for_each_python_with_headers_once(tmp_path: Path, capsys) -> None:
    headless = tmp_path / "headless"
    headless.write_text('#!/bin/sh\necho "cpython-399-x86_64-linux-gnu /nowhere"\n')
    headless.chmod(0o755)
    found = build_wheel.pythons([sys.executable, sys.executable, "no-such-python", str(headless)])
    assert [python.name for python in found] == [sys.executable]
    assert "headless: no engine, because Python.h is not in /nowhere" in capsys.readouterr().out
