"""Environment variables that are switches: "1", "0" or not set."""

from __future__ import annotations

import os


def switch(variable: str, *, on: str, off: str, unset: str = "") -> bool | None:
    """Whether it is switched on, or off; None where it is not set, or empty.

    Args:
        variable: its name.
        on: what "1" means, for the error.
        off: what "0" means.
        unset: what it means not to set it; empty: the same as "0".

    Raises:
        ValueError: it has another value.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        allowed = (
            f"'0' ({off}), '1' ({on}), and not to set it ({unset})"
            if unset
            else f"'1' ({on}), and '0' or not to set it ({off})"
        )
        raise ValueError(f"{variable}={value!r}: allowed are {allowed}")
    return value == "1" if value else None
