"""Convolutions that keep their cast weight for a window. Their gradients take the usual path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..kernels import native_module
from .patched_forward import PATCHED, PatchedForward

#: The native functions. Without them no module is patched.
_native: Any = native_module.loaded()
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
#: The fewest elements of a weight whose cast costs more than a forward pass in Python.
SMALLEST = 2**15
#: Device types on which autocast casts the inputs of every convolution.
_DEVICES = ("cpu", "cuda")


class PatchedConvolution(PatchedForward):
    """An `nn.Conv1d`, `Conv2d` or `Conv3d`: runs the module's operator on a kept cast of the weight."""

    keeps_cast = True

    def cast(self, weight: Any, input: Tensor) -> Any:
        """Return the kept cast of the module's weight, with a graph to the weight.

        Returns the weight itself if autocast casts it, or nothing does.
        """
        if self.kept is None or self.left_to_torch(weight, input):
            return weight
        device = input.device.type
        if device not in _DEVICES or not torch.is_autocast_enabled(device):
            return weight
        dtype = torch.get_autocast_dtype(device)
        if weight.dtype in (dtype, torch.float64) or not weight.is_floating_point():
            return weight
        kept = self.kept.of(self.slot, weight, dtype)
        return weight if kept is None else _native.cast_of(weight, kept)

    @staticmethod
    def forward(module: Any, input: Tensor) -> Tensor:
        if is_compiling():  # first, because a compiler makes a guard of every value that is read before
            return type(module).forward(module, input)
        patched = module.__dict__.get(PATCHED)
        if patched is None or type(module).forward is not patched.stock:
            return type(module).forward(module, input)
        weight = patched.read(module, "weight")
        bias = patched.read(module, "bias")
        return module._conv_forward(input, patched.cast(weight, input), bias)


class PatchedTransposed(PatchedConvolution):
    """An `nn.ConvTranspose1d`, `2d` or `3d`."""

    @staticmethod
    def forward(module: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if is_compiling():
            return type(module).forward(module, input, output_size)
        patched = module.__dict__.get(PATCHED)
        if (
            patched is None
            or type(module).forward is not patched.stock
            or module.padding_mode != "zeros"  # the module refuses it
            or not isinstance(module.padding, tuple)  # this too
        ):
            return type(module).forward(module, input, output_size)
        function, dims = _TRANSPOSED[patched.stock]
        output_padding = module._output_padding(
            input, output_size, module.stride, module.padding, module.kernel_size, dims, module.dilation
        )
        weight = patched.read(module, "weight")
        bias = patched.read(module, "bias")
        return function(
            input,
            patched.cast(weight, input),
            bias,
            stride=module.stride,
            padding=module.padding,
            output_padding=output_padding,
            groups=module.groups,
            dilation=module.dilation,
        )


# Read at import, before other code can replace the forwards of torch's classes.
#: The function and the number of dimensions of each transposed convolution.
_TRANSPOSED: dict[Any, tuple[Any, int]] = {
    nn.ConvTranspose1d.forward: (F.conv_transpose1d, 1),
    nn.ConvTranspose2d.forward: (F.conv_transpose2d, 2),
    nn.ConvTranspose3d.forward: (F.conv_transpose3d, 3),
}
_KINDS: dict[Any, type[PatchedConvolution]] = {
    **{kind.forward: PatchedConvolution for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    **dict.fromkeys(_TRANSPOSED, PatchedTransposed),
}


def kind_of(module: nn.Module, weight: Tensor | None) -> type[PatchedConvolution] | None:
    """Return the class for a module with a convolution's forward and a large weight; None for others."""
    if weight is None or weight.numel() < SMALLEST:
        return None
    return _KINDS.get(type(module).forward)
