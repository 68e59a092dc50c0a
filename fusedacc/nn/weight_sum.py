"""A parameter whose gradient some function of ours can add to its sum inside a backward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..accumulators import Slot
from ..accumulators.in_place import Write
from ..autograd.capture import Capture
from ..kernels.checks import ORDINARY_TYPES


class WeightSum:
    """What such a function knows of the parameter, its sum, and the wrapper that has both.

    Args:
        slot: the parameter's.
        capture: asked in every backward what is to become of the gradient; referred to weakly.
    """

    def __init__(self, slot: Slot, capture: Capture) -> None:
        self._capture = weakref.ref(capture)
        self.slot = slot

    @property
    def backend(self) -> str:
        """The one that the wrapper was asked for."""
        capture = self._capture()
        return "auto" if capture is None else capture.accumulators.backend

    @property
    def updates(self) -> int:
        """Updates of the inner optimizer so far; its kernels write weights and bump no version."""
        capture = self._capture()
        return 0 if capture is None else capture.num_updates

    @property
    def node(self) -> Any:
        """The AccumulateGrad node that carries the parameter's hook; None where there is none."""
        capture = self._capture()
        return None if capture is None else capture.registry.nodes.get(self.slot, (None,))[0]

    @property
    def accumulates(self) -> bool:
        """Whether a gradient of the parameter would be added to the sum, as far as a forward can tell."""
        return self._capture() is not None and self.slot.param.requires_grad and self.is_ordinary

    @property
    def is_ordinary(self) -> bool:
        """Whether the parameter is no subclass and has memory."""
        return type(self.slot.param) in ORDINARY_TYPES and not self.slot.param.is_meta

    def adds_natively(self, *arguments: Any) -> bool:
        """Whether native code has added in the backward of a compiled graph; `arguments`: of `adds`."""
        return False

    @property
    def window(self) -> Any:
        """The wrapper's."""
        capture = self._capture()
        return None if capture is None else capture.window

    def declare(self, path: str) -> None:
        """Gradients take this way, as `explain()` shows it."""
        if path not in self.slot.paths:
            self.slot.paths += (path,)

    def begins(self) -> bool:
        """As `Capture.begin_natively`."""
        capture = self._capture()
        return capture is not None and capture.begin_natively()

    def accumulate_in_place(
        self,
        node: Any,
        write: Write,
        operands: tuple[Tensor, ...],
        by_rows: bool = False,
        part: int | None = None,
    ) -> bool:
        """As `Capture.take_in_place`, for the parameter, whose AccumulateGrad node this is.

        `operands`: what `write` reads; where p.grad itself was fed to the function, not while it is written.
        """
        capture, shown = self._capture(), self.slot.param.grad
        if capture is None or (shown is not None and _share_memory(shown, operands)):
            return False
        return capture.take_in_place(self.slot, node, write, by_rows, part)

    def deliver(self, node: Any, gradient: Tensor) -> None:
        """Do what autograd would do with a gradient that a compiled graph adds by an operator.

        Args:
            node: the parameter's AccumulateGrad node in the graph that runs.
            gradient: of the parameter, in the dtype of the products.

        Raises:
            RuntimeError: a hook was registered on the parameter after the forward.
        """
        param, capture = self.slot.param, self._capture()
        if not param.requires_grad:  # frozen since the forward
            return
        if param._backward_hooks:  # the engine will call them without a gradient
            raise RuntimeError(
                f"a hook was registered on parameter {self.slot.name!r} between a compiled forward and its "
                "backward, whose graph has no gradient for it: register hooks before the forward"
            )
        gradient = gradient.to(param.device, param.dtype)
        if capture is not None and capture.receive(self.slot, gradient, True) is not None:
            return
        if param.grad is None:
            param.grad = gradient
        else:
            param.grad.add_(gradient)


def _share_memory(total: Tensor, operands: tuple[Tensor, ...]) -> bool:
    # torch's stubs lack it; public functions ask for a storage, which sparse gradients have none of.
    return any(torch._C._is_alias_of(total, operand) for operand in operands)  # type: ignore[attr-defined]
