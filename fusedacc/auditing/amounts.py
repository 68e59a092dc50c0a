"""Numbers in a problem's sentence, which may differ between the updates that the sentence is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Amount:
    """The smallest and the largest value of a number in several updates.

    In a sentence, "{name}" writes both, "{name.most}" the largest, and "{name.as_factor}" a factor.

    Attributes:
        low, high: the two values.
        write: how a value is written.
    """

    low: float
    high: float
    write: Callable[[float], str]

    @classmethod
    def of(cls, write: Callable[[float], str], low: float, high: float | None = None) -> Amount:
        """Return the amount of one update: a number, or a range."""
        return cls(low, low if high is None else high, write)

    def include(self, other: Amount) -> None:
        """Include the values of another update."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    @property
    def most(self) -> str:
        """The largest value, written."""
        return self.write(self.high)

    @property
    def as_factor(self) -> str:
        """Write "1/2 of" or "3 times"."""
        return f"{self} of" if self.high <= 1 else f"{self} times"

    def __str__(self) -> str:
        """Write "3" or "3 to 4.5"."""
        first, last = self.write(self.low), self.write(self.high)
        return first if first == last else f"{first} to {last}"
