"""One module whose `forward` is ours for a while, and its way back to stock."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..capture import Capture
from ..slot import Slot
from ..writes import Write

_grad_enabled, _tracing = torch.is_grad_enabled, torch._C._is_tracing
_transform_at_hand = torch._C._functorch.peek_interpreter_stack
ORDINARY = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})


class Site:
    """What stands in `module.forward`: the module's own computation, by a function that accumulates.

    It refers to the module and to the wrapper weakly. A copy of the module (deepcopy, pickle) gets the
    forward of its class, and so does the module itself once the wrapper is gone.

    Args:
        module: whose class has a forward that this site knows how to differentiate.
        slot: of the module's weight.
        capture: asked in every backward what is to become of the gradient.
    """

    #: The path's name, as `explain()` shows it.
    path = ""
    #: The native site and its function, where there are any.
    _native: Any = None
    _recorded: Any = None

    def __init__(self, module: torch.nn.Module, slot: Slot, capture: Capture) -> None:
        self._module: Callable[[], Any] = weakref.ref(module)
        self._capture = weakref.ref(capture)
        self._stock = type(module).forward
        self.slot = slot

    def __reduce__(self) -> tuple:
        return stock_forward, (self.module,)

    @property
    def backend(self) -> str:
        """The one that the wrapper was asked for."""
        capture = self._capture()
        return "auto" if capture is None else capture.arena.backend

    @property
    def updates(self) -> int:
        """Updates of the inner optimizer so far; its kernels write weights and bump no version."""
        capture = self._capture()
        return 0 if capture is None else capture.window.num_updates

    @property
    def module(self) -> Any:
        return self._module()

    def install(self) -> None:
        """Take the place of the module's forward."""
        self.module.forward = self

    def remove(self) -> None:
        """Give the module its class's forward back, unless somebody has put another in our place."""
        module = self.module
        if module is not None and module.__dict__.get("forward") is self:
            del module.forward

    def stands_aside(self, input: Any) -> bool:
        """Whether this call is to be stock's: nothing to accumulate, or a transform wants the operators.

        `input`: what the module was called with.
        """
        if torch.compiler.is_compiling():
            return True
        param, module = self.slot.param, self._module()
        return (
            self._capture() is None
            or type(module).forward is not self._stock
            or module._parameters.get("weight") is not param
            or not param.requires_grad
            or not _grad_enabled()
            or type(input) not in ORDINARY
            or input.layout is not torch.strided
            or input.is_nested
            or type(param) not in ORDINARY
            or param.is_meta
            or input.device != param.device
            or _transform_at_hand() is not None
            or forward_ad._current_level >= 0
            or _tracing()
        )

    def takes(
        self, node: Any, write: Write, operands: tuple[Tensor, ...], rows: Tensor | None = None
    ) -> bool:
        """As `Capture.take_in_place`, for the weight, whose AccumulateGrad node this is.

        `operands`: what `write` reads; where p.grad itself was fed to the module, not while it is written.
        """
        capture, shown = self._capture(), self.slot.param.grad
        if capture is None or (shown is not None and _share_memory(shown, operands)):
            return False
        return capture.take_in_place(self.slot, node, write, rows)


def adds(site: Callable[[], Any], *arguments: Any) -> bool:
    """The site's own `adds`, while there is one."""
    known = site()
    return known is not None and known.adds(*arguments)


def _share_memory(total: Tensor, operands: tuple[Tensor, ...]) -> bool:
    return any(torch._C._is_alias_of(total, operand) for operand in operands)  # type: ignore[attr-defined]


def stock_forward(module: torch.nn.Module) -> Any:
    """The forward of the module's class, bound."""
    return types.MethodType(type(module).forward, module)


def is_stock(module: torch.nn.Module) -> bool:
    """Whether the module runs the forward of its class."""
    forward = module.__dict__.get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward
