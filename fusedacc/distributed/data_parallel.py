"""Reduces a wrapper's accumulators over data-parallel ranks, once in a window."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..accumulators import Accumulators, Slot
from ..kernels.dtypes import SUM_DTYPES
from ..kernels.local_parts import is_distributed
from . import ddp
from .agreement import (
    agree_on_backends,
    agree_on_parameters,
    agree_on_settings,
    compare_parameters,
    compares_parameters,
    share_parameters,
)
from .ddp import UnarmedDDP, unarm
from .reducer import Deliveries, RankNumbers, Reducer, Totals
from .rows import RankPlace


def check(given: Any, slots: list[Slot], dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError if `data_parallel=` or `reduce_dtype=` do not fit these slots."""
    if isinstance(given, DistributedDataParallel):
        ddp.check(given)
        _check_covers(given, slots)
    elif not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            "data_parallel must be a DistributedDataParallel, a process group or None, got "
            f"{type(given).__name__}"
        )
    if dtype is not None and dtype not in SUM_DTYPES:
        raise TypeError(
            f"reduce_dtype must be None or one of {', '.join(map(str, SUM_DTYPES))}, got {dtype!r}"
        )
    for slot in slots:
        param: Any = slot.param
        if is_distributed(param):
            raise ValueError(
                f"data_parallel cannot reduce the gradients of parameter {slot.name!r}, a DTensor with "
                f"placements {param.placements}; allowed: plain tensors, or data_parallel=None for tensor "
                "parallelism alone, and for fully_shard() over the data-parallel ranks"
            )


class DataParallel:
    """The data-parallel ranks of a wrapper.

    Args:
        given: the `data_parallel=` argument, which `check` has accepted.
        slots: the parameters.
        accumulators: the accumulators to reduce.
        dtype: the dtype on the wire, as in `Reducer`.
        finish: adds the pending gradients of the given slots.
        settings: the wrapper's arguments that must be equal on all ranks, by name.
    """

    def __init__(
        self,
        given: Any,
        slots: list[Slot],
        accumulators: Accumulators,
        dtype: torch.dtype | None,
        finish: Callable[[list[Slot]], None],
        settings: Mapping[str, object],
    ) -> None:
        self.link: UnarmedDDP | None = None
        self.slots, self._compares = slots, compares_parameters()
        #: The parameters that required gradients when a reduction was last prepared.
        self._trained = [slot for slot in slots if slot.param.requires_grad]
        group = given.process_group if isinstance(given, DistributedDataParallel) else given
        self._noise = noise = accumulators.noise
        if given is group:
            agree_on_parameters(slots, group)
        seed, failed = agree_on_settings(slots, group, dtype, noise.seed, settings)
        if failed:
            agree_on_backends(slots, group, accumulators.backend)
        if given is group:
            share_parameters(slots, group)
        self.reducer = Reducer(slots, accumulators, group, dtype)
        noise.be_rank(dist.get_rank(group), seed)
        self.deliveries = Deliveries(finish)
        ddp.reducing.add(self)
        if isinstance(given, DistributedDataParallel):
            self.link = unarm(given, self)

    @property
    def world_size(self) -> int:
        return self.reducer.world_size

    @property
    def place(self) -> RankPlace:
        return RankPlace.within(self.reducer.group)

    @property
    def synchronises(self) -> bool:
        """Manual loop: whether this backward pass is the window's last."""
        return self.link is None or self.link.synchronises

    def note_schedule(self) -> None:
        """Notify the DistributedDataParallel, if any, that a pipeline schedule's `step()` has run."""
        if self.link is not None:
            self.link.note_schedule()

    def serves(self, model: Any) -> bool:
        """Whether `model` is the DistributedDataParallel that was given."""
        return self.link is not None and self.link.parallel is model

    def overlap(self, own: RankNumbers, divisor: int) -> None:
        """Prepare to send final buckets during the backward pass that begins now; `reduce` must follow it.

        Nothing is sent early if a parameter may be unused in some micro-batches: only a
        DistributedDataParallel without `find_unused_parameters` excludes that. Nothing is sent early either
        after a parameter was frozen, unfrozen or added, because an unfrozen parameter gets its hook in the
        next micro-batch.
        """
        trained = [slot for slot in self.slots if slot.param.requires_grad]
        if trained != self._trained:
            self._trained = trained
            self.deliveries.forget()
        elif self.deliveries.steady and self.link is not None:
            parallel = self.link.parallel
            if parallel.find_unused_parameters and not parallel.static_graph:
                return
            self.reducer.rebuild_buckets()
            buckets = self.reducer.buckets()
            self.deliveries.arm(buckets, functools.partial(self.reducer.launch_next, own, divisor))

    def reduce(self, own: RankNumbers, divisor: int = 1) -> Totals:
        """Reduce, see `Reducer.reduce`, and broadcast DDP's buffers."""
        self.deliveries.disarm()
        totals = self.reducer.reduce(own, divisor)
        if self.link is not None:
            self.link.broadcast_buffers()
        return totals

    def check_update(self) -> None:
        """After an update, compare the ranks' parameters if FUSEDACC_CHECK_RANKS=1."""
        if self._compares:
            compare_parameters(self.slots, self.reducer.group)

    def abandon(self) -> None:
        """Drop a window, including buckets that were already sent."""
        self.deliveries.forget()
        self.reducer.abandon()

    def close(self) -> None:
        """Restore the DistributedDataParallel."""
        ddp.reducing.discard(self)
        if self.link is not None:
            self.link.leave(self)
        self._noise.be_rank(0)
        self.reducer.close()


def _check_covers(parallel: DistributedDataParallel, slots: list[Slot]) -> None:
    """Raise ValueError if the DistributedDataParallel lacks one of the parameters."""
    ignored = parallel.parameters_to_ignore
    held = {id(p) for name, p in parallel.module.named_parameters() if name not in ignored}
    for slot in slots:
        if id(slot.param) not in held:
            raise ValueError(
                f"data_parallel is a DistributedDataParallel without parameter {slot.name!r}, whose gradient "
                "would not be reduced; allowed: one that holds all parameters, or a process group"
            )
