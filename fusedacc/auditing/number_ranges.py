"""Sets of numbers of updates, kept as ranges: thousands of updates take a few bytes."""

from __future__ import annotations

from collections.abc import Iterator

#: Out-of-order numbers make new ranges, which are merged when there are so many more.
_MERGE_EVERY = 64


class NumberRanges:
    """A set of integers."""

    def __init__(self) -> None:
        self._ranges: list[list[int]] = []

    def add(self, number: int) -> None:
        """Add a number."""
        last = self._ranges[-1] if self._ranges else None
        if last is not None and last[0] <= number <= last[1] + 1:
            last[1] = max(last[1], number)
            return
        self._ranges.append([number, number])
        if len(self._ranges) % _MERGE_EVERY == 0:
            self._merge()

    def _merge(self) -> list[list[int]]:
        merged: list[list[int]] = []
        for first, last in sorted(self._ranges):
            if merged and first <= merged[-1][1] + 1:
                merged[-1][1] = max(merged[-1][1], last)
            else:
                merged.append([first, last])
        self._ranges = merged
        return merged

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self._merge())

    def __iter__(self) -> Iterator[int]:
        for first, last in self._merge():
            yield from range(first, last + 1)

    def __str__(self) -> str:
        """Write "1-3, 5"."""
        ranges = [str(first) if first == last else f"{first}-{last}" for first, last in self._merge()]
        return ", ".join(ranges if len(ranges) < 5 else [*ranges[:3], f"and {len(ranges) - 3} more"])
