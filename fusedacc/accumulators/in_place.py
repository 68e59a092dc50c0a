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

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..kernels.local_parts import are_alike, is_distributed, local, placed_as
from .deferred_scale import to_device_of
from .param import Slot, new_sums
from .passes import Passes

#: `write(accumulator, scale, beta)` computes accumulator = beta * accumulator + scale * gradient for one
#: gradient.
Write = Callable[[Tensor, float | Tensor, float | Tensor], None]


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
    ) -> bool:
        """Let `write` add a gradient to the slot's accumulator. Where it cannot, return False.

        `write` gets new memory with a beta of 0, or the accumulator with its deferred scale. by_rows: whether
        it adds to some rows only; new memory is zeroed first, and beta is 1. part: the index of the only
        matrix of a stack that it adds to; beta is 0 for its first gradient.
        """
        with self._passes.lock:
            if part is None:
                self.complete([slot])
            self._grads.begin_sum(slot)
            total = self._grads.current(slot)
            if total is not None:
                return self._add_to_sum(slot, total, write, scale, of_whole=not by_rows and part is None)
            if part is not None:
                return self._write_first_part(slot, write, scale, part)
            return self._write_first(slot, write, scale, by_rows=by_rows)

    def _add_to_sum(
        self, slot: Slot, total: Tensor, write: Write, scale: float | Tensor, *, of_whole: bool
    ) -> bool:
        """Let `write` add to a sum. of_whole: whether it multiplies the sum by its deferred scale."""
        into = local(total)
        if not _may_write(slot, total, of_whole=of_whole):
            return False
        if of_whole:
            write(into, to_device_of(scale, into), to_device_of(slot.beta, into))
            self._deferred.discharge([slot])
        else:
            self._passes.apply_scales([slot])
            write(into, to_device_of(scale, into), 1.0)
        if into is not total and self._grads.exposed:
            increment_version([total])
        return True

    def _write_first(self, slot: Slot, write: Write, scale: float | Tensor, *, by_rows: bool) -> bool:
        """Let `write` write the first gradient into new memory, which becomes the sum."""
        if is_distributed(slot.param):
            shard = torch.empty_like(local(slot.param), dtype=slot.accumulate_dtype)
            total = placed_as(slot.param, shard)
        else:
            (total,) = new_sums([slot])
        into = local(total)
        if not _may_write(slot, total, of_whole=not by_rows):
            return False
        if by_rows:
            into.zero_()
        write(into, to_device_of(scale, into), 1.0 if by_rows else 0.0)
        self._deferred.discharge([slot])
        self._grads.put(slot, total)
        return True

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


def _may_write(slot: Slot, total: Tensor, *, of_whole: bool) -> bool:
    """Whether modules can write to this memory. of_whole: whether they write all of it."""
    into = local(total)
    if not (slot.fits(into) and into.dim() in (2, 3)):
        return False
    if not (into.is_contiguous() or (of_whole and into.mT.is_contiguous())):
        return False
    return into is total or are_alike(total, slot.param)
