"""The state of each parameter's `p.grad`, and every transition from one state to another.

Note [Who owns p.grad]
In a manual loop p.grad is the accumulator at any time. In a counted loop accumulators are private until the
window's last backward ends. Then they are published: p.grad is the accumulator, and what users write there
counts, until an update has consumed it. A consumed gradient stays readable in p.grad until the next backward
and is never added again. Any other tensor in p.grad was put there by autograd or the user and is a gradient,
unless a backward inside `ignore()` has left it.

Inside `ignore()` every gradient that counts is taken out of p.grad, so that autograd adds nothing to it, and
put back afterwards. The gradients of backward passes inside stay in p.grad only if no parameter's p.grad
holds a gradient that counts, and only until there is one: code that clips or logs must not see both.

`GradState` says what each state means. These methods are the only transitions, with the engine's `put` and
`publish` (csrc/autograd/slot.cpp), and its `clear_used` (engine.cpp), which does the same as `clear`.

    method                        from               to
    publish, publish_all, keep    any                PUBLISHED
    put, begin_sum, restore       any                PUBLISHED where sums are exposed, else the same
    mark_consumed                 any                PUBLISHED
    mark_user_gradients           PUBLISHED          NOT_OURS, where the user has replaced the accumulator
    mark_added_gradient           PUBLISHED          NOT_OURS, where autograd has added to it
    stash, make_private           any                NOT_OURS
    forget, clear, drop_consumed  any                NOT_OURS
    zero                          any                NOT_OURS; PUBLISHED or DTYPE_COPY in a counted loop
    place_cast                    any                DTYPE_COPY
    restore_p_grad                DTYPE_COPY         PUBLISHED; NOT_OURS, where the user has replaced the copy
    begin_autograd_gradient       any                AUTOGRAD_PENDING; NOT_OURS in a counted loop
    note_autograd_gradient        any                AUTOGRAD_PENDING
    take_autograd_gradients       AUTOGRAD_PENDING   PUBLISHED; NOT_OURS, where there is no accumulator yet
    set_aside                     any                IGNORED, where nothing is left in p.grad; else the same
    bring_back                    any                that of before, where a gradient came back; else IGNORED,
                                                     or NOT_OURS where p.grad is empty
    ignore_present                all but PUBLISHED  IGNORED
    clear_ignored                 IGNORED            NOT_OURS

Other code sets p.grad to None without a change of state, where autograd has stored a gradient that it adds
(`Accumulation`), or where there is no accumulator for an update (`Accumulators.fill_p_grad`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import torch_state
from ..kernels.tensor_identity import TensorIdentity
from . import engine
from .memory import owns_memory
from .param import GradState, Slot

NOT_OURS = GradState.NOT_OURS
PUBLISHED = GradState.PUBLISHED
DTYPE_COPY = GradState.DTYPE_COPY
AUTOGRAD_PENDING = GradState.AUTOGRAD_PENDING
IGNORED = GradState.IGNORED


class ParamGrads(engine.Sums):
    """The p.grad of each parameter; `slots` and `always_exposed` as in `Accumulators`.

    The engine's class has `current`, `put`, `publish` and `set_state`, and these fields:

    - exposed: whether users may see accumulators now: always, or once they are in p.grad.
    - consumed: counted loop: whether an update has consumed the gradients in p.grad.
    - num_ignored: how many slots are in the state IGNORED.
    """

    def __init__(self, slots: list[Slot], always_exposed: bool) -> None:
        super().__init__(always_exposed)
        self.slots = slots
        #: Whether trained parameters have a `main_grad`.
        self.has_main_grads = False
        #: What `set_aside` has taken out of p.grad. Empty outside `ignore()`.
        self._aside: dict[Slot, Former] = {}

    @property
    def holds_uncounted(self) -> bool:
        """Whether some p.grad may hold a gradient that an update has used, or that `ignore()` has left."""
        return self.consumed or self.num_ignored > 0

    def sums_for_update(self) -> SumsForUpdate:
        """Return all accumulators, without applying deferred scales."""
        slots = []
        tensors = []
        need_casts = False
        all_published = True
        for slot in self.slots:
            published = slot.grad_state == PUBLISHED
            accumulator = slot.param.grad if published else self.current(slot)
            if accumulator is None:
                continue
            slots.append(slot)
            tensors.append(accumulator)
            dtype = accumulator.dtype
            param = slot.param
            # The property, which takes a call, only where it can differ.
            plain = param.is_leaf and param.dtype is param.grad_dtype is dtype
            if not plain and slot.update_dtype != dtype:
                need_casts = True
            if not (published and slot.is_placed(accumulator)):
                all_published = False
        dtypes = {tensor.dtype for tensor in tensors}
        on_gpu = {slot.on_cuda for slot in slots}
        all_published = all_published or self.always_exposed
        return SumsForUpdate(slots, tensors, dtypes, on_gpu, need_casts, all_published)

    def with_accumulator(self, slots: Iterable[Slot]) -> list[tuple[Slot, Tensor]]:
        """Return these slots that have an accumulator, each with it, without applying deferred scales."""
        pairs = ((slot, self.current(slot)) for slot in slots)
        return [(slot, accumulator) for slot, accumulator in pairs if accumulator is not None]

    def restore(self, slot: Slot, accumulator: Tensor, published: bool) -> None:
        """Make a tensor of a checkpoint the accumulator, and p.grad if it was `published` there."""
        if slot.may_publish():
            if self.always_exposed or published:
                self.publish(slot, accumulator)
                self.exposed = True
                return
        elif self.always_exposed:
            slot.param.grad = accumulator.to(slot.update_dtype)
            return
        slot.accumulator = accumulator

    def begin_sum(self, slot: Slot) -> None:
        """Make the slot's `main_grad`, if it has one, its sum (Note [main_grad]).

        A tensor that the user has put into p.grad before the window is added to it. Raises RuntimeError if
        other code has replaced the sum in p.grad since, because modules may have added to `main_grad` too.
        """
        if not self.has_main_grads or self.begin_main_grad(slot):
            return
        if slot.grad_state in (PUBLISHED, DTYPE_COPY):
            raise RuntimeError(
                f"main_grad=True: p.grad of parameter {slot.name!r} was cleared or replaced, but its sum in "
                "main_grad was not. Allowed: optimizer.zero_grad() or discard() to clear, and writing into "
                "p.grad in place"
            )
        present = self.current(slot)
        total = slot.main_grad
        assert total is not None
        self.put(slot, total)
        if present is not None:
            total.add_(present)

    def zero_main_grads(self) -> None:
        """Write zeros to each `main_grad`."""
        if not self.has_main_grads:
            return
        totals = [slot.main_grad for slot in self.slots if slot.main_grad is not None]
        if totals:
            torch._foreach_zero_(totals)

    def forget(self, slot: Slot) -> None:
        """Drop the accumulator, and regard p.grad as the user's."""
        slot.accumulator = None
        self.set_state(slot, NOT_OURS)

    # Publishing

    @staticmethod
    def is_published(slot: Slot, accumulator: Tensor) -> bool:
        """Whether this tensor has been published as the slot's accumulator."""
        return slot.grad_state == PUBLISHED and slot.is_placed(accumulator)

    def keep(self, slots: Iterable[Slot]) -> None:
        """Make the gradients in p.grad of these slots, which have no sum, their accumulators."""
        for slot in slots:
            gradient = slot.param.grad
            if gradient is not None:
                self.publish(slot, gradient)
        self.exposed = True

    def publish_all(self) -> None:
        """Put every private accumulator into p.grad, unless p.grad holds a gradient or autograd refuses."""
        self.clear_ignored()
        for slot in self.slots:
            accumulator = slot.accumulator
            if accumulator is None or not slot.may_publish():
                continue
            present = slot.param.grad
            if present is None or not slot.is_foreign(present):
                self.publish(slot, accumulator)
        self.exposed = True

    def make_private(self) -> None:
        """Begin a window: drop consumed gradients, and make the remaining accumulators private."""
        self.drop_consumed()
        if self.exposed:
            self.mark_user_gradients()
            for slot in self.slots:
                self.stash(slot)
            self.exposed = self.always_exposed

    def stash(self, slot: Slot) -> None:
        """Take the accumulator out of p.grad, so that autograd can store a new gradient there."""
        gradient = slot.param.grad
        state = slot.grad_state
        if state == PUBLISHED:
            slot.accumulator = gradient
            if gradient is not None and not slot.needs_eager and gradient.dtype != slot.accumulate_dtype:
                slot.accumulator = gradient.to(slot.accumulate_dtype)
        elif state == DTYPE_COPY and gradient is None:
            slot.accumulator = None
        if gradient is not None and not slot.is_foreign(gradient):
            slot.param.grad = None
        self.set_state(slot, NOT_OURS)

    def mark_user_gradients(self) -> None:
        """Between windows: regard a tensor that the user has assigned to p.grad as a gradient."""
        if self.exposed:
            for slot in self.slots:
                if slot.grad_state == PUBLISHED and not slot.is_placed(slot.param.grad):
                    self.set_state(slot, NOT_OURS)

    def mark_added_gradient(self, slot: Slot) -> None:
        """Between windows, after a move: regard p.grad as a gradient if autograd has added to its zeros."""
        gradient = slot.param.grad
        if gradient is None or not self.is_published(slot, gradient):
            return
        if gradient._version != slot.placed_version:
            self.set_state(slot, NOT_OURS)

    # An update

    def place_cast(self, slot: Slot, accumulator: Tensor | None, cast: Tensor) -> None:
        """Put a cast into p.grad. `accumulator` is None if only the cast was scaled."""
        slot.accumulator = accumulator
        slot.param.grad = cast
        self.set_state(slot, DTYPE_COPY, cast)

    def restore_p_grad(self) -> None:
        """After an update, replace casts in p.grad by the accumulators where autograd accepts these. A cast
        that was scaled stays, because its accumulator was not. In a counted loop, also mark the gradients as
        consumed and detach them from their graphs.
        """
        self.consumed = not self.always_exposed
        for slot in self.slots:
            if slot.grad_state == DTYPE_COPY and slot.may_publish():
                self._drop_cast(slot)
            gradient = slot.param.grad
            if not self.always_exposed and gradient is not None:
                if gradient.requires_grad:
                    self.publish(slot, gradient.detach())  # frees its graph
                elif not slot.is_placed(gradient):
                    self.publish(slot, gradient)  # the inner optimizer has replaced it
                else:
                    slot.placed_version = gradient._version  # the update may have scaled it

    def _drop_cast(self, slot: Slot) -> None:
        gradient = slot.param.grad
        if gradient is None or not slot.is_placed(gradient):
            self.forget(slot)
        elif slot.accumulator is not None:
            self.publish(slot, slot.accumulator)
        else:
            # The cast was for a master weight: its dtype is not the parameter's.
            of_master = gradient.dtype != slot.update_dtype
            if slot.main_grad is not None and self.always_exposed:
                self.publish(slot, slot.main_grad.copy_(gradient))
            else:
                self.publish(slot, gradient.to(slot.accumulate_dtype) if of_master else gradient)

    def mark_consumed(self) -> None:
        """Mark every gradient in p.grad as used by an update already."""
        for slot in self.slots:
            if slot.param.grad is not None:
                self.publish(slot, slot.param.grad)
        self.consumed = True
        self.exposed = True

    def drop_consumed(self) -> None:
        """Drop gradients that an update has consumed; a tensor that the user has put in their place stays."""
        if not self.consumed:
            return
        self.mark_user_gradients()
        for slot in self.slots:
            gradient = slot.param.grad
            if gradient is not None and not slot.is_foreign(gradient):
                slot.param.grad = None
            self.forget(slot)
        self.consumed = False
        self.exposed = self.always_exposed

    def recognise_swapped(self, slot: Slot) -> None:
        """Recognise the gradient in p.grad after `torch.utils.swap_tensors` has given the parameter, and
        p.grad with it, another tensor.
        """
        gradient = slot.param.grad
        if gradient is not None and slot.placed is not None and not slot.is_placed(gradient):
            slot.placed = TensorIdentity(gradient)
            slot.placed_version = 0  # of a new tensor

    def check_uncounted(self, slot: Slot, *, moved: bool, hooked: bool) -> None:
        """Check a gradient that an update has used or `ignore()` has left, after its parameter has changed.

        moved: whether the parameter, and p.grad with it, was cast or moved to another device. hooked: whether
        hooks have kept autograd from storing a gradient since then. Raises RuntimeError if autograd may have
        added a gradient to this one; the two cannot be separated.
        """
        gradient = slot.param.grad
        if gradient is None or not slot.is_placed(gradient):
            return
        same = gradient._version == slot.placed_version
        if not hooked and not (same and not (moved and gradient.is_sparse)):
            raise RuntimeError(
                f"parameter {slot.name!r} was cast, moved or unfrozen or has got another AccumulateGrad node "
                "while p.grad still held a gradient that step() had used or ignore() had left, and a "
                "backward pass may have added to it since: call optimizer.zero_grad() before this change"
            )

    def drop_wrong_shape(self, slot: Slot) -> bool:
        """Counted loop, between windows: clear a consumed gradient whose parameter has changed its shape, and
        return whether the caller must drop the accumulator.
        """
        accumulator = self.current(slot)
        gradient = slot.param.grad
        if self.always_exposed or accumulator is None or accumulator.shape == slot.param.shape:
            return False
        if slot.grad_state == PUBLISHED and not slot.is_placed(gradient):
            return False  # the user has assigned it
        if gradient is not None and not slot.is_foreign(gradient):
            slot.param.grad = None
        return True

    def clear(self) -> None:
        """Forget every accumulator and clear every p.grad."""
        self.consumed = False
        self.exposed = self.always_exposed
        for slot in self.slots:
            self.forget(slot)
            if slot.param.grad is not None:
                slot.param.grad = None
        self.zero_main_grads()

    def end_window(self) -> None:
        """Counted loop, after an update: begin a window with zeros in each `main_grad`. So p.grad cannot keep
        the gradient that the update has used.
        """
        self.drop_consumed()
        self.zero_main_grads()

    def zero(self) -> None:
        """Do the same as `clear`, but leave zeros in p.grad where there is a gradient."""
        self.consumed = False
        self.exposed = True
        for slot in self.slots:
            gradient = slot.param.grad
            is_cast = slot.grad_state == DTYPE_COPY and slot.is_placed(gradient)
            if is_cast and slot.accumulator is not None and slot.may_publish():
                gradient = slot.accumulator
            self.forget(slot)
            if gradient is None:
                continue
            if slot.main_grad is not None:
                gradient = slot.main_grad
            if gradient.grad_fn is not None:
                gradient.detach_()
            else:
                gradient.requires_grad_(False)
            gradient.zero_()
            if self.always_exposed:
                slot.param.grad = gradient
            elif slot.may_publish():
                self.publish(slot, gradient.to(slot.accumulate_dtype))
            else:
                self.place_cast(slot, gradient.to(slot.accumulate_dtype), gradient)
        self.zero_main_grads()

    # What autograd stores

    def begin_autograd_gradient(self, slot: Slot) -> None:
        """Empty p.grad, so that autograd can store a gradient there that is scaled or counted later."""
        self.drop_consumed()
        if not self.always_exposed:
            if self.exposed or slot.grad_state != NOT_OURS:  # other threads may be writing to p.grad
                self.stash(slot)
        elif slot.grad_state != AUTOGRAD_PENDING:
            accumulator = self.current(slot)
            is_replaced = accumulator is not None and not slot.is_placed(accumulator)
            if accumulator is not None and is_replaced and slot.is_reduced_outside():
                # It is a view of a DistributedDataParallel's bucket, which every backward pass overwrites.
                accumulator = accumulator.clone()
            slot.accumulator = accumulator
            slot.param.grad = None
            self.set_state(slot, AUTOGRAD_PENDING)

    def note_autograd_gradient(self, slot: Slot) -> None:
        """Manual loop: regard p.grad as the first gradient of the current micro-batch."""
        self.set_state(slot, AUTOGRAD_PENDING)

    def take_autograd_gradients(self, slots: Sequence[Slot]) -> list[tuple[Slot, Tensor]]:
        """Manual loop: return the gradients that autograd has stored, and publish the accumulators."""
        stored = []
        for slot in slots:
            if slot.grad_state == AUTOGRAD_PENDING:
                gradient = slot.param.grad
                accumulator = slot.accumulator
                if accumulator is None:
                    slot.param.grad = None
                    self.forget(slot)
                else:
                    self.publish(slot, accumulator)
                if gradient is not None:
                    stored.append((slot, gradient.detach()))
        return stored

    # Gradients that do not count

    def set_aside(self, slots: Iterable[Slot]) -> None:
        """Take gradients that count out of p.grad until `bring_back`, before backward passes that do not."""
        for slot in slots:
            if not slot.is_aside:
                former = Former(slot, self.current(slot))
                self._aside[slot] = former
                slot.is_aside = True
                slot.accumulator = former.total
                if former.counts:
                    slot.param.grad = None
                if slot.param.grad is None:
                    self.set_state(slot, IGNORED)

    def bring_back(self) -> None:
        """Put gradients that `set_aside` has taken out back into p.grad. Other parameters keep gradients that
        do not count, unless some p.grad holds one that counts.
        """
        if not self._aside:
            return
        aside = self._aside
        self._aside = {}
        for slot, former in aside.items():
            if not slot.is_aside:
                continue  # a sum was put into p.grad since
            slot.is_aside = False
            total = slot.accumulator
            left = slot.param.grad
            if former.counts:
                self.set_state(slot, former.state)
                with torch.no_grad():
                    former.restore(slot)
                shown = former.gradient is not None and former.gradient is former.total
                slot.accumulator = None if shown else total
            else:
                self.set_state(slot, NOT_OURS if left is None else IGNORED, left)
        if any(slot.param.grad is not None and not slot.is_ignored() for slot in self.slots):
            self.clear_ignored()

    def ignore_present(self, slots: Sequence[Slot]) -> None:
        """Mark p.grad of these slots as not counting, unless it is the accumulator."""
        for slot in slots:
            gradient = slot.param.grad
            if slot.grad_state != PUBLISHED and gradient is not None:
                self.set_state(slot, IGNORED, gradient)

    def clear_ignored(self) -> None:
        """Set p.grad to None where it holds a gradient left by `ignore()`, or zeros, that do not count."""
        if self.num_ignored == 0:
            return
        for slot in self.slots:
            if slot.grad_state == IGNORED:
                if slot.is_ignored():
                    slot.param.grad = None
                self.set_state(slot, NOT_OURS)


@dataclass(slots=True)
class SumsForUpdate:
    """The accumulators of one update, and facts collected while listing them."""

    slots: list[Slot]
    tensors: list[Tensor]
    dtypes: set[torch.dtype]
    on_gpu: set[bool]
    need_casts: bool
    all_published: bool


class Former:
    """The p.grad of a slot before a backward pass that does not count."""

    __slots__ = ("_copy", "_placed", "_version", "counts", "gradient", "state", "total")

    def __init__(self, slot: Slot, total: Tensor | None) -> None:
        self.gradient = slot.param.grad
        self.state = slot.grad_state
        self.total = total
        self._placed = slot.placed
        self._version = slot.placed_version
        gradient = self.gradient
        is_stored = gradient is not None and slot.is_foreign(gradient)
        is_published = gradient is not None and self.state == PUBLISHED
        #: Whether p.grad holds a gradient that counts, or a copy of such gradients.
        self.counts = is_stored or is_published or self.state in (DTYPE_COPY, AUTOGRAD_PENDING)
        # p.grad may be a view of a DistributedDataParallel's bucket, which every backward pass overwrites.
        self._copy: Tensor | None = None
        may_be_view = gradient is not None and is_stored and gradient.layout is torch.strided
        if gradient is not None and may_be_view and torch_state.process_group_up():
            self._copy = None if owns_memory(gradient) else gradient.clone()

    def restore(self, slot: Slot) -> None:
        """Put it back into p.grad."""
        if self.gradient is not None and self._copy is not None:
            self.gradient.copy_(self._copy)
        slot.param.grad = self.gradient
        slot.placed = self._placed
        slot.placed_version = self._version
