"""Keeps compiled test programs and the like between runs of the tests, by a hash of their inputs."""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "test-cache"


@functools.cache
def version_of(compiler: str) -> str:
    """What `compiler --version` prints."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def contents(*folders: Path) -> list[bytes]:
    """The names and contents of all source files below some folders of the project, in a fixed order."""
    paths = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    paths = [path for path in paths if path.parent.name != "__pycache__"]
    return [part for path in paths for part in (str(path.relative_to(ROOT)).encode(), path.read_bytes())]


def cached(kind: str, made_from: Iterable[str | bytes], make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has filled, in this run or in a former one from the same inputs.

    Processes that ask at the same time wait for the first one. If `make` raises, nothing is kept.

    Args:
        kind: a name for the folder, for people.
        made_from: everything that the result depends on: sources, flags, versions.
        make: fills the empty folder that it is given.
    """
    digest = hashlib.sha256()
    for part in made_from:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    folder = CACHE / f"{kind}-{digest.hexdigest()[:20]}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new = Path(tempfile.mkdtemp(dir=CACHE, prefix=f"{kind}-new-"))
            try:
                make(new)
                os.replace(new, folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)
    return folder
