"""Comparisons of weights with tolerances, and how the report writes numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from fractions import Fraction

#: Weights may differ by this much, relatively, in addition to four standard errors.
TOLERANCE = 0.05
#: Standard errors within which two values count as equal.
STANDARD_ERRORS = 4
#: A weight below this share of the largest counts as 0.
NEGLIGIBLE = 0.05


def is_close(value: float, expected: float) -> bool:
    """Return whether a value is the expected one, within the tolerance."""
    return abs(value - expected) <= TOLERANCE * abs(expected)


def are_steady(values: Sequence[float], tolerance: float = TOLERANCE) -> bool:
    """Return whether all values lie within a relative tolerance."""
    return max(values) - min(values) <= tolerance * abs(statistics.median(values))


def differ(values: Sequence[float], errors: Sequence[float] | None = None) -> bool:
    """Return whether values differ from their median by more than the tolerance and four standard errors."""
    middle = statistics.median(values)
    return any(
        abs(value - middle) > TOLERANCE * abs(middle) + STANDARD_ERRORS * error
        for value, error in zip(values, errors or [0.0] * len(values), strict=True)
    )


def format_fraction(value: float) -> str:
    """Write a weight as a fraction if it is close to a simple one, else with two digits."""
    is_small = 0 < abs(value) < 0.1
    if is_small and abs(value * round(1 / value) - 1) <= 1e-3 and abs(1 / value) < 1025:
        return f"{'-' * (value < 0)}1/{abs(round(1 / value))}"
    near = Fraction(value).limit_denominator(1024 if is_small else 32)
    if abs(float(near) - value) <= 1e-3 * abs(value) and abs(near.numerator) < (2 if is_small else 10):
        return str(near)
    return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"


def format_number(value: float) -> str:
    """Write a number with three digits, without an exponent if possible."""
    if 1e-4 < abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:.0f}" if abs(value) < 1e9 else f"{value:.2g}"


def format_ratio(value: float) -> str:
    """Write by how much parameters differ: three digits, as a fraction if it is close to a simple one."""
    return format_fraction(float(f"{value:.3g}"))


def format_count(value: float) -> str:
    """Write a number of tokens, labels or values."""
    return f"{value:g}"


def format_percentage(value: float) -> str:
    """Write a share in percent."""
    return f"{value:.0%}"


def format_names(names: Sequence[str]) -> str:
    """Write at most three names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def format_sites(sites: Iterable[str]) -> str:
    """Write lines or calls of the script, without repetitions, for a text with "{name}" for amounts."""
    return ", ".join(sorted({*sites} - {""})).replace("{", "{{").replace("}", "}}")


def plural(count: int, word: str) -> str:
    """Write "1 update" or "2 updates"."""
    if count == 1:
        return f"1 {word}"
    return f"{count} {word}es" if word.endswith(("ch", "ss")) else f"{count} {word}s"
