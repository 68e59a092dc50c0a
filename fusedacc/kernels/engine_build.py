"""Builds the native engine once, when it is first needed and the package has none for this torch and Python.

The engine is kept in the cache folder, under a name with the versions of torch and Python and a hash of all
that it is made of. If the compiler refuses the sources, that is remembered there too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from . import cache_folder, engine_command, installation
from .checks import switch

#: "0": build no engine; "1": build it, also if an earlier build has failed; "" or not set: build it once.
VARIABLE = "FUSEDACC_BUILD"
#: The folder in the cache folder.
FOLDER = "engine"
#: What a build takes on one core, in words.
DURATION = "about 45 s"
_ANOTHER_FOLDER = f"Set {cache_folder.VARIABLE} to a folder that you can write to"
#: In a compiler's output: the system, and not the sources, made it fail.
_OF_THE_SYSTEM = ("Killed signal", "No space left", "Cannot allocate memory", "out of memory")


def sources() -> Path | None:
    """Return the folder of the C++ sources: of the installed package, or of the checkout that it is in."""
    folders = installation.FOLDER / "csrc", installation.FOLDER.parent / "csrc"
    return next((folder for folder in folders if (folder / "autograd").is_dir()), None)


def wanted() -> bool | None:
    """Return the choice of `FUSEDACC_BUILD`. Raises ValueError for an unknown value."""
    return switch(
        VARIABLE,
        on="build the native engine if it is missing, also if an earlier build has failed",
        off="do not build it",
        unset="build it once",
    )


@functools.cache
def cached_file() -> Path | None:
    """Return the engine's file in the cache folder, which may not exist; None without sources or a home."""
    folder = sources()
    if folder is None:
        return None
    # With another libc the engine may not load.
    facts = [str(torch.version.git_version), *platform.libc_ver()]
    digest = hashlib.sha256("\0".join(facts).encode())
    for path in (Path(engine_command.__file__), *engine_command.sources(folder)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    name = Path(engine_command.file_name(torch.__version__))
    try:
        return cache_folder.folder() / FOLDER / f"{name.stem}.{digest.hexdigest()[:16]}.so"
    except RuntimeError:  # no home
        return None


def build() -> str | None:
    """Build `cached_file()`, or wait until another process has built it.

    Does not raise if the build fails: it warns, and leaves a note for other processes.

    Returns:
        None if the file exists now, else why it does not and how to get it.
    """
    problem = _obstacle()
    if problem is not None:
        return problem
    compiler, folder, file = engine_command.find_compiler(), sources(), cached_file()
    assert compiler is not None
    assert folder is not None
    assert file is not None
    began = time.time()
    with cache_folder.locked(f"{FOLDER}/{file.stem}", when_waiting=_say_waiting):
        if file.exists():
            return None
        note = _Note(file, compiler)
        problem = note.read(began)
        if problem is None:
            failure = _compile(compiler, folder, file)
            if failure is None:
                return None
            again = f"Set {VARIABLE}=1 to try again" if failure.would_repeat else "The next run tries again"
            problem = f"{failure.problem}. {again}"
            note.write(problem, failure.would_repeat)
            lost = "fusedacc runs without its native engine, and saves nothing"
            warnings.warn(f"{lost}: {problem}", stacklevel=2)
        return problem


def _obstacle() -> str | None:
    """Return why the engine cannot be built here, and what to do about it; None if it can."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if wanted() is False:
        return f"{VARIABLE}=0 prevents building it"
    if sources() is None:
        return f"its sources are not in {installation.FOLDER}. To build it, {installation.how_to_build()}"
    if engine_command.find_compiler() is None:
        named = os.environ.get("CXX")
        missing = f"CXX={named} was not found" if named else "no C++ compiler was found"
        return (
            f"{missing}, so it cannot be built. Install g++ 10 or newer (Debian, Ubuntu: apt-get install "
            "g++). The next run builds the engine"
        )
    headers = engine_command.python_headers()
    if not (headers / "Python.h").exists():
        return (
            f"Python.h is not in {headers}, so it cannot be built. Install Python's headers "
            f"(Debian, Ubuntu: apt-get install {python}-dev). The next run builds the engine"
        )
    file = cached_file()
    if file is None:
        return f"there is no home folder to build it in. {_ANOTHER_FOLDER}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"it cannot be built in {file.parent}: {error}. {_ANOTHER_FOLDER}"
    if not os.access(file.parent, os.W_OK | os.X_OK):
        return f"it cannot be built in {file.parent}, which is not writable. {_ANOTHER_FOLDER}"
    return None


@dataclass(frozen=True)
class _Failure:
    """Why a build failed, and whether the same compiler would fail again."""

    problem: str
    would_repeat: bool


class _Note:
    """Remembers that a compiler has failed to build the engine.

    Args:
        file: the engine's file.
        compiler: its command.
    """

    def __init__(self, file: Path, compiler: list[str]) -> None:
        self._file = file.with_suffix(".failed")
        program = Path(shutil.which(compiler[0]) or compiler[0]).resolve()
        #: Another compiler may succeed. A new version of it has another modification time.
        self._compiler = f"{' '.join(compiler)} {program} {program.stat().st_mtime_ns}"

    def read(self, began: float) -> str | None:
        """Return why the build failed with this compiler. None: it did not, or is to be tried again.

        began: when this process began to wait for others. What has failed since then it does not try again.
        """
        try:
            is_new = self._file.stat().st_mtime >= began
            compiler, would_repeat, problem = self._file.read_text().split("\n", 2)
        except (OSError, ValueError):
            return None
        holds = is_new or (would_repeat == "True" and not wanted())
        return problem if holds and compiler == self._compiler else None

    def write(self, problem: str, would_repeat: bool) -> None:
        with contextlib.suppress(OSError):  # without the note, the next process tries it again
            self._file.write_text(f"{self._compiler}\n{would_repeat}\n{problem}")


def _say(text: str) -> None:
    print(f"fusedacc: {text}", file=sys.stderr, flush=True)


def _say_waiting() -> None:
    _say(f"waiting for another process that builds the native engine; this takes {DURATION}")


def _compile(compiler: list[str], folder: Path, file: Path) -> _Failure | None:
    """Build the engine. Return None, or why it failed, with the name of the log."""
    _say(
        f"building the native engine for torch {torch.__version__} and Python {platform.python_version()}; "
        f"this takes {DURATION}, once (set {VARIABLE}=0 to prevent it)"
    )
    package = Path(torch.__file__).parent
    log = file.with_suffix(".log")
    try:
        with tempfile.TemporaryDirectory(dir=file.parent) as temporary, log.open("w") as said:
            unit, made, engine = (Path(temporary) / name for name in ("engine.cpp", "engine.o", "engine.so"))
            engine_command.write_unit(folder, unit)
            for command in (
                engine_command.compilation(compiler, package, engine_command.python_headers(), unit, made),
                engine_command.link(compiler, package, [made], engine),
            ):
                print(*command, file=said, flush=True)
                environment = {**os.environ, "LC_ALL": "C"}  # `_first_error` reads English messages
                subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, env=environment, check=True)
            os.replace(engine, file)
    except subprocess.CalledProcessError as error:
        output = log.read_text(errors="replace")
        problem = (
            f"{compiler[0]} failed to build it (exit status {error.returncode}{_first_error(output)}). "
            f"The whole output is in {log}. The engine needs g++ 10 or newer; CXX names another compiler"
        )
        was_stopped = error.returncode < 0 or any(words in output for words in _OF_THE_SYSTEM)
        return _Failure(problem, would_repeat=not was_stopped)
    except OSError as error:
        return _Failure(f"building it failed: {error}", would_repeat=False)
    return None


def _first_error(output: str) -> str:
    """Return the first error of a compiler's or linker's output, after a colon; empty if there is none."""
    found = re.search(r"^(?!collect2).*(error:|cannot find|undefined reference).*$", output, re.MULTILINE)
    return f": {found[0].strip()}" if found else ""
