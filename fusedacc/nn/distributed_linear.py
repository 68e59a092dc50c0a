"""A Linear under tensor parallelism: each rank adds its part of the weight gradient to its own shard.

The weight, the input and the output are DTensors. torch's DTensor operators compute everything except the
weight gradient, so layouts and communication are PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.local_parts import is_distributed, local
from ..kernels.rounding import Noise
from ..kernels.torch_state import runs_as_written

PARTIAL = (
    "tensor parallel, and its gradient is a partial sum over the device mesh, or in another layout than "
    "the weight"
)


def linear(patched: Any, module: Any, input: Any) -> Tensor:
    """Run the forward for DTensors. In all other cases, run the forward of the module's class."""
    weight = patched.slot.param
    if (
        not (is_distributed(weight) and is_distributed(input) and weight.requires_grad)
        or module._parameters.get("weight") is not weight
        or patched.transposed
        or not patched.may_record(module)
        or input.dtype != weight.dtype
        or torch.is_autocast_enabled(input.device.type)
    ):
        return type(module).forward(module, input)
    return DistributedLinear.apply(input, weight, module._parameters.get("bias"), patched)


class DistributedLinear(torch.autograd.Function):
    """Compute input @ weight.T + bias for DTensors."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, patched: Any) -> Tensor:
        ctx.patched = patched
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight)
        output = F.linear(input, weight, bias)
        return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output

    @staticmethod
    @runs_as_written
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        inputs = input.reshape(-1, input.shape[-1])
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = torch.mm(rows, weight).reshape(input.shape)
        if ctx.needs_input_grad[1] and not _add_in_place(ctx.patched, ctx.next_functions[1][0], rows, inputs):
            of_weight = torch.mm(rows.t(), inputs)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_input, of_weight, of_bias, None


def _add_in_place(patched: Any, node: Any, rows: Any, inputs: Any) -> bool:
    """Try to add this rank's part of rows^T inputs to its shard of the sum. Return whether it was added."""
    slot, left, right = patched.slot, _part(rows), _part(inputs)
    shard = local(slot.param)
    if not _fits(slot.param, rows, inputs) or shard.shape != (left.shape[1], right.shape[1]):
        slot.left_to = PARTIAL
        return False
    multiply = patched.product(left.dtype, left.shape[0])
    if multiply is None or not (left.numel() and right.numel()):
        return False

    def write(accumulator: Tensor, scale: float | Tensor, beta: float | Tensor, noise: Noise | None) -> None:
        multiply(accumulator, left, right, scale, beta, noise)

    return patched.accumulate_in_place(node, write, (left, right))


def _fits(weight: Any, rows: Any, inputs: Any) -> bool:
    """Whether rows^T inputs needs no communication and has the weight's placements."""
    if not (is_distributed(rows) and rows.device_mesh == inputs.device_mesh == weight.device_mesh):
        return False
    for placed, row, column in zip(weight.placements, rows.placements, inputs.placements, strict=True):
        if not (
            (placed.is_replicate() and row.is_replicate() and column.is_replicate())
            or (placed.is_shard(0) and row.is_shard(1) and column.is_replicate())
            or (placed.is_shard(1) and row.is_replicate() and column.is_shard(1))
        ):
            return False
    return True


def _part(tensor: Any) -> Tensor:
    """Return this rank's part, after waiting for pending communication."""
    part: Any = local(tensor)
    return part.wait() if hasattr(part, "wait") else part
