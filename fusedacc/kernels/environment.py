"""Environment variables that are switches: "1", "0" or not set; and the versions of packages."""

from __future__ import annotations

import importlib.metadata
import os


def switch(variable: str, *, on: str, off: str, unset: str) -> bool | None:
    """Whether it is switched on, or off; None where it is not set, or empty.

    Args:
        variable: its name.
        on, off, unset: for the error, what "1" and "0" mean, and what it means not to set it.

    Raises:
        ValueError: it has another value.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        allowed = f"'0' ({off}), '1' ({on}), and not to set it ({unset})"
        raise ValueError(f"{variable}={value!r}: allowed are {allowed}")
    return value == "1" if value else None


def version(package: str) -> str | None:
    """An installed package's version; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
