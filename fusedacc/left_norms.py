"""Partial norms that the additions of a window's last micro-batch leave, so that no sum is read for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from .slot import Slot


class LeftNorms:
    """Which partial norms there are, and of which sums they still are the norms.

    One launch leaves the partial norms of all its sums together: they count as long as each of these is the
    same tensor, unchanged, and none has been added to since.
    """

    def __init__(self) -> None:
        #: What an update will ask for; None: no norm.
        self.wanted: float | None = None
        #: What additions are to leave now: `wanted` in a window's last micro-batch, else None.
        self.norm_type: float | None = None
        self._latest: dict[Slot, _Launch] = {}

    def __bool__(self) -> bool:
        """Whether there are any, or additions are to leave some."""
        return bool(self._latest) or self.norm_type is not None

    def leave(self, slots: Sequence[Slot], sums: Sequence[Tensor], partials: Tensor) -> None:
        """A launch has added to these sums and left their partial norms."""
        launch = _Launch(partials, list(zip(slots, sums, [total._version for total in sums], strict=True)))
        for slot in slots:
            self._latest[slot] = launch

    def forget(self, slots: Iterable[Slot]) -> None:
        """These slots' sums have been changed."""
        if self._latest:
            for slot in slots:
                self._latest.pop(slot, None)

    def clear(self) -> None:
        """All sums have been changed, or are let go."""
        self._latest.clear()

    def split(self, finals: Iterable[tuple[Slot, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """The partial norms that still hold, and the sums that have to be read."""
        present = dict(finals)
        launches = {id(launch): launch for launch in self._latest.values()}
        holding = {key for key, launch in launches.items() if self._holds(launch, present)}
        unread = [slot for slot, launch in self._latest.items() if id(launch) in holding]
        read = [total for slot, total in present.items() if slot not in set(unread)]
        return [launches[key].partials for key in launches if key in holding], read

    def _holds(self, launch: _Launch, present: dict[Slot, Tensor]) -> bool:
        return all(
            self._latest.get(slot) is launch and present.get(slot) is total and total._version == version
            for slot, total, version in launch.of
        )


class _Launch:
    def __init__(self, partials: Tensor, of: list[tuple[Slot, Tensor, int]]) -> None:
        self.partials, self.of = partials, of
