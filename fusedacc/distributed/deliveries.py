"""Which accumulators are final before a backward has ended: those whose gradients have all been delivered.

How many deliveries a parameter has in a micro-batch is learnt from the ones before. While two in a row were
alike, buckets of the window's last micro-batch are sent as they become final, in their fixed order, and the
rest of the backward runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from ..accumulators import Slot


class Deliveries:
    """Counts the deliveries of each parameter, whatever was delivered.

    Args:
        finish: adds what is pending for these slots, so that nothing is left to be added.
    """

    def __init__(self, finish: Callable[[list[Slot]], None]) -> None:
        self._finish = finish
        self._usual: dict[Slot, int] = {}
        self._counts: dict[Slot, int] = {}
        #: Whether the last two micro-batches were alike.
        self.steady = False
        self._launch: Callable[[], None] | None = None
        self._buckets: list[list[Slot]] = []
        self._bucket_of: dict[Slot, int] = {}
        self._missing: list[int] = []
        self._sent = 0

    def begin_micro_batch(self) -> None:
        """Another micro-batch begins: what the last had is what is usual."""
        self.steady = bool(self._counts) and self._counts == self._usual
        self._usual, self._counts = self._counts, {}
        self._launch = None

    def arm(self, buckets: list[list[Slot]], launch: Callable[[], None]) -> None:
        """Call `launch` for each bucket, in order, as soon as it is final and those before it are sent."""
        self._buckets, self._launch, self._sent = buckets, launch, 0
        self._bucket_of = {slot: index for index, bucket in enumerate(buckets) for slot in bucket}
        short = [slot for slot in self._bucket_of if self._counts.get(slot, 0) < self._usual.get(slot, 0)]
        self._missing = [0] * len(buckets)
        for slot in short:
            self._missing[self._bucket_of[slot]] += 1

    def disarm(self) -> None:
        """Launch nothing more."""
        self._launch = None

    def forget(self) -> None:
        """What there was, and is, tells nothing of what comes, as after a failure. Launch nothing more."""
        self._usual, self._counts, self._launch = {}, {}, None

    def count(self, slot: Slot) -> None:
        """The slot's node has run.

        Raises:
            RuntimeError: its bucket is on its way already.
        """
        count = self._counts[slot] = self._counts.get(slot, 0) + 1
        if self._launch is None or slot not in self._bucket_of:
            return
        index = self._bucket_of[slot]
        if index < self._sent:
            raise RuntimeError(
                f"a gradient of parameter {slot.name!r} came after as many as it had in the micro-batches "
                "before, and its sum is being reduced already. Where parameters are used now and then, make "
                "the DistributedDataParallel with find_unused_parameters=True"
            )
        if count == self._usual.get(slot, 0):
            self._missing[index] -= 1
            # The last bucket carries the window's numbers, and goes when the backward has ended.
            while self._sent < len(self._buckets) - 1 and not self._missing[self._sent]:
                self._finish(self._buckets[self._sent])
                self._launch()
                self._sent += 1
