"""Adds gradients to accumulators. The first gradient becomes the accumulator or is written into a buffer.

Note [Who owns a gradient]
A gradient that only this package refers to may become the accumulator as it is (`_adopt`,
`memory.is_sole`): no other code can write to it, or see it written. Every other gradient is read, not kept.

A sum of sparse gradients holds the rows of all gradients one after another, repeated indices included. The
code that uses the sum adds up rows with the same index. Autograd's own sum merges some of these rows earlier,
so its last bits differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..kernels import checks
from ..kernels.dtypes import PAIRS, is_deferrable
from ..kernels.local_parts import are_alike, is_distributed, local, placed_as
from ..kernels.rounding import round_into_
from .in_place import InPlaceWriter
from .param import GradState, Lane, Slot, is_sole, new_sums, owns_memory, storage_users
from .passes import Passes, is_one, scaled, to_device_of, with_rows


class Adder:
    """Adds gradients to accumulators."""

    def __init__(self, passes: Passes, in_place: InPlaceWriter) -> None:
        self._passes, self._in_place, self._lock = passes, in_place, passes.lock
        self._grads, self._deferred = passes.grads, passes.deferred
        self._noise = passes.noise

    def may_adopt(self, slot: Slot, gradient: Tensor) -> bool:
        """Whether a gradient can become the accumulator once only this package refers to it."""
        first = gradient.dtype is slot.lane[2] and not slot.in_bucket and self._grads.current(slot) is None
        return first and slot.obeys_layout(gradient) and owns_memory(gradient)

    def add(
        self, slots: Sequence[Slot], gradients: list[Tensor], scale: float | Tensor, adoptable: bool = False
    ) -> None:
        """Compute acc += scale * gradient for each slot of one lane, in one pass; the list of gradients is
        emptied.

        A first gradient becomes the accumulator, with a deferred scale, if it has the accumulate dtype and no
        other code refers to it. scale: must not change afterwards. adoptable: whether only this list refers
        to the gradients, each has memory that no other tensor shares, and each has its parameter's layout.
        """
        if not slots:
            return
        with self._lock:
            self._in_place.complete(slots)
            if adoptable and self._adopt(slots, gradients, scale):
                gradients.clear()
                return
            try:
                self._add(slots, gradients, scale)
            except RuntimeError:
                # A native operator refuses before it writes. Trying it is cheaper than checking first.
                kept = self._add_eager_ones(slots, gradients, scale)
                if len(kept) == len(slots):
                    raise
                self._add(kept, gradients, scale)
            gradients.clear()

    def _add(self, slots: Sequence[Slot], gradients: list[Tensor], scale: float | Tensor) -> None:
        grads, passes = self._grads, self._passes
        prepared = passes.prepared.get(slots[0]) if slots else None
        beta: float | Tensor = 1.0
        if self._deferred.scales:
            scales = [deferred for deferred, _ in self._deferred.groups(slots)]
            if len(scales) == 1:
                beta = scales[0]
            else:
                prepared = None  # `Passes.add` groups slots by their deferred scales
        if prepared is not None and prepared.slots != slots:
            prepared = None
        private = not grads.exposed
        if prepared is not None and private and prepared.generation == grads.generation and prepared.run:
            passes.run_prepared(prepared, None, gradients, scale, beta)
            return
        accumulators: list[Any] = (
            [slot.accumulator for slot in slots] if private else [grads.current(slot) for slot in slots]
        )
        if prepared is not None and prepared.holds(accumulators):
            passes.run_prepared(prepared, accumulators, gradients, scale, beta)
            if private:
                prepared.generation = grads.generation
            else:
                increment_version(accumulators)
            return
        slots = self._add_eager_ones(slots, gradients, scale)
        accumulators = [grads.current(slot) for slot in slots]
        if all(map(Slot.fits, slots, accumulators)):
            passes.add(accumulators, gradients, scale, False, slots, not private)
            if slots:
                passes.keep(slots, accumulators, grads.generation if private else -1)
        else:
            self._add_some_first(slots, gradients, scale)

    def _adopt(self, slots: Sequence[Slot], gradients: list[Tensor], scale: float | Tensor) -> bool:
        """Make each gradient its slot's accumulator, if no slot has one; else return False."""
        _, given, dtype = slots[0].lane
        if given != dtype or not self._is_deferrable(scale, dtype) or self._grads.exposed:
            return False
        published = GradState.PUBLISHED
        for slot in slots:
            if slot.accumulator is not None or slot.needs_eager or slot.in_bucket:
                return False
            if slot.grad_state is published:
                return False
        self._grads.generation += 1
        for slot, gradient in zip(slots, gradients, strict=True):
            slot.accumulator = gradient
        if not is_one(scale):
            self._deferred.defer(slots, scale)
        if self._noise.rounds(dtype):
            self._noise.skip(slots)
        return True

    def _add_eager_ones(
        self, slots: Sequence[Slot], gradients: list[Tensor], scale: float | Tensor
    ) -> Sequence[Slot]:
        """Add gradients that do not fit their lane one by one, and return the remaining slots."""
        wanted, strided = slots[0].lane[1] if slots else None, torch.strided
        if all(gradient.dtype is wanted and gradient.layout is strided for gradient in gradients):
            return slots
        ordinary = []
        for index, slot in enumerate(slots):
            gradient = gradients[index]
            if gradient.layout is not strided:
                slot.set_needs_eager(True)
            if slot.needs_eager or gradient.dtype is not wanted:
                self.add_eagerly(slot, gradient, scale)
            else:
                ordinary.append(index)
        del gradient
        gradients[:] = [gradients[index] for index in ordinary]
        return [slots[index] for index in ordinary]

    def _add_some_first(self, slots: Sequence[Slot], gradients: list[Tensor], scale: float | Tensor) -> None:
        """Add where some slot has no accumulator yet, or the user has assigned one to p.grad."""
        accumulators: list[Any] = []
        terms: list[Tensor] = []
        first: list[bool] = []
        added: list[Slot] = []
        adopted: list[Slot] = []
        grads, passes = self._grads, self._passes
        same_dtype = slots[0].lane[1] == slots[0].lane[2] and not any(slot.in_bucket for slot in slots)
        lacking = [] if same_dtype else [slot for slot in slots if grads.current(slot) is None]
        made = dict(zip(lacking, new_sums(lacking), strict=True)) if lacking else {}
        private = not grads.exposed
        if private and len(made) == len(slots):
            passes.add(list(made.values()), gradients, scale, True, slots, False)
            grads.generation += 1
            for slot, sum_ in made.items():
                slot.accumulator = sum_
            return
        for index, slot in enumerate(slots):
            accumulator = grads.current(slot)
            is_new = accumulator is None
            if accumulator is None:
                shape, (device, _, dtype) = slot.param.shape, slot.lane
                stays = same_dtype and (is_one(scale) or self._may_defer(slot, scale))
                if same_dtype and slot.obeys_layout(gradients[index]) and is_sole(gradients, index):
                    accumulator = gradients[index]
                elif same_dtype:
                    accumulator = torch.empty_strided(shape, slot.strides, dtype=dtype, device=device)
                    stays = stays and self._noise.rounds(dtype)
                    if stays:  # round as often as where the gradient becomes the sum
                        accumulator.copy_(gradients[index])
                else:
                    accumulator = made[slot]
                if stays:
                    grads.put(slot, accumulator)
                    adopted.append(slot)
                    continue
            elif not slot.fits(accumulator):
                self.add_eagerly(slot, gradients[index], scale)
                continue
            first.append(is_new)
            accumulators.append(accumulator)
            added.append(slot)
            terms.append(gradients[index])
        if not is_one(scale):
            self._deferred.defer(adopted, scale)
        if self._noise.rounds(slots[0].accumulate_dtype):
            self._noise.skip(adopted)
        flags = first if len(set(first)) > 1 else any(first)
        passes.add(accumulators, terms, scale, flags, added, grads.exposed)
        for slot, accumulator, is_new in zip(added, accumulators, first, strict=True):
            if is_new:
                grads.put(slot, accumulator)

    def _may_defer(self, slot: Slot, scale: float | Tensor) -> bool:
        """Whether scaling later gives the same bits, and the user cannot see the accumulator."""
        public = self._grads.visible or slot.grad_state is GradState.PUBLISHED
        return not public and self._is_deferrable(scale, slot.accumulate_dtype)

    def _is_deferrable(self, scale: float | Tensor, dtype: torch.dtype) -> bool:
        """Extend `dtypes.is_deferrable`: with stochastic rounding always defer, which rounds once less."""
        return self._noise.rounds(dtype) or is_deferrable(scale, dtype)

    def add_mixed(self, slots: Iterable[Slot], gradients: Iterable[Tensor], scale: float | Tensor) -> None:
        """Do the same as `add` for gradients of any kind and lane."""
        lanes: dict[Lane, tuple[list[Slot], list[Tensor]]] = {}
        for slot, gradient in zip(slots, gradients, strict=True):
            usual = type(gradient) in checks.GRADIENT_TYPES and not slot.needs_eager
            if usual and gradient.dtype == slot.lane[1]:
                chosen = lanes.setdefault(slot.lane, ([], []))
                chosen[0].append(slot)
                chosen[1].append(gradient)
            else:
                self.add_eagerly(slot, gradient, scale)
        for chosen_slots, chosen_gradients in lanes.values():
            self.add(chosen_slots, chosen_gradients, scale)

    def add_part(self, slot: Slot, gradient: Tensor, scale: float | Tensor, adoptable: bool = False) -> bool:
        """Add this rank's part of a DTensor with a kernel, or return False if no kernel supports it."""
        term, dtype = local(gradient), slot.accumulate_dtype
        with self._lock:
            self._in_place.complete([slot])
            accumulator, exposed = self._grads.current(slot), self._grads.exposed
            into = None if accumulator is None else local(accumulator)
            if not checks.is_plain(term) or (term.dtype, dtype if into is None else into.dtype) not in PAIRS:
                return False
            if into is None:
                deferrable = is_one(scale) or (not exposed and self._is_deferrable(scale, dtype))
                if adoptable and term.dtype == dtype and deferrable:
                    self._grads.put(slot, gradient)
                    if not is_one(scale):
                        self._deferred.defer([slot], scale)
                    return True
                into = torch.empty_like(term, dtype=dtype)
                self._passes.run([into], [term], scale, True, [slot], False)
                self._grads.put(slot, placed_as(gradient, into))
                return True
            joins = accumulator is not None and is_distributed(accumulator) and checks.is_plain(into)
            if accumulator is None or not (joins and are_alike(accumulator, gradient)):
                return False
            beta = self._deferred[slot]
            self._passes.run([into], [term], scale, False, [slot], exposed, beta)
            self._deferred.discharge([slot])
            if exposed:
                increment_version([accumulator])
            return True

    def add_eagerly(self, slot: Slot, gradient: Tensor, scale: float | Tensor, sole: bool = False) -> None:
        """Add with plain torch: sparse and complex gradients, subclasses, dtype pairs without a kernel.
        Sparse accumulators and subclasses are rounded to nearest, because torch decides when it adds up
        repeated indices. sole: whether only the caller refers to the gradient.
        """
        with self._lock:
            if is_distributed(gradient) and self.add_part(slot, gradient, scale):
                return
            self._in_place.complete([slot])
            accumulator = self._grads.current(slot)
            if gradient.is_sparse and self._add_rows(slot, accumulator, gradient, scale, sole):
                return
            self._passes.apply_scales([slot])
            dtype = slot.accumulate_dtype if accumulator is None else accumulator.dtype
            if accumulator is None or (accumulator.is_sparse and not gradient.is_sparse):
                noise = self._noise.of([slot], dtype) if checks.is_plain(gradient) else None
                wide = dtype if noise is None else torch.float32
                term = scaled(gradient.to(wide), scale)
                if accumulator is not None:
                    term = term + accumulator.to(wide)
                elif term is gradient:
                    term = gradient.clone()
                if noise is not None:
                    total, term = term, torch.empty_like(term, dtype=dtype)
                    round_into_(term, total, noise.seed, noise.streams[0])
                self._grads.put(slot, term)
            elif accumulator.is_sparse:
                self._grads.put(slot, accumulator + scaled(gradient.to(dtype), scale))
            elif (noise := self._noise.of([slot], dtype)) is not None and checks.is_plain(accumulator):
                total = accumulator.float().add_(scaled(gradient.float(), scale))
                round_into_(accumulator, total, noise.seed, noise.streams[0])
            elif isinstance(scale, Tensor):
                accumulator.add_(scaled(gradient.to(dtype), scale))
            else:
                accumulator.add_(gradient, alpha=scale)

    def _add_rows(
        self, slot: Slot, accumulator: Tensor | None, gradient: Tensor, scale: float | Tensor, sole: bool
    ) -> bool:
        """Add a sparse gradient to an empty or sparse sum, or return False for a dense sum."""
        grads, deferred = self._grads, self._deferred
        if accumulator is None:
            rows = _owned_rows(gradient, slot.accumulate_dtype, sole)
            stays = is_one(scale) or (self._may_defer(slot, scale) and not slot.in_bucket)
            if not stays:
                rows._values().mul_(to_device_of(scale, rows))
            grads.put(slot, rows)
            if stays and not is_one(scale):
                deferred.defer([slot], scale)
            return True
        if not accumulator.is_sparse or accumulator.sparse_dim() != gradient.sparse_dim():
            return False
        if accumulator.is_coalesced() and gradient.is_coalesced():  # torch keeps their sum coalesced
            return False
        room = None if grads.exposed else slot.num_rows  # the user may hold an old p.grad
        total = _joined(accumulator, deferred[slot], gradient, scale, room)
        slot.num_rows = total._values().shape[0]
        grads.put(slot, total)
        deferred.discharge([slot])
        return True


def _owned_rows(gradient: Tensor, dtype: torch.dtype, sole: bool) -> Tensor:
    """Return a sparse gradient in `dtype`, in memory that nothing else uses.

    An embedding's gradient has the tokens themselves as indices, and its values may be a tensor that the user
    passed to `backward()`. Those are copied; memory that belongs to the gradient alone is kept.
    """

    def own(part: Tensor) -> Tensor:
        # Two users: the gradient, and the variable here.
        return part if sole and part.is_contiguous() and storage_users(part) == 2 else part.clone()

    values = gradient._values()
    values = own(values) if values.dtype == dtype else values.to(dtype)
    return with_rows(gradient, own(gradient._indices()), values, gradient.is_coalesced())


def _joined(
    total: Tensor, beta: float | Tensor, gradient: Tensor, scale: float | Tensor, room: int | None
) -> Tensor:
    """Return beta * total + scale * gradient of sparse tensors, reading and writing each row at most once.

    room: how many rows the sum is likely to get. Memory for them is allocated at once, and later gradients
    are appended to the rows. None: other code may hold `total`, so it is copied.
    """
    rows, more = total._values(), gradient._values()
    indices = torch.cat((total._indices(), gradient._indices()), 1)
    if more.dtype is not rows.dtype:
        more = more.to(rows.dtype)
    before, size = rows.shape[0], rows.shape[0] + more.shape[0]
    if room is not None and is_one(beta) and _has_room(rows, size):
        values = rows.resize_(size, *rows.shape[1:])  # `rows` is another tensor than the sum's own
    else:
        values = rows.new_empty((max(size, room or 0), *rows.shape[1:]))[:size]
        torch.mul(rows, to_device_of(beta, rows), out=values[:before])
    torch.mul(more, to_device_of(scale, more), out=values[before:])
    found = with_rows(total, indices, values)
    # As in autograd, the list of rows must not outgrow the dense tensor without limit.
    return found.coalesce() if size > total.numel() else found


def _has_room(rows: Tensor, size: int) -> bool:
    """Return whether the memory of these rows has room for `size` rows, and nothing else uses it."""
    # Two users: the sum's tensor of values, and `rows`, which is another tensor.
    if storage_users(rows) != 2 or rows.storage_offset() != 0 or not rows.is_contiguous():
        return False
    memory = rows.untyped_storage()
    # Memory that torch has not allocated cannot be resized.
    return memory.resizable() and memory.nbytes() >= size * rows.stride(0) * rows.element_size()
