"""The folder in which fusedacc keeps what later processes need.

It has results in JSON files with an entry for each machine, and engines that were built at first use.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

#: Environment variable that names the folder.
VARIABLE = "FUSEDACC_CACHE"


def folder() -> Path:
    """Return `FUSEDACC_CACHE`, or `fusedacc` in `XDG_CACHE_HOME` or `~/.cache`."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedacc"


@contextlib.contextmanager
def locked(file: str, when_waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Context: hold the file's lock against other processes of this host, if it can be locked.

    Args:
        file: its name in the folder, without a suffix for the lock.
        when_waiting: is called if another process has the lock, before this one waits.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError):  # read-only, or no home: no lock
            path = folder() / f"{file}.lock"
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path, "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if when_waiting is not None:
                    when_waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read(file: str) -> dict[str, dict[str, Any]]:
    """Return the file's entries by machine; empty if it does not exist or cannot be read."""
    try:
        entries = json.loads((folder() / file).read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home
        return {}
    if not isinstance(entries, dict):
        return {}
    return {machine: entry for machine, entry in entries.items() if isinstance(entry, dict)}


def write(file: str, entries: Mapping[str, Any]) -> None:
    """Replace the file as a whole: readers see the old or the new one. Raises OSError or RuntimeError."""
    with tempfile.TemporaryDirectory(dir=folder()) as new:
        (Path(new) / file).write_text(json.dumps(entries, indent=1))
        os.replace(Path(new) / file, folder() / file)
