"""Caches compiled test programs and other build results between test runs, by a hash of their inputs."""

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
#: The objects of setup.py's build with CUDA.
OBJECTS = ROOT / "build" / "native" / "cuda"


@functools.cache
def version_of(compiler: str) -> str:
    """Return the output of `compiler --version`."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def contents(*folders: Path) -> list[bytes]:
    """Return the names and contents of all source files in some folders of the project, in a fixed order."""
    paths = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    paths = [path for path in paths if path.parent.name != "__pycache__"]
    return [part for path in paths for part in (str(path.relative_to(ROOT)).encode(), path.read_bytes())]


def cached(kind: str, made_from: Iterable[str | bytes], make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has filled, in this run or in an earlier run with the same inputs.

    If several processes ask at the same time, one of them calls `make` and the others wait. If `make` raises,
    the cache keeps nothing.

    Args:
        kind: a readable part of the folder's name.
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


def built(source: Path, headers: Iterable[Path]) -> Path | None:
    """Return the object that `make build-cuda` made of a source of csrc/, or None if it is out of date."""
    name = source.relative_to(ROOT / "csrc").as_posix().replace("/", "_")
    target, stamp = OBJECTS / f"{name}.o", OBJECTS / f"{name}.o.stamp"
    if not stamp.exists():  # setup.py writes the stamp when the object is complete
        return None
    newest = max(path.stat().st_mtime for path in [source, ROOT / "setup.py", *headers])
    return target if target.stat().st_mtime > newest else None
