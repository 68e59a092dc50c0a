"""The table of cases that decide which code adds a gradient, used by the hooks and `explain()`.

The first case that applies decides. IN_MODULE and WEIGHT_HOOK are for `explain()` only: modules check the
same conditions themselves (`Capture.take_in_place`), and hooks do not receive what a module adds. The native
hooks have the cases of single gradients by the same names and in the same order (csrc/autograd/hook.h). The
hooks test the ordinary case themselves, and use this table for all others.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..accumulators import Slot
from ..kernels.checks import GRADIENT_TYPES


class Taker(enum.Enum):
    """The code that adds a gradient. `Capture.receive` depends only on this."""

    #: Autograd drops the gradient.
    NOBODY = "none"
    #: Nothing is left to add: a module has already added the gradient, or there is none.
    DONE = "done"
    #: Autograd stores it in p.grad. If p.grad is not the accumulator, it is collected from there.
    AUTOGRAD = "stock"
    #: Plain torch, where no kernel supports the gradient.
    TORCH = "eager"
    #: A module of the model, inside its backward pass.
    MODULE = "module"
    #: FSDP2 puts it into p.grad, and a kernel adds it from there.
    SHARD = "fsdp2"
    #: One launch for many gradients; on a CPU with native hooks, one call for each.
    KERNEL = "multi_tensor"


@dataclass(frozen=True)
class Case:
    """One case of the table."""

    #: In the native hooks.
    name: str
    taker: Taker
    #: The reason in words for `explain()`; empty if `explain()` composes it.
    why: str = ""
    #: Whether it applies to all gradients of a parameter; None if that cannot be said.
    of_parameter: Callable[[Slot], bool] | None = None
    #: Whether it applies to this gradient; None if it is decided for a whole backward pass.
    of_gradient: Callable[[Slot, Tensor | None], bool] | None = None
    #: Whether after one such gradient plain torch adds all later gradients of the parameter.
    lasts: bool = False


def _is_frozen(slot: Slot, gradient: Tensor | None = None) -> bool:
    return not slot.param.requires_grad


def _is_hooked(slot: Slot, gradient: Tensor | None = None) -> bool:
    return bool(slot.param._post_accumulate_grad_hooks)


def _is_reduced_outside(slot: Slot, gradient: Tensor | None = None) -> bool:
    return slot.is_reduced_outside()


def _needs_eager(slot: Slot, gradient: Tensor | None = None) -> bool:
    return slot.needs_eager


def _is_plain(gradient: Tensor) -> bool:
    return type(gradient) in GRADIENT_TYPES and gradient.layout is torch.strided


def _is_of_lane(slot: Slot, gradient: Tensor) -> bool:
    return gradient.dtype is slot.lane[1] and gradient.device == slot.lane[0]


# Also if it was frozen after the forward pass.
FROZEN = Case("frozen", Taker.NOBODY, "frozen: requires_grad is False", _is_frozen, _is_frozen)
NOT_A_LEAF = Case(
    "not_a_leaf",
    Taker.TORCH,
    "not a leaf: autograd stores no gradient; one put into p.grad counts",
    lambda slot: not slot.param.is_leaf,
)
SHARDED = Case(
    "sharded",
    Taker.SHARD,
    "sharded by FSDP2, which averages the gradients of all ranks and leaves each its shard",
    lambda slot: slot.sharded,
)
REDUCED_OUTSIDE = Case(
    "reduced_outside",
    Taker.AUTOGRAD,
    "a reducer that data_parallel= does not name (DistributedDataParallel, FSDP1, ...) reads p.grad: "
    "autograd fills it",
    _is_reduced_outside,
    _is_reduced_outside,
)
POST_ACCUMULATE_HOOK = Case(
    "post_accumulate_hook",
    Taker.AUTOGRAD,
    "a post-accumulate-grad hook needs p.grad: autograd fills it",
    _is_hooked,
    _is_hooked,
)
ABSENT = Case("absent", Taker.DONE, of_gradient=lambda _, gradient: gradient is None)
NOT_PLAIN = Case(
    "not_plain",
    Taker.TORCH,
    of_gradient=lambda _, gradient: gradient is not None and not _is_plain(gradient),
    lasts=True,
)
NEEDS_EAGER = Case(
    "needs_eager",
    Taker.TORCH,
    "sparse, complex or of a subclass: plain torch adds what no kernel takes",
    _needs_eager,
    _needs_eager,
)
OTHER_LANE = Case(
    "other_lane",
    Taker.TORCH,
    of_gradient=lambda slot, gradient: gradient is not None and not _is_of_lane(slot, gradient),
)
WEIGHT_HOOK = Case(
    "weight_hook",
    Taker.KERNEL,
    "a hook on the weight looks at its gradient, which is written for it",
    lambda slot: bool(slot.paths and slot.param._backward_hooks),
)
IN_MODULE = Case("in_module", Taker.MODULE, of_parameter=lambda slot: bool(slot.paths))
ORDINARY = Case("ordinary", Taker.KERNEL, "", lambda _: True, lambda *_: True)

CASES: tuple[Case, ...] = (
    FROZEN,
    NOT_A_LEAF,
    SHARDED,
    REDUCED_OUTSIDE,
    POST_ACCUMULATE_HOOK,
    ABSENT,
    NOT_PLAIN,
    NEEDS_EAGER,
    OTHER_LANE,
    WEIGHT_HOOK,
    IN_MODULE,
    ORDINARY,
)
#: The cases that a hook can meet.
GRADIENT_CASES = tuple(case for case in CASES if case.of_gradient is not None)


def of_parameter(slot: Slot) -> Case:
    """Return the case of this parameter's gradients, if they have the parameter's dtype and layout."""
    return next(case for case in CASES if case.of_parameter is not None and case.of_parameter(slot))


def of_gradient(slot: Slot, gradient: Tensor | None) -> Case:
    """Return the case of one gradient, in a backward pass whose gradients are captured."""
    return next(case for case in GRADIENT_CASES if case.of_gradient(slot, gradient))  # type: ignore[misc]
