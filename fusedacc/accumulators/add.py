"""Adds gradients to accumulators. The first gradient becomes the accumulator or is written into a buffer.

Note [Who owns a gradient]
A gradient that only this package refers to may become the accumulator as it is (`memory.is_sole`): no other
code can write to it, or see it written. Every other gradient is read, not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..kernels import checks
from ..kernels.dtypes import PAIRS, Number, is_deferrable
from ..kernels.local_parts import are_alike, is_distributed, local, placed_as
from ..kernels.rounding import round_into_
from .deferred_scale import is_one, to_device_of
from .in_place import InPlaceWriter
from .memory import is_sole
from .param import GradState, Lane, Slot, new_sums
from .passes import Passes
from .sparse_rows import append_rows, owned_rows, scaled


class Adder:
    """Adds gradients to accumulators."""

    def __init__(self, passes: Passes, in_place: InPlaceWriter) -> None:
        self._passes = passes
        self._in_place = in_place
        self._grads = passes.grads
        self._deferred = passes.deferred
        self._noise = passes.noise

    def add(self, slots: Sequence[Slot], gradients: list[Tensor], scale: Number) -> None:
        """Compute acc += scale * gradient for each slot of one lane, in one pass; the list of gradients is
        emptied.

        A first gradient becomes the accumulator, with a deferred scale, if it has the accumulate dtype and no
        other code refers to it. scale: must not change afterwards.
        """
        if not slots:
            return
        with self._passes.lock:
            self._in_place.complete(slots)
            self._add(slots, gradients, scale)
            gradients.clear()

    def _add(self, slots: Sequence[Slot], gradients: list[Tensor], scale: Number) -> None:
        grads = self._grads
        if grads.has_main_grads:
            for slot in slots:
                grads.begin_sum(slot)
        slots = self._add_eager_ones(slots, gradients, scale)
        accumulators: list[Any] = [grads.current(slot) for slot in slots]
        if all(map(Slot.fits, slots, accumulators)):
            self._passes.add(accumulators, gradients, scale, slots, overwrite=False, exposed=grads.exposed)
        else:
            self._add_some_first(slots, gradients, scale)

    def _add_eager_ones(
        self, slots: Sequence[Slot], gradients: list[Tensor], scale: Number
    ) -> Sequence[Slot]:
        """Add gradients that do not fit their lane one by one, and return the remaining slots."""
        dtype = slots[0].lane[1] if slots else None
        strided = torch.strided
        if all(gradient.dtype is dtype and gradient.layout is strided for gradient in gradients):
            return slots
        ordinary = []
        for index, slot in enumerate(slots):
            gradient = gradients[index]
            if gradient.layout is not strided:
                slot.needs_eager = True
            if slot.needs_eager or gradient.dtype is not dtype:
                self.add_eagerly(slot, gradient, scale)
            else:
                ordinary.append(index)
        del gradient
        gradients[:] = [gradients[index] for index in ordinary]
        return [slots[index] for index in ordinary]

    def _add_some_first(self, slots: Sequence[Slot], gradients: list[Tensor], scale: Number) -> None:
        """Add where some slot has no accumulator yet, or the user has assigned one to p.grad."""
        grads = self._grads
        passes = self._passes
        may_adopt = slots[0].lane[1] == slots[0].lane[2] and not any(slot.in_reduce_bucket for slot in slots)
        without_sum = [] if may_adopt else [slot for slot in slots if grads.current(slot) is None]
        sums = dict(zip(without_sum, new_sums(without_sum), strict=True)) if without_sum else {}
        if len(sums) == len(slots) and not grads.exposed:
            passes.add(list(sums.values()), gradients, scale, slots, overwrite=True, exposed=False)
            for slot, new_sum in sums.items():
                slot.accumulator = new_sum
            return
        # The pass: its slots, and for each an accumulator, a gradient, and whether it is overwritten.
        added: list[Slot] = []
        accumulators: list[Any] = []
        terms: list[Tensor] = []
        overwrite: list[bool] = []
        # Slots whose gradient has become the accumulator without a pass.
        adopted: list[Slot] = []
        for index, slot in enumerate(slots):
            accumulator = grads.current(slot)
            is_new = accumulator is None
            if accumulator is None:
                device, _, dtype = slot.lane
                needs_no_pass = may_adopt and (is_one(scale) or self._may_defer(slot, scale))
                if may_adopt and slot.obeys_layout(gradients[index]) and is_sole(gradients, index):
                    accumulator = gradients[index]
                elif may_adopt:
                    accumulator = torch.empty_strided(
                        slot.param.shape, slot.strides, dtype=dtype, device=device
                    )
                    needs_no_pass = needs_no_pass and self._noise.rounds(dtype)
                    if needs_no_pass:  # round as often as where the gradient becomes the sum
                        accumulator.copy_(gradients[index])
                else:
                    accumulator = sums[slot]
                if needs_no_pass:
                    grads.put(slot, accumulator)
                    adopted.append(slot)
                    continue
            elif not slot.fits(accumulator):
                self.add_eagerly(slot, gradients[index], scale)
                continue
            added.append(slot)
            accumulators.append(accumulator)
            terms.append(gradients[index])
            overwrite.append(is_new)
        if not is_one(scale):
            self._deferred.defer(adopted, scale)
        if self._noise.rounds(slots[0].accumulate_dtype):
            self._noise.skip(adopted)
        flags = overwrite if len(set(overwrite)) > 1 else any(overwrite)
        passes.add(accumulators, terms, scale, added, overwrite=flags, exposed=grads.exposed)
        for slot, accumulator, is_new in zip(added, accumulators, overwrite, strict=True):
            if is_new:
                grads.put(slot, accumulator)

    def _may_defer(self, slot: Slot, scale: Number) -> bool:
        """Whether scaling later gives the same bits, and the user cannot see the accumulator."""
        if self._grads.always_exposed or slot.grad_state == GradState.PUBLISHED:
            return False
        return self._is_deferrable(scale, slot.accumulate_dtype)

    def _is_deferrable(self, scale: Number, dtype: torch.dtype) -> bool:
        """Extend `dtypes.is_deferrable`: with stochastic rounding always defer, which rounds once less."""
        return self._noise.rounds(dtype) or is_deferrable(scale, dtype)

    def add_mixed(self, slots: Iterable[Slot], gradients: Iterable[Tensor], scale: Number) -> None:
        """Do the same as `add` for gradients of any kind and lane."""
        lanes: dict[Lane, tuple[list[Slot], list[Tensor]]] = {}
        for slot, gradient in zip(slots, gradients, strict=True):
            is_usual = type(gradient) in checks.GRADIENT_TYPES and not slot.needs_eager
            if is_usual and gradient.dtype == slot.lane[1]:
                slots_of_lane, gradients_of_lane = lanes.setdefault(slot.lane, ([], []))
                slots_of_lane.append(slot)
                gradients_of_lane.append(gradient)
            else:
                self.add_eagerly(slot, gradient, scale)
        for slots_of_lane, gradients_of_lane in lanes.values():
            self.add(slots_of_lane, gradients_of_lane, scale)

    def add_part(self, slot: Slot, gradient: Tensor, scale: Number, adoptable: bool = False) -> bool:
        """Add this rank's part of a DTensor with a kernel, or return False if no kernel supports it."""
        term = local(gradient)
        dtype = slot.accumulate_dtype
        with self._passes.lock:
            self._in_place.complete([slot])
            accumulator = self._grads.current(slot)
            exposed = self._grads.exposed
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
                self._passes.run([into], [term], scale, [slot], overwrite=True, exposed=False)
                self._grads.put(slot, placed_as(gradient, into))
                return True
            if accumulator is None or not (is_distributed(accumulator) and checks.is_plain(into)):
                return False
            if not are_alike(accumulator, gradient):
                return False
            beta = slot.beta
            self._passes.run([into], [term], scale, [slot], overwrite=False, exposed=exposed, beta=beta)
            self._deferred.discharge([slot])
            if exposed:
                increment_version([accumulator])
            return True

    def add_eagerly(self, slot: Slot, gradient: Tensor, scale: Number, *, is_unshared: bool = False) -> None:
        """Add with plain torch: sparse and complex gradients, subclasses, dtype pairs without a kernel.
        Sparse accumulators and subclasses are rounded to nearest, because torch decides when it adds up
        repeated indices. is_unshared: whether only the caller refers to the gradient.
        """
        with self._passes.lock:
            if is_distributed(gradient) and self.add_part(slot, gradient, scale):
                return
            self._in_place.complete([slot])
            self._grads.begin_sum(slot)
            accumulator = self._grads.current(slot)
            if gradient.is_sparse:
                is_added = self._add_rows(slot, accumulator, gradient, scale, is_unshared=is_unshared)
                if is_added:
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
                    total = term
                    term = torch.empty_like(term, dtype=dtype)
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
        self, slot: Slot, accumulator: Tensor | None, gradient: Tensor, scale: Number, *, is_unshared: bool
    ) -> bool:
        """Add a sparse gradient to an empty or sparse sum, or return False for a dense sum."""
        grads = self._grads
        deferred = self._deferred
        if accumulator is None:
            rows = owned_rows(gradient, slot.accumulate_dtype, is_unshared=is_unshared)
            is_deferred = not is_one(scale) and self._may_defer(slot, scale) and not slot.in_reduce_bucket
            if not (is_deferred or is_one(scale)):
                rows._values().mul_(to_device_of(scale, rows))
            grads.put(slot, rows)
            if is_deferred:
                deferred.defer([slot], scale)
            return True
        if not accumulator.is_sparse or accumulator.sparse_dim() != gradient.sparse_dim():
            return False
        if accumulator.is_coalesced() and gradient.is_coalesced():  # torch keeps their sum coalesced
            return False
        expected_rows = None if grads.exposed else slot.num_rows  # the user may hold an old p.grad
        total = append_rows(accumulator, slot.beta, gradient, scale, expected_rows)
        slot.num_rows = total._values().shape[0]
        grads.put(slot, total)
        deferred.discharge([slot])
        return True
