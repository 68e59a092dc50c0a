"""Convolutions that keep their cast weight for a window. Their gradients take the usual path."""

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

#: The fewest elements of a weight whose cast costs more than a forward pass in Python.
SMALLEST = 2**15
#: Device types on which autocast casts the inputs of every convolution.
_DEVICES = ("cpu", "cuda")


class PatchedConvolution(PatchedForward):
    """An `nn.Conv1d`, `Conv2d` or `Conv3d`: runs the module's operator on a kept cast of the weight."""

    keeps_cast = True

    def __init__(self, module: nn.Module, slot: Slot, capture: Capture) -> None:
        super().__init__(module, slot, capture)
        native: Any = native_module.module()
        self._recorded = CastFunction.apply if native is None else native.cast_of

    def cast(self, module: Any, input: Tensor) -> Tensor | None:
        """Return the kept cast of the weight, with a graph to the weight, or None to leave it to autocast."""
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
        if is_compiling():  # first, because a compiler makes a guard of every value that is read before
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
        padded = module.padding_mode != "zeros"  # the module refuses it
        weight = None if patched is None or padded else patched.cast(module, input)
        if weight is None:
            return type(module).forward(module, input, output_size)
        own = module.stride, module.padding, module.kernel_size, len(module.kernel_size), module.dilation
        stride, padding, _, dims, dilation = own
        added = module._output_padding(input, output_size, *own)
        return _TRANSPOSED[dims](input, weight, module.bias, stride, padding, added, module.groups, dilation)


_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
#: Read at import, before other code can replace the forwards of torch's classes.
_KINDS: dict[Any, type[PatchedConvolution]] = {
    **{kind.forward: PatchedConvolution for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    **{
        kind.forward: PatchedTransposed
        for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    },
}


def kind_of(module: nn.Module, weight: Tensor | None) -> type[PatchedConvolution] | None:
    """Return the class for a module with a convolution's forward and a large weight; None for others."""
    if weight is None or weight.numel() < SMALLEST:
        return None
    return _KINDS.get(type(module).forward)
