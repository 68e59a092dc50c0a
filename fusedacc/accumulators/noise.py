"""Chooses the random bits of each gradient that is rounded stochastically into a sum of bfloat16.

Note [Streams]
The bits depend on the seed, the parameter, the number of the addition, and the element's index. Additions to
a parameter are numbered in ascending order, and no number is used twice. Each write takes the parameter's
next number: the addition of a whole gradient, a deferred scale, and a first gradient that becomes the
accumulator. So every backend and every kind of hook must write equally often. Between backward passes all
parameters continue from one number above those used (`finish_numbering`), so that a checkpoint has to store
only this number.

Each rank has another seed. With equal seeds all ranks would make the same errors, and the mean of the errors
would be as large as one rank's. After an all-reduce all ranks must compute the same bits: until the window
ends, or a backward pass adds this rank's gradients again, they use one common seed, numbered by the
reduction.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..kernels.rounding import MOST_ADDITIONS, MOST_SEEDS, Noise, stream_of
from .param import Slot

#: Distance between the seeds of consecutive ranks. It is odd, so that no two ranks have the same seed.
_RANK_STEP = 0x5851F42D4C957F2D
_MOST = MOST_SEEDS - 1
#: Parameter numbers used after a reduction, and for the buckets of the reduction itself.
_SHARED = 1 << 31
_BUCKETS = 3 << 30
#: The most additions that can follow one reduction.
_AFTER_REDUCTION = 64
#: The most reductions.
MAX_ALL_REDUCES = MOST_ADDITIONS // _AFTER_REDUCTION


class NoiseSource:
    """Gives each addition its random bits."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self._rank = 0
        #: Held while numbers are taken, because backward passes may run in several threads.
        self._lock = threading.Lock()
        #: The lowest number that may still be taken.
        self._floor = 0
        #: One above the highest number taken.
        self._ceiling = 0
        #: The number of reductions; and how often each slot was written after this window's reduction (None
        #: before it).
        self._reductions = 0
        self._since: dict[Slot, int] | None = None

    @property
    def own_seed(self) -> int:
        """The seed of this rank."""
        return ((self.seed or 0) + self._rank * _RANK_STEP) & _MOST

    @property
    def next_addition(self) -> int:
        """One above the highest number taken by any slot."""
        return self._ceiling

    def be_rank(self, rank: int, seed: int | None = None) -> None:
        """Set the rank, and with stochastic rounding the seed that all ranks' seeds are derived from."""
        self._rank = rank
        if self.seed is not None and seed is not None:
            self.seed = seed

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether accumulators of this dtype are rounded stochastically."""
        return self.seed is not None and dtype is torch.bfloat16

    def of(self, slots: Sequence[Slot], dtype: torch.dtype) -> Noise | None:
        """Return the bits of one pass over the accumulators of these slots, or None to round to nearest."""
        if self.seed is None or dtype is not torch.bfloat16:
            return None
        with self._lock:
            if self._since is not None:
                return Noise(self.seed, [self._take_shared(slot, self._since) for slot in slots])
            return Noise(self.own_seed, [self._take(slot) for slot in slots])

    def of_reduction(self, bucket: int, number: int) -> Noise:
        """Return the bits that round a bucket of the all-reduced sums, the same on all ranks."""
        assert self.seed is not None
        return Noise(self.seed, [stream_of(_BUCKETS | bucket, number)])

    def skip(self, slots: Sequence[Slot]) -> None:
        """Take the next number of each listed slot, whose gradient becomes the sum."""
        if self.seed is not None:
            with self._lock:
                for slot in slots:
                    self._take(slot)

    def begin_reduction(self) -> int:
        """Return the number of a new reduction over the ranks."""
        self._reductions += 1
        return self._reductions

    def end_reduction(self) -> None:
        """Use the same bits on all ranks until the window ends."""
        self._since = {}

    def begin_own(self) -> None:
        """Use this rank's bits again, because only this rank adds now."""
        self._since = None

    def drop_window(self, slots: Sequence[Slot]) -> None:
        """Drop the sums of all slots, and reuse the numbers taken since `finish_numbering`: how many
        additions a failed backward pass has made depends on the backend.
        """
        self._since = None
        if self._ceiling != self._floor:
            self._ceiling = self._floor
            for slot in slots:
                slot.addition = -1

    def finish_numbering(self) -> None:
        """Let all slots continue from one number. No backward pass may be running."""
        with self._lock:
            self._floor = self._ceiling

    def number(self, slots: Sequence[Slot]) -> None:
        """Number the slots by their order in a checkpoint. No backward pass may be running."""
        self.finish_numbering()
        for number, slot in enumerate(slots):
            slot.number = number

    def state(self) -> dict[str, int] | None:
        """Return the seed and the counters of additions and reductions, for a checkpoint."""
        if self.seed is None:
            return None
        since = self._since
        return {
            "seed": self.seed,
            "addition": self._ceiling,
            "reduction": self._reductions,
            "reduced": since is not None,
            "written": 1 + max(since.values()) if since else 0,
        }

    def restore(self, state: dict[str, int] | None, slots: Sequence[Slot]) -> None:
        """Continue from a result of `state()`; do nothing if it, or this object, rounds to nearest."""
        if state is None or self.seed is None:
            return
        self.seed = state["seed"]
        self._reductions = state["reduction"]
        self._floor = state["addition"]
        self._ceiling = state["addition"]
        written = state["written"] - 1
        self._since = dict.fromkeys(slots, written) if state["reduced"] else None
        for slot in slots:
            slot.addition = -1

    def _take_shared(self, slot: Slot, since: dict[Slot, int]) -> int:
        count = since.get(slot, -1) + 1
        if count == _AFTER_REDUCTION:  # on all ranks at once
            self._reductions += 1
            since.clear()
            count = 0
        since[slot] = count
        return stream_of(_SHARED | slot.number, self._reductions * _AFTER_REDUCTION + count)

    def _take(self, slot: Slot) -> int:
        number = max(slot.addition + 1, self._floor)
        slot.addition = number
        if number >= self._ceiling:
            self._ceiling = number + 1
        return stream_of(slot.number, number)
