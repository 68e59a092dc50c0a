"""Sets of sketches, in pages that are used again.

A leaf's number gives its row: all sets keep a leaf in the same row of the same page. So a set is a few pages
and one integer whose bits say which rows are filled, and nothing of it lies in the heap (see memory.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .memory import allocate
from .sketches import NUMBERS

#: Sketches in a page: 32 KB.
SKETCHES_IN_PAGE = 64


def mask_of(numbers: Iterable[int]) -> int:
    """Return an integer with these bits."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


class SketchPages:
    """Free pages, and what all sets know of a leaf: its device, and how many numbers its sketch has."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Tensor]] = {}
        self.lengths: dict[int, tuple[torch.device, int]] = {}

    def take(self, device: torch.device) -> Tensor:
        """Return a page of zeros: float64 [SKETCHES_IN_PAGE, NUMBERS]."""
        free = self._free.setdefault(device, [])
        return free.pop().zero_() if free else allocate((SKETCHES_IN_PAGE, NUMBERS), device)

    def give_back(self, page: Tensor) -> None:
        """Return a page that nothing uses any more."""
        self._free.setdefault(page.device, []).append(page)


class SketchSet:
    """Sketches by the number of a leaf.

    Args:
        source: where its pages are from. They go back there when the set is cleared or freed.

    Attributes:
        mask: an integer with the bits of the leaves' numbers.
    """

    def __init__(self, source: SketchPages) -> None:
        self._source = source
        self._pages: dict[tuple[torch.device, int], Tensor] = {}
        self.mask = 0

    def __len__(self) -> int:
        return self.mask.bit_count()

    def __contains__(self, number: int) -> bool:
        return bool(self.mask >> number & 1)

    def __iter__(self) -> Iterator[int]:
        mask = self.mask
        while mask:
            lowest = mask & -mask
            yield lowest.bit_length() - 1
            mask ^= lowest

    def __getitem__(self, number: int) -> Tensor:
        """Return a view of a sketch."""
        device, length = self._source.lengths[number]
        index, row = divmod(number, SKETCHES_IN_PAGE)
        return self._pages[device, index][row, :length]

    def add(self, number: int, sketch: Tensor) -> None:
        """Add a sketch to the one of this number; without one, keep a copy."""
        key = sketch.device, number // SKETCHES_IN_PAGE
        if key not in self._pages:
            self._pages[key] = self._source.take(sketch.device)
        self._source.lengths[number] = sketch.device, sketch.shape[0]
        self.mask |= 1 << number
        self[number].add_(sketch)

    def is_finite(self) -> bool:
        """Return whether no sketch has an inf or nan."""
        return all(bool(page.isfinite().all()) for page in self._pages.values())

    def clear(self) -> None:
        """Forget all sketches."""
        for page in self._pages.values():
            self._source.give_back(page)
        self._pages, self.mask = {}, 0

    def __del__(self) -> None:
        self.clear()

    def __reduce__(self) -> tuple[type[SketchSet], tuple[SketchPages]]:
        """Pickle as an empty set: ranks exchange equations."""
        return SketchSet, (SketchPages(),)
