"""Convolutions whose cast weight is kept over a window; their gradients go the usual way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..accumulators import Slot
from ..autograd.capture import Capture
from ..kernels import native_module
from .kept_cast import CastFunction
from .patched_forward import PATCHED, PatchedForward

#: Elements of a weight from which on its cast costs more than a forward in Python does.
SMALLEST = 2**15
#: Where autocast is known to cast what every convolution gets.
_DEVICES = ("cpu", "cuda")


class PatchedConvolution(PatchedForward):
    """An `nn.Conv1d`, `Conv2d` or `Conv3d`: the module's own operator, on a cast weight that is kept."""

    keeps_cast = True

    def __init__(self, module: nn.Module, slot: Slot, capture: Capture) -> None:
        super().__init__(module, slot, capture)
        native: Any = native_module.module()
        self._recorded = CastFunction.apply if native is None else native.cast_of

    def cast(self, module: Any, input: Tensor) -> Tensor | None:
        """The weight as autocast would cast it, the kept elements with a graph to it; None to leave it so."""
        if self.kept is None or self.uses_stock_forward(module, input):
            return None
        weight, device = self.slot.param, input.device.type
        if device not in _DEVICES or not torch.is_autocast_enabled(device):
            return None
        dtype = torch.get_autocast_dtype(device)
        if weight.dtype in (dtype, torch.float64) or not weight.is_floating_point():
            return None
        kept = self.kept.of(self.slot, weight, dtype)
        return None if kept is None else self._recorded(weight, kept)

    @staticmethod
    def forward(module: Any, input: Tensor) -> Tensor:
        if is_compiling():  # first: of whatever is read before it, a compiler makes guards
            return type(module).forward(module, input)
        patched = module.__dict__.get(PATCHED)
        weight = None if patched is None else patched.cast(module, input)
        if weight is None:
            return type(module).forward(module, input)
        return module._conv_forward(input, weight, module.bias)


class PatchedTransposed(PatchedConvolution):
    """An `nn.ConvTranspose1d`, `2d` or `3d`."""

    @staticmethod
    def forward(module: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if is_compiling():
            return type(module).forward(module, input, output_size)
        patched = module.__dict__.get(PATCHED)
        padded = module.padding_mode != "zeros"  # which the module refuses
        weight = None if patched is None or padded else patched.cast(module, input)
        if weight is None:
            return type(module).forward(module, input, output_size)
        own = module.stride, module.padding, module.kernel_size, len(module.kernel_size), module.dilation
        stride, padding, _, dims, dilation = own
        added = module._output_padding(input, output_size, *own)
        return _TRANSPOSED[dims](input, weight, module.bias, stride, padding, added, module.groups, dilation)


_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
#: Before anybody can have put a forward of theirs into torch's classes.
_KINDS: dict[Any, type[PatchedConvolution]] = {
    **{kind.forward: PatchedConvolution for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    **{
        kind.forward: PatchedTransposed
        for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    },
}


def kind_of(module: nn.Module, weight: Tensor | None) -> type[PatchedConvolution] | None:
    """What patches a module that runs the forward of a convolution, if its weight is worth keeping a cast of;
    None for any other."""
    if weight is None or weight.numel() < SMALLEST:
        return None
    return _KINDS.get(type(module).forward)
