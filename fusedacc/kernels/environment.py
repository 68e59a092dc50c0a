"""Environment variables that are switches ("1", "0" or not set), and versions of packages."""

from __future__ import annotations

import importlib.metadata
import os


def switch(variable: str, *, on: str, off: str, unset: str) -> bool | None:
    """Return whether the variable is "1" or "0"; None if it is empty or not set.

    Args:
        variable: its name.
        on, off, unset: what "1", "0" and no value mean, for the error.

    Raises:
        ValueError: it has another value.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        allowed = f"'0' ({off}), '1' ({on}), or not set ({unset})"
        raise ValueError(f"{variable}={value!r}: allowed are {allowed}")
    return value == "1" if value else None


def version(package: str) -> str | None:
    """Return an installed package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
