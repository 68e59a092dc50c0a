"""Tests that the emulated device cannot run, each with its reason."""

from __future__ import annotations

#: By a part of the test's name.
REASONS: dict[str, str] = {}


def reason(node: str, ptx: bool) -> str | None:
    """Why the test of that name is left out, or None."""
    return next((why for part, why in REASONS.items() if part in node), None)
