"""The state of parameters, sums and windows where there is no compiled module.

The classes are those of csrc/autograd/slot.h and backward_pass.h, which describe the fields, and window.h,
whose fields `WindowCounts` describes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kernels.tensor_identity import TensorIdentity


class GradState(enum.IntEnum):
    """What `p.grad` holds, and so where the accumulator is. Only `p_grad.py` and `Sums` change it.

    Native code has the same numbers (csrc/autograd/slot.h), and its slots return plain ints: use `==`.
    """

    #: fusedacc has not put anything into `p.grad`: it is None, or autograd or the user has set it. Counted
    #: loop: it is a gradient that has not been added yet, and the accumulator is private. Manual loop: it is
    #: the accumulator.
    NOT_OURS = 0
    #: `p.grad` is the accumulator, or after an update the gradient that the update has used. A tensor that
    #: the user assigns becomes the accumulator until the window ends.
    PUBLISHED = 1
    #: `p.grad` is a copy of the accumulator in the slot's `update_dtype`, for an update. The accumulator is
    #: private, or was dropped if only the copy was scaled.
    DTYPE_COPY = 2
    #: Manual loop: `p.grad` is None, or the gradient that autograd has stored for the current micro-batch. It
    #: must be scaled before it is added. The accumulator is private.
    AUTOGRAD_PENDING = 3
    #: `p.grad` was left by a backward pass inside `ignore()` and does not count. The accumulator is private
    #: in a counted loop; a manual loop has none. A tensor that the user assigns is treated as in NOT_OURS.
    IGNORED = 4


class Slot:
    """A parameter and its sum."""

    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.accumulator: Tensor | None = None
        self.main_grad: Tensor | None = None
        self.beta: float | Tensor = 1.0
        self.grad_state = GradState.NOT_OURS
        self.placed: Any = None
        self.placed_version = 0
        self.sparse_bytes: int | None = None
        self.is_aside = False
        self.is_native = False
        self.needs_eager = False
        self.in_reduce_bucket = False
        self.may_be_reduced_outside = True
        self.is_begun = False
        self.sharded = False
        self.has_path = False

    def describe_to_engine(
        self, device: torch.device, dtype: torch.dtype, accumulate_dtype: torch.dtype
    ) -> None:
        """Do nothing: only the native engine needs the description."""

    def note_seen(self) -> None:
        """Do nothing: only the native engine compares."""

    def forget_seen(self) -> None:
        """Do nothing: only the native engine compares."""

    def is_placed(self, gradient: Tensor | None) -> bool:
        """Whether this is the tensor that fusedacc last put into p.grad."""
        return self.placed is not None and gradient is not None and self.placed.refers_to(gradient)

    def is_foreign(self, gradient: Tensor) -> bool:
        """Whether autograd or the user put this gradient into p.grad, and it counts."""
        return self.grad_state != GradState.PUBLISHED and not self.is_placed(gradient)


class Sums:
    """Where the sums of a wrapper's parameters are."""

    def __init__(self, always_exposed: bool) -> None:
        self.always_exposed = always_exposed
        self.exposed = always_exposed
        self.consumed = False
        self.num_ignored = 0

    def current(self, slot: Slot) -> Tensor | None:
        """Return the sum, or None before the first gradient. It is still to be multiplied by `Slot.beta`."""
        state = slot.grad_state
        if state == GradState.PUBLISHED:
            return slot.param.grad
        if not self.always_exposed or state == GradState.AUTOGRAD_PENDING or slot.is_aside:
            return slot.accumulator
        gradient = slot.param.grad
        if state == GradState.NOT_OURS:
            return gradient
        return slot.accumulator if slot.is_placed(gradient) else gradient

    def put(self, slot: Slot, total: Tensor) -> None:
        """Make a tensor the sum: in p.grad if users see sums there, else in private."""
        state = slot.grad_state
        if state == GradState.PUBLISHED or (self.always_exposed and state != GradState.AUTOGRAD_PENDING):
            self.publish(slot, total)
        else:
            slot.accumulator = total

    def begin_main_grad(self, slot: Slot) -> bool:
        """Make `main_grad`, where there is one, the sum of a slot without a sum. Return False if the sum is
        another tensor.
        """
        if slot.main_grad is None:
            return True
        total = self.current(slot)
        if total is not None:
            return total is slot.main_grad
        if slot.grad_state != GradState.NOT_OURS:
            return False
        self.put(slot, slot.main_grad)
        return True

    def publish(self, slot: Slot, total: Tensor) -> None:
        """Make a tensor the sum and p.grad."""
        slot.is_aside = False
        slot.param.grad = total
        slot.accumulator = None
        slot.sparse_bytes = None
        if total.is_sparse:
            slot.sparse_bytes = total._values().nbytes + total._indices().nbytes
        self.set_state(slot, GradState.PUBLISHED, total)

    def set_state(self, slot: Slot, state: GradState, placed: Tensor | None = None) -> None:
        """Set the state of p.grad. placed: what was put there."""
        former = slot.grad_state
        self.num_ignored += (state == GradState.IGNORED) - (former == GradState.IGNORED)
        slot.grad_state = state
        slot.placed = None
        if placed is not None:
            slot.placed = TensorIdentity(placed)
            slot.placed_version = 0 if placed.is_inference() else placed._version


class WindowState:
    """The state of a window that decides how a backward pass is handled."""

    def __init__(self) -> None:
        self.usual_backwards = 0
        self.has_updated = False
        self.ignoring = False
        self.begin_window()

    def begin_window(self) -> None:
        """Begin the next window."""
        self.micro_step = 0
        self.in_context = False
        self.unsynchronised = False
        self.withheld = False
        self.tainted: str | None = None
        self.sum_scale: float | Tensor = 1.0
        self.begin_micro_batch()

    def begin_micro_batch(self) -> None:
        """Begin the next micro-batch."""
        self.ran = False
        self.num_backwards = 0
        self.deferred = False
        self.in_schedule = False

    def count_micro_batch(self) -> None:
        """Count the current micro-batch, and begin the next."""
        self.micro_step += 1
        self.usual_backwards = self.num_backwards
        self.begin_micro_batch()

    def note_interruption(self) -> None:
        """Taint the window: an exception has ended a backward pass that had added to the sums."""
        self.tainted = "an exception has interrupted a backward"


@dataclass(eq=False)
class BackwardPass:
    """One call of autograd's engine."""

    captures: bool = True
    scale: float | Tensor = 1.0
    ignored: bool = False
    drops: bool = False
    added: bool = False
    stored: list[Slot] = field(default_factory=list)
    reduced_outside: bool = False
    follows_reducer: bool = False
    delivered_late: bool = False
    has_ended: bool = False
    inner: bool = False
    in_python: bool = True
    identity: int = -1

    def note_stored(self, slot: Slot) -> None:
        """Record that autograd stores the slot's gradient."""
        self.stored.append(slot)
