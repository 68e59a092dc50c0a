"""All-reduces a window's accumulators in buckets of memory that hold many of them.

Every rank reduces the same buckets in the same order. A rank that lacks a gradient sends zeros, and flags
behind the accumulators tell whether any rank had one. The window's numbers (`RankNumbers`) are added up in
float64, in one more small all-reduce, which is sent before the last bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from ..accumulators import Accumulators, Slot
from ..accumulators.param import Segment, cut
from ..kernels import registry
from ..kernels.dtypes import SUM_DTYPES
from ..kernels.rounding import Noise

#: A bucket is full at this many bytes. The first bucket that is sent is small, as in torch's DDP.
BUCKET_BYTES, FIRST_BYTES = 25 * 2**20, 2**20


@dataclass(frozen=True)
class RankNumbers:
    """The numbers of one rank for a window, which are added up over the ranks."""

    micro_batches: int
    #: The sum of the micro-batches' weights; may be a 0-dim tensor.
    weight: float | Tensor = 0.0
    #: Whether this rank has no more micro-batches until all ranks have called `flush()`.
    flushing: bool = False
    #: For weights on a device, a 0-dim bool tensor: whether one was negative or nan.
    bad_weights: Tensor | None = None
    #: Whether the sums were reduced before and gradients have come since.
    reopened: bool = False


@dataclass(frozen=True)
class Totals:
    """The sums of `RankNumbers` over all ranks; tensors if the accumulators are on a device."""

    micro_batches: float | Tensor
    weight: float | Tensor
    num_flushing: float | Tensor
    bad_weights: Tensor | None

    @property
    def nothing_came(self) -> bool:
        """Whether the host knows that no rank had a micro-batch."""
        return not isinstance(self.micro_batches, Tensor) and not self.micro_batches


#: The number of a reduction is compared modulo this, so that sums of its square over the ranks are exact.
_NUMBERS_COMPARED = 2**16


class SentNumbers:
    """The `RankNumbers` of a window on their way.

    number: of this reduction on this rank, which differs between ranks that are out of step.
    """

    def __init__(self, own: RankNumbers, number: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._number = number % _NUMBERS_COMPARED
        values = (
            own.micro_batches,
            own.weight,
            own.flushing,
            False if own.bad_weights is None else own.bad_weights,
            own.reopened,
            self._number,
            self._number**2,
        )
        # `torch.tensor(values, device=device)` would wait for the device.
        self._numbers = torch.stack([_as_float64(value, device) for value in values])
        self._work: Any = dist.all_reduce(self._numbers, group=group, async_op=True)

    def receive(self, world_size: int) -> Totals:
        """Return the sums over the ranks. Raises RuntimeError on every rank if they are out of step; this is
        not checked on a GPU, because it would wait for the device.
        """
        self._work.wait()
        if self._numbers.device.type != "cpu":
            micro_batches, weight, num_flushing, bad_weights, *_ = self._numbers.float()
            return Totals(micro_batches, weight, num_flushing, bad_weights > 0)
        micro_batches, weight, num_flushing, _, reopened, *numbers = self._numbers.tolist()
        # Without the squares, numbers with the same mean as this rank's would pass.
        wanted = [self._number * world_size, self._number**2 * world_size]
        if numbers != wanted or 0 < reopened < world_size:
            raise RuntimeError(
                "the ranks are not at the same reduction: they have run different numbers of windows, or "
                "of backwards in a window's last micro-batch. Their sums are mixed up: restart from a "
                "checkpoint"
            )
        return Totals(micro_batches, weight, num_flushing, None)


def _as_float64(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a 0-dim float64 tensor. A number that is on the host or the device does not make
    the host wait.
    """
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


class ReduceBucket:
    """Accumulators of one lane that one collective reduces, and a flag for each of them."""

    def __init__(self, slots: Sequence[Slot], backend: str) -> None:
        self.slots, self._backend = list(slots), backend
        self.lane = slots[0].lane
        self.shapes = [(slot.shape, slot.strides) for slot in slots]
        self.renew()

    def renew(self) -> None:
        """Allocate new memory for the slots' next accumulators, and forget what was sent."""
        self._sent: list[tuple[Tensor, Any]] = []
        device, _, dtype = self.lane
        layouts = [*self.shapes, (torch.Size([len(self.slots)]), (1,))]
        memory, (*views, self.flags) = cut(layouts, dtype, device)
        self.memory = memory.zero_()  # the gaps between the views are sent too
        self.segment = Segment(memory, len(views) + 1)
        for slot, view in zip(self.slots, views, strict=True):
            slot.drop_buffer()
            slot.buffer, slot.segment, slot.in_bucket = view, self.segment, True

    @property
    def views(self) -> list[Tensor]:
        """The slots' views of the memory. Only the slots may hold them, or they would not be reused."""
        return [slot.buffer for slot in self.slots if slot.buffer is not None]

    def flag(self, absent: Collection[int]) -> None:
        """Write the flags that tell which slots, by index, have no accumulator on this rank."""
        self.flags.fill_(1.0)
        for index in absent:
            self.flags[index] = 0.0

    def present(self, absent: Collection[int]) -> list[int]:
        """Return those of `absent` that some rank has. Synchronises with a device unless it is empty."""
        if not absent:
            return []
        flags = self.flags.tolist()
        return [index for index in absent if flags[index] > 0]

    def fits(self) -> bool:
        """Whether no parameter has changed its lane or shape since the bucket was made."""
        shapes = ((slot.shape, slot.strides) for slot in self.slots)
        return all(slot.lane is self.lane for slot in self.slots) and list(shapes) == self.shapes

    def launch(
        self,
        group: dist.ProcessGroup,
        dtype: torch.dtype | None,
        divisor: int,
        rounds: bool,
        noise: Noise | None,
    ) -> None:
        """Start the all-reduce of the memory, as `dtype`.

        rounds: whether sums are rounded stochastically; they are divided here then, and None as the dtype
        means float32. noise: the random bits for rounding to bfloat16 on the wire.
        """
        if not rounds:
            wire = self.memory if dtype in (None, self.memory.dtype) else self.memory.to(dtype)
        else:
            wire = self.memory.float()
            before_flags = self.flags.storage_offset() - self.memory.storage_offset()
            wire[:before_flags] *= 1.0 / divisor
            if noise is not None:
                wire = self._rounded(torch.empty_like(self.memory), wire, noise)
            elif dtype is not None:
                wire = wire.to(dtype)
        self._sent.append((wire, dist.all_reduce(wire, group=group, async_op=True)))

    def land(self, noise: Noise | None) -> None:
        """Finish the all-reduce and write the result to the memory.

        On a GPU only the current stream waits. `noise` rounds the result stochastically.
        """
        wire, work = self._sent.pop()
        work.wait()
        if wire is self.memory:
            return
        if noise is not None and wire.dtype is not torch.bfloat16:
            self._rounded(self.memory, wire.float(), noise)
        else:
            self.memory.copy_(wire)

    def _rounded(self, target: Tensor, value: Tensor, noise: Noise) -> Tensor:
        chosen = registry.select(target.device, target.dtype, value.dtype, self._backend).backend
        chosen.accumulate_([target], [value], 1.0, True, noise=noise)
        return target


class Reducer:
    """The buckets of a wrapper, and their reduction. Raises ValueError if a parameter cannot be reduced.

    dtype: on the wire; None for the accumulate dtype, or float32 with stochastic rounding.
    """

    def __init__(
        self,
        slots: list[Slot],
        accumulators: Accumulators,
        group: dist.ProcessGroup,
        dtype: torch.dtype | None,
    ) -> None:
        self.group, self.world_size = group, dist.get_world_size(group)
        self._slots, self._accumulators, self._dtype = slots, accumulators, dtype
        self._buckets: list[ReduceBucket] = []
        self._members: list[Slot] = []
        self._number = 0
        #: Called before the first bucket of each reduction is sent.
        self.announce: Callable[[], Any] | None = None
        #: Whether some buckets were sent and not all received.
        self._under_way = False
        #: For each sent bucket, the indices of the slots without an accumulator.
        self._absent: list[set[int]] = []
        #: The window's numbers, if they were sent and not received.
        self._numbers: SentNumbers | None = None
        self.rebuild_buckets()

    def rebuild_buckets(self) -> None:
        """Assign the accumulators of trained parameters to buckets, again if a parameter has changed."""
        wanted = [slot for slot in self._slots if slot.in_bucket or slot.param.requires_grad]
        if wanted == self._members and all(bucket.fits() for bucket in self._buckets):
            return
        for slot in wanted:
            dtype = self._dtype or slot.accumulate_dtype
            if slot.needs_eager or dtype not in SUM_DTYPES:
                raise ValueError(
                    f"data_parallel cannot reduce the gradients of parameter {slot.name!r}, of "
                    f"{slot.param.dtype}, as {dtype}; allowed: dense real parameters"
                )
        self.close()
        self._members = wanted
        groups: list[list[Slot]] = []
        nbytes, most = 0, 0
        for slot in reversed(wanted):
            if not groups or groups[-1][0].lane is not slot.lane or nbytes >= most:
                most = BUCKET_BYTES if groups else FIRST_BYTES
                groups.append([])
                nbytes = 0
            groups[-1].append(slot)
            nbytes += slot.param.numel() * slot.accumulate_dtype.itemsize
        backend = self._accumulators.backend
        self._buckets = [ReduceBucket(group, backend) for group in groups]

    def close(self) -> None:
        """Release the buckets. Accumulators are kept."""
        for slot in self._members:
            slot.in_bucket = False
            slot.drop_buffer()
        self._members, self._buckets = [], []

    def reduce(self, own: RankNumbers, divisor: int = 1) -> Totals:
        """Replace each accumulator by its sum over all ranks, divided by `divisor`.

        A parameter without an accumulator on this rank gets one if another rank has one.
        """
        if not self._absent:
            self.rebuild_buckets()
        while len(self._absent) < len(self._buckets):
            self.launch_next(own, divisor)
        absent, self._absent = self._absent, []
        noise = self._accumulators.noise
        number = noise.begin_reduction()
        for index, bucket in enumerate(self._buckets):
            rounds = noise.rounds(bucket.lane[2])
            bucket.land(noise.of_reduction(index, number) if rounds else None)
        noise.end_reduction()
        for bucket, lacking in zip(self._buckets, absent, strict=True):
            self._scatter(bucket, lacking)
        totals = Totals(0.0, 0.0, self.world_size, None)
        if self._numbers is not None:
            sent, self._numbers = self._numbers, None
            totals = sent.receive(self.world_size)
        self._under_way = False
        return totals

    def launch_next(self, own: RankNumbers, divisor: int) -> None:
        """Send the next bucket. Arguments are those of `reduce`, which must follow."""
        if self._under_way and not self._absent:
            raise RuntimeError(
                "an earlier all-reduce failed or was abandoned after some buckets were sent, so this one "
                "would mix with it on the other ranks: end all ranks, and restart from a checkpoint"
            )
        bucket = self._buckets[len(self._absent)]
        if not self._absent and self.announce is not None:
            self.announce()
        absent = self._gather(bucket)
        source, dtype = self._accumulators.noise, bucket.lane[2]
        rounds = source.rounds(dtype)
        noise = source.of(bucket.slots[:1], dtype) if self._dtype is torch.bfloat16 else None
        if divisor != 1 and not rounds:
            bucket.memory.mul_(1.0 / divisor)
        bucket.flag(absent)
        self._under_way = True
        if bucket is self._buckets[-1]:
            self._number += 1
            self._numbers = SentNumbers(own, self._number, self.group, bucket.memory.device)
        bucket.launch(self.group, self._dtype, divisor, rounds, noise)
        self._absent.append(absent)

    def buckets(self) -> list[list[Slot]]:
        """Return the slots of each bucket, in the order in which buckets are sent."""
        return [bucket.slots for bucket in self._buckets]

    def abandon(self) -> None:
        """Abandon sent buckets. Other ranks that wait for this rank will not get an answer."""
        if self._absent:
            self._absent, self._numbers = [], None
            for bucket in self._buckets:
                bucket.renew()

    def _gather(self, bucket: ReduceBucket) -> set[int]:
        """Copy accumulators into the bucket's memory, and return the indices of missing ones."""
        accumulators = self._accumulators
        accumulators.passes.apply_scales(bucket.slots)
        held = [accumulators.grads.current(slot) for slot in bucket.slots]
        for slot, accumulator in zip(bucket.slots, held, strict=True):
            if accumulator is not None and accumulator.layout is not torch.strided:
                raise RuntimeError(
                    f"the gradient of parameter {slot.name!r} is sparse, which data_parallel does not "
                    "reduce; allowed: dense gradients (nn.Embedding(sparse=False))"
                )
        strangers = any(a is not None and a is not s.buffer for s, a in zip(bucket.slots, held, strict=True))
        if strangers or any(slot.segment is not bucket.segment for slot in bucket.slots):
            bucket.renew()
        absent = set()
        for index, (accumulator, view) in enumerate(zip(held, bucket.views, strict=True)):
            if accumulator is None:
                absent.add(index)
                view.zero_()
            elif accumulator is not view:
                view.copy_(accumulator)
        return absent

    def _scatter(self, bucket: ReduceBucket, absent: Collection[int]) -> None:
        """Make the reduced values the accumulators."""
        grads = self._accumulators.grads
        for index in bucket.present(absent):
            grads.put(bucket.slots[index], bucket.views[index])
        written = []
        for index, (slot, view) in enumerate(zip(bucket.slots, bucket.views, strict=True)):
            if index in absent:
                continue
            accumulator = grads.current(slot)
            if accumulator is view:
                written.append(view)
            elif grads.visible and accumulator is not None and accumulator.dtype == view.dtype:
                accumulator.copy_(view)  # the user has assigned it to p.grad, and sees it there
            else:
                grads.put(slot, view)
        if grads.exposed:
            increment_version(written)


class Deliveries:
    """Counts how often each parameter's node has run; `finish` adds the pending gradients."""

    def __init__(self, finish: Callable[[list[Slot]], None]) -> None:
        self._finish = finish
        self._usual: dict[Slot, int] = {}
        self._counts: dict[Slot, int] = {}
        #: Whether the last two micro-batches had equal counts.
        self.steady = False
        self._launch: Callable[[], None] | None = None
        self._buckets: list[list[Slot]] = []
        self._bucket_of: dict[Slot, int] = {}
        self._missing: list[int] = []
        self._sent = 0

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch, and take the counts of the last one as usual."""
        self.steady = bool(self._counts) and self._counts == self._usual
        self._usual, self._counts = self._counts, {}
        self._launch = None

    def arm(self, buckets: list[list[Slot]], launch: Callable[[], None]) -> None:
        """Call `launch` for each bucket, in order, as soon as it is final and those before it are sent."""
        self._buckets, self._launch, self._sent = buckets, launch, 0
        self._bucket_of = {slot: index for index, bucket in enumerate(buckets) for slot in bucket}
        self._missing = [
            sum(self._counts.get(slot, 0) < self._usual.get(slot, 0) for slot in bucket) for bucket in buckets
        ]

    def disarm(self) -> None:
        self._launch = None

    def forget(self) -> None:
        """Forget all counts, for example after a failure, and launch nothing more."""
        self._usual, self._counts, self._launch = {}, {}, None

    def count(self, slot: Slot) -> None:
        """Count a run of the slot's node. Raises RuntimeError if its bucket was already sent."""
        count = self._counts[slot] = self._counts.get(slot, 0) + 1
        if self._launch is None or slot not in self._bucket_of:
            return
        index = self._bucket_of[slot]
        if index < self._sent:
            raise RuntimeError(
                f"parameter {slot.name!r} got more gradients than in the micro-batches before, and its sum "
                "is already being reduced. If parameters are unused in some micro-batches, create the "
                "DistributedDataParallel with find_unused_parameters=True"
            )
        if count == self._usual.get(slot, 0):
            self._missing[index] -= 1
            # The last bucket goes with the window's numbers when the backward has ended.
            while self._sent < len(self._buckets) - 1 and not self._missing[self._sent]:
                self._finish(self._buckets[self._sent])
                self._launch()
                self._sent += 1
