"""Partial norms that the additions of a window's last micro-batch record, so that none need be read again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from .param import Slot


class PartialNorms:
    """Which partial norms there are, and of which accumulators they still are the norms.

    One launch records the partial norms of all its accumulators together: they count as long as each of these
    is the same tensor, unchanged, and none has been added to since.
    """

    def __init__(self) -> None:
        #: What an update will ask for; None: no norm.
        self.wanted: float | None = None
        #: What additions are to record now: `wanted` in a window's last micro-batch, else None.
        self.norm_type: float | None = None
        #: The launch that has last added to a slot's accumulator.
        self.latest: dict[Slot, _Launch] = {}

    def __bool__(self) -> bool:
        """Whether there are any, or additions are to record some."""
        return bool(self.latest) or self.norm_type is not None

    def record(self, slots: Sequence[Slot], accumulators: Sequence[Tensor], partials: Tensor) -> None:
        """A launch has added to these accumulators and left their partial norms."""
        versions = [accumulator._version for accumulator in accumulators]
        launch = _Launch(partials, list(zip(slots, accumulators, versions, strict=True)))
        for slot in slots:
            self.latest[slot] = launch

    def forget(self, slots: Iterable[Slot]) -> None:
        """These slots' accumulators have been changed."""
        if self.latest:
            for slot in slots:
                self.latest.pop(slot, None)

    def clear(self) -> None:
        """All accumulators have been changed, or are let go."""
        self.latest.clear()

    def take(self, slots: Sequence[Slot], accumulators: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The partial norms that still hold, and those of the accumulators that have to be read. None holds
        after this: should the update fail, p.grad can be written to before the next try."""
        if not self.latest:
            return [], accumulators
        present = dict(zip(slots, accumulators, strict=True))
        launches = {id(launch): launch for launch in self.latest.values()}
        holding = {key for key, launch in launches.items() if self._holds(launch, present)}
        unread = {slot for slot, launch in self.latest.items() if id(launch) in holding}
        self.latest.clear()
        read = [accumulator for slot, accumulator in present.items() if slot not in unread]
        return [launches[key].partials for key in launches if key in holding], read

    def _holds(self, launch: _Launch, present: dict[Slot, Tensor]) -> bool:
        return all(
            self.latest.get(slot) is launch and present.get(slot) is known and known._version == version
            for slot, known, version in launch.of
        )


class _Launch:
    def __init__(self, partials: Tensor, of: list[tuple[Slot, Tensor, int]]) -> None:
        self.partials, self.of = partials, of
