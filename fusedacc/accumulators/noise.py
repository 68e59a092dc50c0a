"""Which random bits each addition takes, where sums of bfloat16 are rounded stochastically.

Note [Streams]
Bits depend on the seed, the parameter, the addition, and the element's place in the sum. Additions to a
parameter are numbered in ascending order, and no number comes twice: whatever writes a sum (a pass, a
module's product, a native hook, a deferred scale) takes the parameter's next, one for each write, and so does
a first gradient that becomes the sum. Every backend and every kind of hook must write as often as the others.
Whenever users' code may run outside a backward, all parameters go on from one number above those that were
taken (`finish_numbering`), so that this number is all that a checkpoint has to carry.

Ranks have seeds of their own: with equal ones the errors of all ranks would be alike, and their mean as large
as one rank's. What follows a reduction all ranks must do alike: from there to the window's end, or to a
backward that adds more of each rank's own, they take the bits of one seed, numbered by the reduction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.rounding import MOST_ADDITIONS, MOST_SEEDS, Noise, stream_of
from .param import Slot, nothing

#: A rank's seed is so much further: odd, so that no two ranks have the same.
_RANK_STEP = 0x5851F42D4C957F2D
_MOST = MOST_SEEDS - 1
#: Among the numbers of parameters: of what follows a reduction, and of the reduction's own buckets.
_SHARED, _BUCKETS = 1 << 31, 3 << 30
#: Numbers of additions that one reduction has room for.
_AFTER_REDUCTION = 64
#: Reductions that there is room for.
MAX_ALL_REDUCES = MOST_ADDITIONS // _AFTER_REDUCTION


class NoiseSource:
    """Hands out random bits to whoever adds to sums."""

    def __init__(self, seed: int | None) -> None:
        self.seed, self._rank = seed, 0
        #: Held while numbers are taken: backwards may run in several threads.
        self._lock = threading.Lock()
        #: Below it no number is taken any more; one above the highest that was taken.
        self._floor = self._ceiling = 0
        #: How many reductions there were; of slots that were written since the last one in this window, how
        #: often. None: none was in this window.
        self._reductions = 0
        self._since: dict[Slot, int] | None = None
        #: A weak reference to what says that native code has added to a slot, and has it add no more.
        self.release: Callable[[], Callable[[Slot], None] | None] = nothing

    @property
    def own_seed(self) -> int:
        """This rank's seed."""
        return ((self.seed or 0) + self._rank * _RANK_STEP) & _MOST

    @property
    def next_addition(self) -> int:
        """One above the highest number that any slot has taken."""
        return self._ceiling

    def be_rank(self, rank: int, seed: int | None = None) -> None:
        """Take the seed of that rank, where sums take any; `seed`: what all ranks' are made of."""
        self._rank = rank
        if self.seed is not None and seed is not None:
            self.seed = seed

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether sums of this dtype are rounded stochastically."""
        return self.seed is not None and dtype is torch.bfloat16

    def of(self, slots: Sequence[Slot], dtype: torch.dtype) -> Noise | None:
        """The bits of one pass over the accumulators of these slots, of one dtype."""
        if self.seed is None or dtype is not torch.bfloat16:
            return None
        release = self.release()
        if release is not None:
            for slot in slots:
                release(slot)
        with self._lock:
            if self._since is not None:
                return Noise(self.seed, [self._take_shared(slot, self._since) for slot in slots])
            return Noise(self.own_seed, [self._take(slot) for slot in slots])

    def of_reduction(self, bucket: int, number: int) -> Noise:
        """The bits by which what was added up over the ranks is rounded, the same on all ranks."""
        assert self.seed is not None
        return Noise(self.seed, [stream_of(_BUCKETS | bucket, number)])

    def skip(self, slots: Sequence[Slot]) -> None:
        """These slots' next numbers are taken, one's as often as it is here.

        By native code, or because a first gradient has become the sum, as if it had been added.
        """
        if self.seed is not None:
            with self._lock:
                for slot in slots:
                    self._take(slot)

    def begin_reduction(self) -> int:
        """The number of a reduction over the ranks."""
        self._reductions += 1
        return self._reductions

    def end_reduction(self) -> None:
        """Until the window's end all ranks take the same bits."""
        self._since = {}

    def begin_own(self) -> None:
        """What is added now is this rank's own."""
        self._since = None

    def end_window(self) -> None:
        """The sums are used up."""
        self._since = None
        self.finish_numbering()

    def drop_window(self, slots: Sequence[Slot]) -> None:
        """The sums of all slots are thrown away, and with them what was added since `finish_numbering`.

        How much of a backward that has failed was added depends on who waits with what: its numbers come
        again.
        """
        self._since = None
        if self._ceiling != self._floor:
            self._ceiling = self._floor
            for slot in slots:
                slot.addition = -1

    def next_streams(self, slots: Sequence[Slot], accumulators: Sequence[Tensor | None]) -> list[int]:
        """The stream of each slot's next addition, for native code; -1 where it is rounded to nearest.

        Native code numbers further additions itself. Call `skip` with all of them afterwards. A parameter
        that was cast has sums of another dtype, and native code would write bfloat16 into them.
        """
        if self.seed is None:
            return []
        return [
            -1
            if accumulator is None or not self.rounds(accumulator.dtype)
            else stream_of(slot.number, self._next(slot))
            for slot, accumulator in zip(slots, accumulators, strict=True)
        ]

    def finish_numbering(self) -> None:
        """All slots go on from one number; no backward may be running."""
        with self._lock:
            self._floor = self._ceiling

    def number(self, slots: Sequence[Slot]) -> None:
        """Number the slots by their places, as a checkpoint has them; no backward may be running."""
        self.finish_numbering()
        for number, slot in enumerate(slots):
            slot.number = number

    def state(self) -> dict[str, int] | None:
        """For a checkpoint: the seed, the next addition, the last reduction, and what came after it."""
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
        """Go on from what `state` has returned; as if new where one of the two rounds to nearest."""
        if state is None or self.seed is None:
            return
        self.seed, self._reductions = state["seed"], state["reduction"]
        self._floor = self._ceiling = state["addition"]
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

    def _next(self, slot: Slot) -> int:
        return max(slot.addition + 1, self._floor)

    def _take(self, slot: Slot) -> int:
        slot.addition = number = self._next(slot)
        if number >= self._ceiling:
            self._ceiling = number + 1
        return stream_of(slot.number, number)
