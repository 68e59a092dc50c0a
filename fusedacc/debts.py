"""What sums owe: factors that they are still to be multiplied by, as a rule by the next addition to them.

A first gradient that became the sum as it was has not been scaled yet, and a window's final scale is known
before its last additions. A pass that only multiplies reads and writes every sum once more; an addition has
the sum at hand anyway, and multiplies it to the same bits (`keep`, see `backends.Backend.accumulate_`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from .slot import Slot


class Debts:
    """By slot: a factor other than 1, a float or a 0-dim tensor, by which its sum is yet to be multiplied."""

    def __init__(self) -> None:
        self._owed: dict[Slot, float | Tensor] = {}
        #: Tensors that a launch on another stream may still have to read, by identity.
        self._held: dict[int, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._owed)

    def __getitem__(self, slot: Slot) -> float | Tensor:
        """The factor of a slot's sum; 1.0 where nothing is owed."""
        return self._owed.get(slot, 1.0)

    def owe(self, slots: Iterable[Slot], factor: float | Tensor) -> None:
        """These slots' sums owe `factor` beside what they owe already. A tensor must not change any more."""
        if not self._owed:
            self._held.clear()
        products: dict[float, float | Tensor] = {}  # one tensor for all that owed one before
        for slot in slots:
            before = self._owed.get(slot)
            if before is None:
                self._owed[slot] = factor
                continue
            key = _key(before)
            if key not in products:
                products[key] = before * factor
            self._owed[slot] = products[key]
        for value in (factor, *products.values()):
            if isinstance(value, Tensor):
                self._held[id(value)] = value

    def pay(self, slots: Iterable[Slot]) -> None:
        """These slots' sums have been multiplied, or are gone."""
        for slot in slots:
            self._owed.pop(slot, None)

    def clear(self) -> None:
        """All sums are gone."""
        self._owed.clear()

    def among(self, slots: Iterable[Slot] | None = None) -> list[Slot]:
        """Those of `slots` (None: of all) that owe."""
        return list(self._owed) if slots is None else [slot for slot in slots if slot in self._owed]

    def common(self, slots: Sequence[Slot]) -> float | Tensor | None:
        """The factor of all of these slots' sums; None where they differ."""
        groups = self.groups(slots)
        return groups[0][0] if len(groups) == 1 else None

    def groups(self, slots: Sequence[Slot]) -> list[tuple[float | Tensor, list[int]]]:
        """The indices of slots whose sums owe the same, with what they owe."""
        found: dict[float, tuple[float | Tensor, list[int]]] = {}
        for index, slot in enumerate(slots):
            factor = self._owed.get(slot, 1.0)
            found.setdefault(_key(factor), (factor, []))[1].append(index)
        return list(found.values())


def _key(factor: float | Tensor) -> float:
    """Equal for equal numbers, which are above 0, and for a tensor and itself."""
    return -id(factor) if isinstance(factor, Tensor) else factor
