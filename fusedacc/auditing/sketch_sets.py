"""Sets of sketches, in pages that are used again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .memory import allocate
from .sketches import NUMBERS

#: Sketches in a page: 32 KB.
SKETCHES_IN_PAGE = 64


class SketchPages:
    """Pages of a device that are free."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Tensor]] = {}

    def take(self, device: torch.device) -> Tensor:
        """Return a page: float64 [SKETCHES_IN_PAGE, NUMBERS]."""
        free = self._free.setdefault(device, [])
        return free.pop() if free else allocate((SKETCHES_IN_PAGE, NUMBERS), device)

    def give_back(self, page: Tensor) -> None:
        """Return a page that nothing uses any more."""
        self._free.setdefault(page.device, []).append(page)


class SketchSet:
    """Sketches by the number of a leaf.

    Args:
        pages: where its memory is from. It goes back there when the set is emptied or freed.
    """

    def __init__(self, pages: SketchPages) -> None:
        self._source = pages
        self._pages: list[Tensor] = []
        #: By device: the page that is filled, and how many sketches are in it.
        self._filling: dict[torch.device, tuple[Tensor, int]] = {}
        #: By the leaf's number: page, row, and numbers in the sketch.
        self._places: dict[int, tuple[Tensor, int, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: object) -> bool:
        return number in self._places

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __getitem__(self, number: int) -> Tensor:
        """Return a view of a sketch."""
        page, row, length = self._places[number]
        return page[row, :length]

    def add(self, number: int, sketch: Tensor) -> None:
        """Add a sketch to the one of this number, or copy it."""
        if number in self._places:
            self[number].add_(sketch)
            return
        device = sketch.device
        page, row = self._filling.get(device, (None, SKETCHES_IN_PAGE))
        if page is None or row == SKETCHES_IN_PAGE:
            page, row = self._source.take(device), 0
            self._pages.append(page)
        self._filling[device] = page, row + 1
        self._places[number] = page, row, len(sketch)
        self[number].copy_(sketch)
        page[row, len(sketch) :] = 0  # the row may have been used before

    def is_finite(self) -> bool:
        """Return whether no sketch has an inf or nan."""
        filled = {id(page): rows for page, rows in self._filling.values()}
        return all(bool(page[: filled.get(id(page))].isfinite().all()) for page in self._pages)

    def clear(self) -> None:
        """Forget all sketches."""
        for page in self._pages:
            self._source.give_back(page)
        self._pages, self._filling, self._places = [], {}, {}

    def __del__(self) -> None:
        self.clear()

    def __reduce__(self) -> tuple[type[SketchSet], tuple[SketchPages]]:
        """Pickle as an empty set: ranks exchange equations."""
        return SketchSet, (SketchPages(),)
