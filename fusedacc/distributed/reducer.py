"""All-reduces a window's accumulators in buckets of memory that hold many of them.

Every rank reduces the same buckets in the same order. A rank that lacks a gradient sends zeros, and flags
behind the accumulators tell whether any rank had one. The window's numbers (`RankNumbers`) are added up in
float64, in one more small all-reduce, which is sent before the last bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from ..accumulators import Accumulators, Slot
from ..accumulators.main_grad import move
from ..accumulators.memory import Segment, cut
from ..kernels import registry
from ..kernels.dtypes import SUM_DTYPES
from ..kernels.rounding import Noise

#: A bucket is full at this many bytes.
BUCKET_BYTES = 25 * 2**20
#: The first bucket that is sent is full at this many bytes: it is small, as in torch's DDP.
FIRST_BYTES = 2**20


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

    def __init__(
        self, of_rank: RankNumbers, number: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._number = number % _NUMBERS_COMPARED
        values = (
            of_rank.micro_batches,
            of_rank.weight,
            of_rank.flushing,
            False if of_rank.bad_weights is None else of_rank.bad_weights,
            of_rank.reopened,
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


@dataclass(frozen=True)
class SentMemory:
    """The memory of a bucket on its way."""

    #: The memory itself, or a copy in the dtype on the wire.
    tensor: Tensor
    work: Any


class ReduceBucket:
    """Accumulators of one lane that one collective reduces, and a flag for each of them."""

    def __init__(self, slots: Sequence[Slot], backend: str) -> None:
        self.slots = list(slots)
        self.lane = slots[0].lane
        self.layouts = _layouts(slots)
        #: The indices of the slots without an accumulator on this rank, when the bucket was sent.
        self.absent: set[int] = set()
        self._backend = backend
        self.renew()

    def renew(self) -> None:
        """Allocate new memory for the slots' next accumulators, and forget what was sent."""
        self._sent: SentMemory | None = None
        device, _, dtype = self.lane
        layout_of_flags = (torch.Size([len(self.slots)]), (1,))
        memory, views = cut([*self.layouts, layout_of_flags], dtype, device)
        self.memory = memory.zero_()  # the gaps between the views are sent too
        self.flags = views.pop()
        self.segment = Segment(memory, len(views) + 1)
        for slot, view in zip(self.slots, views, strict=True):
            slot.drop_buffer()
            slot.buffer = view
            slot.segment = self.segment
            slot.in_reduce_bucket = True
            if slot.main_grad is not None:
                move(slot, view)

    @property
    def views(self) -> list[Tensor]:
        """The slots' views of the memory. Only the slots may hold them, or they would not be reused."""
        return [slot.buffer for slot in self.slots if slot.buffer is not None]

    def write_flags(self) -> None:
        """Write the flags that tell which slots have an accumulator on this rank."""
        self.flags.fill_(1.0)
        for index in self.absent:
            self.flags[index] = 0.0

    def present_elsewhere(self) -> list[int]:
        """After the reduction, return the indices of absent slots that another rank has.

        It waits for the device if there are absent slots.
        """
        if not self.absent:
            return []
        flags = self.flags.tolist()
        return [index for index in self.absent if flags[index] > 0]

    def fits(self) -> bool:
        """Whether no parameter has changed its lane or shape since the bucket was made."""
        return all(slot.lane == self.lane for slot in self.slots) and _layouts(self.slots) == self.layouts

    def send(
        self,
        group: dist.ProcessGroup,
        dtype: torch.dtype | None,
        *,
        divisor: int,
        rounds: bool,
        noise: Noise | None,
    ) -> None:
        """Divide the memory by `divisor`, and start its all-reduce as `dtype`; None: as it is.

        rounds: whether sums are rounded stochastically; None as the dtype means float32 then. noise: the
        random bits for rounding to bfloat16 on the wire.
        """
        if divisor != 1 and not rounds:
            self.memory.mul_(1.0 / divisor)
        self.write_flags()
        if rounds:
            wire = self.memory.float()
            before_flags = self.flags.storage_offset() - self.memory.storage_offset()
            wire[:before_flags] *= 1.0 / divisor
            if noise is not None:
                wire = self._write_rounded(torch.empty_like(self.memory), wire, noise)
            elif dtype is not None:
                wire = wire.to(dtype)
        else:
            wire = self.memory if dtype is None else self.memory.to(dtype)
        self._sent = SentMemory(wire, dist.all_reduce(wire, group=group, async_op=True))

    def receive(self, noise: Noise | None) -> None:
        """Finish the all-reduce and write the result to the memory.

        On a GPU only the current stream waits. `noise` rounds the result stochastically.
        """
        assert self._sent is not None
        sent = self._sent
        self._sent = None
        sent.work.wait()
        if sent.tensor is self.memory:
            return
        if noise is not None and sent.tensor.dtype is not torch.bfloat16:
            self._write_rounded(self.memory, sent.tensor.float(), noise)
        else:
            self.memory.copy_(sent.tensor)

    def _write_rounded(self, target: Tensor, value: Tensor, noise: Noise) -> Tensor:
        chosen = registry.select(target.device, target.dtype, value.dtype, self._backend).backend
        chosen.accumulate_([target], [value], 1.0, True, noise=noise)
        return target


def _layouts(slots: Sequence[Slot]) -> list[tuple[torch.Size, tuple[int, ...]]]:
    return [(slot.shape, slot.strides) for slot in slots]


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
        self.group = group
        self.world_size = dist.get_world_size(group)
        self._slots = slots
        self._accumulators = accumulators
        self._dtype = dtype
        #: The slots in buckets.
        self._members: list[Slot] = []
        #: In the order in which they are sent.
        self._buckets: list[ReduceBucket] = []
        #: How many of the buckets were sent in this reduction.
        self._num_sent = 0
        #: Whether some buckets were sent and not all received, in this reduction or in one that failed.
        self._under_way = False
        #: The number of the last reduction, and its `RankNumbers` if they were sent and not received.
        self._number = 0
        self._numbers: SentNumbers | None = None
        #: Called before the first bucket of each reduction is sent.
        self.announce: Callable[[], Any] | None = None
        self.rebuild_buckets()

    def rebuild_buckets(self) -> None:
        """Assign the accumulators of trained parameters to buckets, again if a parameter has changed."""
        members = [slot for slot in self._slots if slot.in_reduce_bucket or slot.param.requires_grad]
        if members == self._members and all(bucket.fits() for bucket in self._buckets):
            return
        for slot in members:
            dtype = self._dtype or slot.accumulate_dtype
            if slot.needs_eager or dtype not in SUM_DTYPES:
                raise ValueError(
                    f"data_parallel cannot reduce the gradients of parameter {slot.name!r}, of "
                    f"{slot.param.dtype}, as {dtype}; allowed: dense real parameters"
                )
        self.close()
        self._members = members
        groups: list[list[Slot]] = []
        nbytes = 0
        limit = FIRST_BYTES
        for slot in reversed(members):
            if not groups or groups[-1][0].lane != slot.lane or nbytes >= limit:
                limit = BUCKET_BYTES if groups else FIRST_BYTES
                groups.append([])
                nbytes = 0
            groups[-1].append(slot)
            nbytes += slot.param.numel() * slot.accumulate_dtype.itemsize
        self._buckets = [ReduceBucket(group, self._accumulators.backend) for group in groups]

    def close(self) -> None:
        """Release the buckets. Accumulators are kept."""
        for slot in self._members:
            slot.in_reduce_bucket = False
            slot.drop_buffer()
        self._members = []
        self._buckets = []

    def reduce(self, of_rank: RankNumbers, divisor: int = 1) -> Totals:
        """Replace each accumulator by its sum over all ranks, divided by `divisor`.

        A parameter without an accumulator on this rank gets one if another rank has one.
        """
        if self._num_sent == 0:
            self.rebuild_buckets()
        while self._num_sent < len(self._buckets):
            self.send_next(of_rank, divisor)
        self._num_sent = 0
        noise = self._accumulators.noise
        number = noise.begin_reduction()
        for index, bucket in enumerate(self._buckets):
            rounds = noise.rounds(bucket.lane[2])
            bucket.receive(noise.of_reduction(index, number) if rounds else None)
        noise.end_reduction()
        for bucket in self._buckets:
            self._make_accumulators(bucket)
        totals = self._receive_numbers()
        self._under_way = False
        return totals

    def send_next(self, of_rank: RankNumbers, divisor: int) -> None:
        """Send the next bucket. Arguments are those of `reduce`, which must follow."""
        if self._under_way and self._num_sent == 0:
            raise RuntimeError(
                "an earlier all-reduce failed or was abandoned after some buckets were sent, so this one "
                "would mix with it on the other ranks: end all ranks, and restart from a checkpoint"
            )
        if self._num_sent == 0 and self.announce is not None:
            self.announce()
        bucket = self._buckets[self._num_sent]
        self._fill(bucket)
        self._under_way = True
        if bucket is self._buckets[-1]:
            self._number += 1
            self._numbers = SentNumbers(of_rank, self._number, self.group, bucket.memory.device)
        noise = self._accumulators.noise
        accumulate_dtype = bucket.lane[2]
        on_wire = noise.of(bucket.slots[:1], accumulate_dtype) if self._dtype is torch.bfloat16 else None
        rounds = noise.rounds(accumulate_dtype)
        bucket.send(self.group, self._dtype, divisor=divisor, rounds=rounds, noise=on_wire)
        self._num_sent += 1

    def buckets(self) -> list[list[Slot]]:
        """Return the slots of each bucket, in the order in which buckets are sent."""
        return [bucket.slots for bucket in self._buckets]

    def abandon(self) -> None:
        """Abandon sent buckets. Other ranks that wait for this rank will not get an answer."""
        if self._num_sent == 0:
            return
        self._num_sent = 0
        self._numbers = None
        for bucket in self._buckets:
            bucket.renew()

    def _fill(self, bucket: ReduceBucket) -> None:
        """Copy accumulators into the bucket's memory, and zeros for missing ones."""
        accumulators = self._accumulators
        accumulators.passes.apply_scales(bucket.slots)
        present = [accumulators.grads.current(slot) for slot in bucket.slots]
        for slot, accumulator in zip(bucket.slots, present, strict=True):
            if accumulator is not None and accumulator.layout is not torch.strided:
                raise RuntimeError(
                    f"the gradient of parameter {slot.name!r} is sparse, which data_parallel does not "
                    "reduce; allowed: dense gradients (nn.Embedding(sparse=False))"
                )
        is_outside = any(
            accumulator is not None and accumulator is not slot.buffer
            for slot, accumulator in zip(bucket.slots, present, strict=True)
        )
        if is_outside or any(slot.segment is not bucket.segment for slot in bucket.slots):
            bucket.renew()
        bucket.absent = set()
        for index, (accumulator, view) in enumerate(zip(present, bucket.views, strict=True)):
            if accumulator is None:
                bucket.absent.add(index)
                view.zero_()
            elif accumulator is not view:
                view.copy_(accumulator)

    def _make_accumulators(self, bucket: ReduceBucket) -> None:
        """Make the reduced values the accumulators."""
        grads = self._accumulators.grads
        for index in bucket.present_elsewhere():
            grads.put(bucket.slots[index], bucket.views[index])
        written = []
        for index, (slot, view) in enumerate(zip(bucket.slots, bucket.views, strict=True)):
            if index in bucket.absent:
                continue
            accumulator = grads.current(slot)
            if accumulator is view:
                written.append(view)
            elif grads.always_exposed and accumulator is not None and accumulator.dtype == view.dtype:
                accumulator.copy_(view)  # the user has assigned it to p.grad, and sees it there
            else:
                grads.put(slot, view)
        if grads.exposed:
            increment_version(written)

    def _receive_numbers(self) -> Totals:
        if self._numbers is None:  # no parameter is trained
            return Totals(0.0, 0.0, self.world_size, None)
        sent = self._numbers
        self._numbers = None
        return sent.receive(self.world_size)


@dataclass
class _Progress:
    """The progress of one bucket towards being sent."""

    slots: list[Slot]
    #: How many of its parameters still miss deliveries of this micro-batch.
    num_missing: int


class Deliveries:
    """Counts how often each parameter's node has run, and sends buckets whose sums are final.

    finish: adds the pending gradients of slots.
    """

    def __init__(self, finish: Callable[[list[Slot]], None]) -> None:
        self._finish = finish
        #: By slot: the deliveries in the last micro-batch, and in this one until now.
        self._usual: dict[Slot, int] = {}
        self._counts: dict[Slot, int] = {}
        #: Whether the last two micro-batches had equal counts.
        self.steady = False
        #: Sends the next bucket; None if nothing is sent in this backward pass.
        self._send_next: Callable[[], None] | None = None
        self._buckets: list[_Progress] = []
        self._bucket_of: dict[Slot, int] = {}
        self._num_sent = 0

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch, and take the counts of the last one as usual."""
        self.steady = bool(self._counts) and self._counts == self._usual
        self._usual = self._counts
        self._counts = {}
        self.disarm()

    def arm(self, buckets: list[list[Slot]], send_next: Callable[[], None]) -> None:
        """Call `send_next` for each bucket, in order, as soon as it is final and those before it are sent."""
        self._send_next = send_next
        self._num_sent = 0
        self._bucket_of = {slot: index for index, bucket in enumerate(buckets) for slot in bucket}
        self._buckets = [_Progress(bucket, sum(map(self._misses, bucket))) for bucket in buckets]

    def _misses(self, slot: Slot) -> bool:
        """Whether the parameter's last usual delivery of a micro-batch has not come yet."""
        return self._counts.get(slot, 0) < self._usual.get(slot, 0)

    def disarm(self) -> None:
        """Send no bucket until `arm` is called again."""
        self._send_next = None

    def forget(self) -> None:
        """Forget all counts, for example after a failure, and send nothing more."""
        self._usual = {}
        self._counts = {}
        self.disarm()

    def count(self, slot: Slot) -> None:
        """Count a run of the slot's node. Raises RuntimeError if its bucket was already sent."""
        count = self._counts.get(slot, 0) + 1
        self._counts[slot] = count
        if self._send_next is None or slot not in self._bucket_of:
            return
        index = self._bucket_of[slot]
        if index < self._num_sent:
            raise RuntimeError(
                f"parameter {slot.name!r} got more gradients than in the micro-batches before, and its sum "
                "is already being reduced. If parameters are unused in some micro-batches, create the "
                "DistributedDataParallel with find_unused_parameters=True"
            )
        if count != self._usual.get(slot, 0):
            return
        self._buckets[index].num_missing -= 1
        # The last bucket goes with the window's numbers when the backward has ended.
        while self._num_sent < len(self._buckets) - 1 and not self._buckets[self._num_sent].num_missing:
            self._finish(self._buckets[self._num_sent].slots)
            self._send_next()
            self._num_sent += 1
