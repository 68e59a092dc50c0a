"""Gives modules access to accumulators, so that they can add in place.

Note [Partly written stacks]
In a window, the first gradient of one matrix of a stack overwrites its part of the buffer, and later ones are
added to it. The stack becomes the accumulator at the end of a backward pass, or before any other code adds to
it, stores it or reads it. Only then are the parts without a gradient filled with zeros. Until then the
parameter has no accumulator, as in PyTorch p.grad is None before the AccumulateGrad node has run. After a
failed backward pass the stack is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..kernels.checks import overlaps_itself
from ..kernels.local_parts import are_alike, is_distributed, local, placed_as
from .deferred_scale import to_device_of
from .param import Slot, new_sums
from .passes import Passes

#: `write(accumulator, scale, beta)` computes accumulator = beta * accumulator + scale * gradient for one
#: gradient.
Write = Callable[[Tensor, float | Tensor, float | Tensor], None]


class OpenSum(NamedTuple):
    """A sum to which a gradient is being added: accumulator = beta * accumulator + scale * gradient.

    Attributes:
        accumulator: the sum, or this rank's part of it.
        scale: the gradient's factor.
        beta: the factor of the accumulator; 0 if it holds nothing yet.
        total: the sum.
        is_new: whether `total` is new memory, which is not the slot's sum yet.
    """

    accumulator: Tensor
    scale: float | Tensor
    beta: float | Tensor
    total: Tensor
    is_new: bool


class InPlaceWriter:
    """Hands accumulators to code that adds in place."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._grads = passes.grads
        self._deferred = passes.deferred
        #: Stacks of matrices of which only some are written so far, with the indices of these matrices. Empty
        #: outside a backward pass.
        self.begun: dict[Slot, tuple[Tensor, set[int]]] = {}

    def write(
        self,
        slot: Slot,
        write: Write,
        scale: float | Tensor,
        by_rows: bool = False,
        part: int | None = None,
        any_layout: bool = False,
    ) -> bool:
        """Let `write` add a gradient to the slot's accumulator. Where it cannot, return False.

        `write` gets new memory with a beta of 0, or the accumulator with its deferred scale. by_rows: whether
        it adds to some rows only; new memory is zeroed first, and beta is 1. part: the index of the only
        matrix of a stack that it adds to; beta is 0 for its first gradient. any_layout: as in `open`.
        """
        with self._passes.lock:
            if part is None:
                self.complete([slot])
            self._grads.begin_sum(slot)
            if part is not None and self._grads.current(slot) is None:
                return self._write_first_part(slot, write, scale, part)
            of_whole = not by_rows and part is None
            opened = self.open(slot, scale, of_whole=of_whole, any_layout=any_layout)
            if opened is None:
                return False
            write(opened.accumulator, opened.scale, opened.beta)
            self.close(slot, opened)
            return True

    def open(
        self, slot: Slot, scale: float | Tensor, *, of_whole: bool = True, any_layout: bool = False
    ) -> OpenSum | None:
        """Begin to add a gradient to the slot's sum, or return None if the caller cannot write to it. Call
        `close` with the result after the addition. The caller holds the lock.

        of_whole: whether the caller multiplies the accumulator by beta. Otherwise beta is 1. any_layout:
        whether it can write to all strides, and needs a number for beta; otherwise only to matrices and
        stacks of matrices whose rows or columns are dense.
        """
        total = self._grads.current(slot)
        is_new = total is None
        if total is None:
            total = _new_sum(slot)
        into = local(total)
        if not _may_write(slot, total, of_whole=of_whole, any_layout=any_layout):
            return None
        beta: float | Tensor = 1.0
        if is_new and of_whole:
            beta = 0.0
        elif is_new:
            into.zero_()
        elif of_whole and not (any_layout and isinstance(slot.beta, Tensor)):
            beta = to_device_of(slot.beta, into)
        else:
            self._passes.apply_scales([slot])
        return OpenSum(into, to_device_of(scale, into), beta, total, is_new)

    def close(self, slot: Slot, opened: OpenSum) -> None:
        """End an addition that `open` has begun."""
        self._deferred.discharge([slot])
        if opened.is_new:
            self._grads.put(slot, opened.total)
        elif self._grads.exposed:
            increment_version([opened.total])

    def _write_first_part(self, slot: Slot, write: Write, scale: float | Tensor, part: int) -> bool:
        """Let `write` add to one matrix of a stack that is no sum yet. Note [Partly written stacks]."""
        stack, written = self.begun.get(slot) or (new_sums([slot])[0], set())
        if not _may_write(slot, stack, of_whole=False):
            return False
        write(stack, to_device_of(scale, stack), 1.0 if part in written else 0.0)
        written.add(part)
        self.begun[slot] = stack, written
        slot.is_begun = True
        return True

    # Stacks of which some matrices are written

    def complete(self, slots: Collection[Slot] | None = None) -> None:
        """Fill unwritten matrices with zeros, and make the stacks of these slots (None: all) accumulators."""
        if not self.begun:
            return
        with self._passes.lock:
            for slot in list(self.begun if slots is None else slots):
                if slot not in self.begun:
                    continue
                stack, written = self.begun.pop(slot)
                slot.is_begun = False
                bounds = itertools.pairwise([-1, *sorted(written), len(stack)])
                gaps = [stack[before + 1 : after] for before, after in bounds if before + 1 < after]
                if gaps:
                    torch._foreach_zero_(gaps)
                present = self._grads.current(slot)
                if present is None:
                    self._grads.put(slot, stack)
                else:  # a gradient was put into p.grad after the stack was begun
                    self._passes.apply_scales([slot])
                    present.add_(stack)

    def forget(self, slots: Collection[Slot] | None = None) -> None:
        """Drop the stacks of these slots (None: all)."""
        for slot in list(self.begun if slots is None else slots):
            self.begun.pop(slot, None)
            slot.is_begun = False


def _new_sum(slot: Slot) -> Tensor:
    """Return uninitialised memory for the slot's sum."""
    if is_distributed(slot.param):
        return placed_as(slot.param, torch.empty_like(local(slot.param), dtype=slot.accumulate_dtype))
    return new_sums([slot])[0]


def _may_write(slot: Slot, total: Tensor, *, of_whole: bool, any_layout: bool = False) -> bool:
    """Whether modules can write to this memory. of_whole, any_layout: as in `InPlaceWriter.open`."""
    into = local(total)
    if not slot.fits(into):
        return False
    if any_layout:
        return into is total and not overlaps_itself(into)
    if into.dim() not in (2, 3):
        return False
    if not (into.is_contiguous() or (of_whole and into.mT.is_contiguous())):
        return False
    return into is total or are_alike(total, slot.param)
