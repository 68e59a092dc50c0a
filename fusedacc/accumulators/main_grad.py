"""The attribute `main_grad` of parameters: the sum, to which modules of other libraries add by themselves.

Note [main_grad]
Megatron-Core, TransformerEngine, Apex and others add a weight's gradient to `weight.main_grad` inside their
backward. Then they return no gradient, or a dummy gradient and set `weight.grad_added_to_main_grad`. They
call no code of fusedacc before they add, and may be the first that run in a backward pass. So these rules
hold for the sum:

- It is the same memory as long as the wrapper lives, and holds zeros when a window begins.
- Its scale is 1 while modules may add. So gradients are added as they are, and the sums are divided when
  the window's last backward pass ends, or at the update.
- It becomes the slot's sum (`ParamGrads.begin_sum`) when the parameter's AccumulateGrad node runs. Before
  that the parameter has no gradient, as in PyTorch.

The wrapper does not set `grad_added_to_main_grad`. Without the attribute, modules return no gradient. So a
weight that is also used elsewhere gets the other gradient alone, and not its sum with a dummy gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.local_parts import is_distributed
from .memory import cut
from .param import Lane, Slot

MAIN_GRAD = "main_grad"
#: Modules set it to True when they have added.
FLAG = "grad_added_to_main_grad"
#: If True, the gradient that a module returns counts although the flag is set: it holds zeros, to which
#: autograd has added the gradients of other uses of the weight.
COUNTS_ANYWAY = "zero_out_wgrad"
#: If True, TransformerEngine overwrites `main_grad` in each backward pass.
OVERWRITES = "overwrite_main_grad"
_GET_STATE = "__getstate__"


class MainGrads:
    """The `main_grad` of the trained parameters among `slots`, a list that the owner may append to."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        lanes: dict[Lane, list[Slot]] = {}
        for slot in slots:
            if slot.param.requires_grad and slot.param.is_leaf and not is_distributed(slot.param):
                lanes.setdefault(slot.lane, []).append(slot)
        for (device, _, dtype), of_lane in lanes.items():
            layouts = [(slot.param.shape, slot.strides) for slot in of_lane]
            memory, totals = cut(layouts, dtype, device)
            memory.zero_()
            for slot, total in zip(of_lane, totals, strict=True):
                slot.main_grad = total

    @staticmethod
    def check(slots: Sequence[Slot]) -> None:
        """Raise ValueError unless each of these parameters can get a `main_grad`."""
        for slot in slots:
            if is_distributed(slot.param):
                raise ValueError(
                    f"main_grad=True does not support parameter {slot.name!r}, which is a DTensor (FSDP2 or "
                    "tensor parallelism); allowed: main_grad=False, or plain parameters with data_parallel="
                )
            if getattr(slot.param, OVERWRITES, False):
                raise ValueError(
                    f"main_grad=True: parameter {slot.name!r} has {OVERWRITES}=True, so modules would "
                    "overwrite what earlier micro-batches have added; allowed: False"
                )
            if getattr(slot.param, MAIN_GRAD, None) is not None:
                raise ValueError(
                    f"main_grad=True: parameter {slot.name!r} has a main_grad already, which other code has "
                    "set, for example Megatron's DistributedDataParallel; allowed: parameters without one"
                )

    def follow(self, slot: Slot) -> None:
        """Show the sum as `main_grad` if the parameter is trained, and hide it if not. Allocate the sum again
        if the parameter has another shape, dtype or device.
        """
        param = slot.param
        if not (param.requires_grad and param.is_leaf):
            hide(slot)
            if slot.accumulator is None and param.grad is not slot.main_grad:
                slot.main_grad = None
            return
        former = slot.main_grad
        device, _, dtype = slot.lane
        described = device, dtype, param.shape, slot.strides
        if former is None or (former.device, former.dtype, former.shape, former.stride()) != described:
            total = torch.empty_strided(param.shape, slot.strides, dtype=dtype, device=device).zero_()
            if former is not None and former.shape == param.shape:
                total.copy_(former)
            if slot.accumulator is not None:
                slot.accumulator = total
            slot.main_grad = total
        show(slot)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Context: `main_grad` is other memory, and what modules add there is dropped. All parameters
        share it, because no code reads it.
        """
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        shown = [slot for slot in self._slots if slot.main_grad is not None and is_shown(slot)]
        for slot in shown:
            device, _, dtype = slot.lane
            sizes[device, dtype] = max(slot.param.numel(), sizes.get((device, dtype), 0))
        memory = {
            (device, dtype): torch.zeros(size, device=device, dtype=dtype)
            for (device, dtype), size in sizes.items()
        }
        for slot in shown:
            device, _, dtype = slot.lane
            unused = memory[device, dtype].as_strided(slot.param.shape, slot.strides)
            setattr(slot.param, MAIN_GRAD, unused)
        try:
            yield
        finally:
            for slot in shown:
                if is_shown(slot):
                    setattr(slot.param, MAIN_GRAD, slot.main_grad)


def show(slot: Slot) -> None:
    """Set the parameter's `main_grad` to the slot's. Pickles and copies of the parameter do not have it."""
    param = slot.param
    setattr(param, MAIN_GRAD, slot.main_grad)
    setattr(param, _GET_STATE, _state_without_ours(param.__dict__))


def hide(slot: Slot) -> None:
    """Remove what `show` has set."""
    if not is_shown(slot):
        return
    slot.param.__dict__.pop(MAIN_GRAD, None)
    slot.param.__dict__.pop(_GET_STATE, None)


def move(slot: Slot, total: Tensor) -> None:
    """Replace the slot's `main_grad` by other memory, which holds the same values."""
    slot.main_grad = total
    if is_shown(slot):
        show(slot)


def leave(slot: Slot) -> None:
    """Remove what `show` and modules have set."""
    if is_shown(slot):
        hide(slot)
        slot.param.__dict__.pop(FLAG, None)


def is_shown(slot: Slot) -> bool:
    """Whether the parameter has what `show` has set, and not a `main_grad` of other code."""
    return _GET_STATE in slot.param.__dict__


def _state_without_ours(attributes: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return a `__getstate__` for a parameter with these attributes, which leaves ours out."""
    ours = (MAIN_GRAD, FLAG, _GET_STATE)

    def get_state() -> dict[str, Any]:
        return {name: value for name, value in attributes.items() if name not in ours}

    return get_state


def is_sum(slot: Slot, gradient: Tensor) -> bool:
    """Whether a gradient is the slot's `main_grad` itself."""
    total = slot.main_grad
    if total is None or gradient.layout is not torch.strided or gradient.shape != total.shape:
        return False
    is_same = gradient.data_ptr() == total.data_ptr() and gradient.dtype == total.dtype
    return is_same and total.numel() > 0  # all empty tensors have the same address


def take_flag(slot: Slot, gradient: Tensor | None) -> bool:
    """Return whether a module has added this gradient to `main_grad` itself, and reset the parameter's flag.

    gradient: what the module has returned; None for nothing.
    """
    param = slot.param
    is_flagged = getattr(param, FLAG, False)
    if is_flagged:
        setattr(param, FLAG, False)
    if gradient is None or is_sum(slot, gradient):
        return True
    return is_flagged and not getattr(param, COUNTS_ANYWAY, False)
