"""A file with the decisions of trials, for later processes: by processor, threads and versions.

It is in the folder `FUSEDACC_CACHE` (default: `fusedacc` in `XDG_CACHE_HOME` or `~/.cache`). If several
processes decide at once, all use the first decision that is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import json
import os
import platform
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from . import library
from .choices import Choice, Decision, better, decision_of

#: Environment variable that names the folder.
CACHE_DIR_ENV = "FUSEDACC_CACHE"
CACHE_FILE = "choices.json"
#: Variables of other libraries: their instructions, and how threads wait for work.
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "OMP_WAIT_POLICY")
_unsaved = ""


def machine() -> str:
    """Return what a decision depends on: processor, instruction sets, threads and versions."""
    onednn = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    set_by = [f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)]
    return _machine(torch.get_num_threads(), bool(onednn), *set_by)


@functools.cache
def _machine(threads: int, onednn: bool, *set_by: str) -> str:
    own = library.built_with()["cpu_capability"] if library.load_error() is None else "no library"
    parts = (
        processor(),
        f"fusedacc {version('fusedacc') or 'from its sources'}",
        f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
        f"kernels {own}",
        "oneDNN" if onednn else "no oneDNN",
        f"{threads} thread{'s' if threads > 1 else ''}",
        *set_by,
    )
    return "; ".join(parts)


@functools.cache
def processor() -> str:
    """Return its model, and a hash of its features, which virtual machines hide from the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    details = [facts.get(key, "") for key in ("cpu family", "model", "stepping", "flags", "Features")]
    return f"{name} ({zlib.crc32(' '.join(details).encode()):08x})"


def folder() -> Path:
    own = os.environ.get(CACHE_DIR_ENV)
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedacc"


def kept_where() -> str:
    """Return where decisions are kept, and why they are not, if so."""
    return f"{folder() / CACHE_FILE}{f' (not written: {_unsaved})' if _unsaved else ''}"


def is_saved() -> bool:
    """Return whether every decision of this process could be written."""
    return not _unsaved


@contextlib.contextmanager
def locked(file: str) -> Iterator[None]:
    """Context: hold the file's lock against other processes of this host, if it can be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError):  # read-only, or no home: no lock
            folder().mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(folder() / f"{file}.lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read(file: str) -> dict[str, dict[str, Any]]:
    """Return the file's entries by machine; empty if it does not exist or cannot be read."""
    try:
        found = json.loads((folder() / file).read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: entries for name, entries in found.items() if isinstance(entries, dict)}


def write(file: str, entries: Mapping[str, Any]) -> None:
    """Replace the file as a whole: readers see the old or the new one."""
    with tempfile.TemporaryDirectory(dir=folder()) as new:
        (Path(new) / file).write_text(json.dumps(entries, indent=1))
        os.replace(Path(new) / file, folder() / file)


def load(here: str, choice: Choice) -> Decision | None:
    """Return the file's decision for a machine, or None."""
    return decision_of(read(CACHE_FILE).get(here, {}).get(choice.name), choice)


def save(here: str, choice: Choice, decision: Decision) -> Decision:
    """Write a decision. Return the one that counts, which may be another process's."""
    global _unsaved
    try:
        with locked(CACHE_FILE):
            found = read(CACHE_FILE)
            known = decision_of(found.get(here, {}).get(choice.name), choice)
            if known is not None and better(known, decision) is known:
                return known
            entry = decision.as_entry()
            del entry["default"]
            found.setdefault(here, {})[choice.name] = entry
            write(CACHE_FILE, found)
    except (OSError, RuntimeError) as problem:  # read-only, full, no home: keep it for this process
        _unsaved = f"{type(problem).__name__}: {problem}"
    return decision


def version(package: str) -> str | None:
    """Return an installed package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
