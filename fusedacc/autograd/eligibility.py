"""Who takes a parameter's gradient, and why not somebody faster: one table, for the hooks and `explain()`.

The first case that holds decides. The native hooks have those of a gradient by the same names and in the same
order (csrc/autograd/hook.h); what runs for each gradient spells the ordinary case out, and comes here
with the rest.
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
    """Who adds a gradient. `Capture.receive` acts on this alone."""

    #: autograd drops the gradient.
    NOBODY = "none"
    #: There is nothing to add: a module has added the gradient already, or there is none.
    DONE = "done"
    #: autograd stores it in p.grad; there it counts, and is collected where p.grad is not the accumulator.
    AUTOGRAD = "stock"
    #: Plain torch adds what no kernel takes.
    TORCH = "eager"
    #: A module of the model, inside its backward.
    MODULE = "module"
    #: FSDP2 puts it into p.grad, from where a kernel adds it.
    SHARD = "fsdp2"
    #: One launch for many gradients.
    KERNEL = "multi_tensor"


@dataclass(frozen=True)
class Case:
    """One reason why a gradient goes one way.

    Attributes:
        name: as the native hooks have it.
        taker: who adds the gradient.
        why: the reason in words, for `explain()`; empty where there is more to say than a sentence.
        of_parameter: whether it holds for all gradients of a parameter; None: nothing to be said of all.
        of_gradient: whether it holds for the gradient at hand; None: decided for a backward as a whole.
        lasts: whether one such gradient makes plain torch add all later ones of the parameter.
    """

    name: str
    taker: Taker
    why: str
    of_parameter: Callable[[Slot], bool] | None
    of_gradient: Callable[[Slot, Tensor | None], bool] | None
    lasts: bool = False


def _is_frozen(slot: Slot) -> bool:
    return not slot.param.requires_grad


def _is_hooked(slot: Slot) -> bool:
    return bool(slot.param._post_accumulate_grad_hooks)


def _needs_eager(slot: Slot) -> bool:
    return slot.needs_eager


def _is_plain(gradient: Tensor) -> bool:
    return type(gradient) in GRADIENT_TYPES and gradient.layout is torch.strided


FROZEN = Case(
    "frozen",
    Taker.NOBODY,
    "frozen: requires_grad is False",
    _is_frozen,
    lambda slot, _: _is_frozen(slot),  # since the forward: autograd drops it
)
NOT_A_LEAF = Case(
    "not_a_leaf",
    Taker.TORCH,
    "not a leaf: autograd stores no gradient; one put into p.grad counts",
    lambda slot: not slot.param.is_leaf,
    None,
)
SHARDED = Case(
    "sharded",
    Taker.SHARD,
    "sharded by FSDP2, which averages the gradients of all ranks and leaves each its shard",
    lambda slot: slot.sharded,
    None,
)
REDUCED_OUTSIDE = Case(
    "reduced_outside",
    Taker.AUTOGRAD,
    "a reducer that data_parallel= does not name (DistributedDataParallel, FSDP1, ...) reads p.grad: "
    "autograd fills it",
    lambda slot: slot.reduced_outside,
    None,
)
POST_ACCUMULATE_HOOK = Case(
    "post_accumulate_hook",
    Taker.AUTOGRAD,
    "a post-accumulate-grad hook needs p.grad: autograd fills it",
    _is_hooked,
    lambda slot, _: _is_hooked(slot),
)
ABSENT = Case(
    "absent",
    Taker.DONE,
    "",
    None,
    lambda _, gradient: gradient is None,
)
NOT_PLAIN = Case(
    "not_plain",
    Taker.TORCH,
    "sparse, or of a subclass",
    None,
    lambda _, gradient: gradient is not None and not _is_plain(gradient),
    lasts=True,
)
NEEDS_EAGER = Case(
    "needs_eager",
    Taker.TORCH,
    "sparse, complex or of a subclass: plain torch adds what no kernel takes",
    _needs_eager,
    lambda slot, _: _needs_eager(slot),
)
OTHER_LANE = Case(
    "other_lane",
    Taker.TORCH,
    "of another dtype or device than its parameter",
    None,
    lambda slot, gradient: (
        gradient is not None and (gradient.dtype is not slot.lane[1] or gradient.device != slot.lane[0])
    ),
)
WEIGHT_HOOK = Case(
    "weight_hook",
    Taker.KERNEL,
    "a hook on the weight looks at its gradient, which is written for it",
    lambda slot: bool(slot.paths and slot.param._backward_hooks),
    None,
)
IN_MODULE = Case("in_module", Taker.MODULE, "", lambda slot: bool(slot.paths), None)
ORDINARY = Case("ordinary", Taker.KERNEL, "", lambda _: True, lambda *_: True)

CASES = (
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
#: Those that a hook can meet.
GRADIENT_CASES = tuple(case for case in CASES if case.of_gradient is not None)


def of_parameter(slot: Slot) -> Case:
    """The way that this parameter's gradients take, as long as none is unlike its parameter."""
    return next(case for case in CASES if case.of_parameter is not None and case.of_parameter(slot))


def of_gradient(slot: Slot, gradient: Tensor | None) -> Case:
    """The way of the gradient at hand, in a backward whose gradients are taken."""
    return next(case for case in GRADIENT_CASES if case.of_gradient(slot, gradient))  # type: ignore[misc]
