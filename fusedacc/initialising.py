"""Distributed checkpoint's way of making the state of an empty optimizer appear.

It assigns zero gradients by hand, sets every lr to 0 and calls step() once
(torch.distributed.checkpoint.state_dict, `_init_optim_state`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from .accumulators import Slot
from .ending import Ending


def is_asked_for(inner: Optimizer, slots: Sequence[Slot]) -> bool:
    """Whether a `step()` now is that call."""
    if inner.state or any(group.get("lr", 1.0) != 0.0 for group in inner.param_groups):
        return False
    given = [
        None if slot.param.grad is slot.placed() else slot.param.grad
        for slot in slots
        if slot.param.requires_grad
    ]
    # Reading the zeros waits for the device, but only while there is no state yet and every lr is 0.
    return bool(given) and all(g is not None and g.grad_fn is None and not g.any() for g in given)


def make_state(ending: Ending, slots: Sequence[Slot]) -> None:
    """Let the inner optimizer make its state from the zeros in p.grad."""
    with_zeros = [slot for slot in slots if slot.param.grad is not None]
    with ending.on_masters(with_zeros):
        for slot in with_zeros if ending.masters is not None else ():
            gradient, slot.param.grad = slot.param.grad, None
            slot.param.grad = gradient.to(slot.param.dtype)  # type: ignore[union-attr]
        ending.inner.step()
