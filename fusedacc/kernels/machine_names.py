"""Names of the processor and of installed packages, for reports and for results that are kept."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import zlib
from pathlib import Path


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


def version(package: str) -> str | None:
    """Return an installed package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
