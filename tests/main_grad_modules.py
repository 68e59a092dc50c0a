"""Stand-ins for the modules that add to `main_grad` by themselves, written from their libraries' sources.

Each does with the weight's gradient what the library's function does after its product: where it adds, which
flags it reads and sets, and what it returns to autograd.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: Fills dummy gradients, which libraries leave uninitialised. A test fails if one counts.
GARBAGE = float("nan")
#: Returns what a module's backward returns for its weight: called with the weight and its gradient.
Protocol = Callable[[Any, Tensor], Tensor | None]


def dummy(weight: Tensor) -> Tensor:
    """Return what Megatron-Core and TransformerEngine return for a weight with the flag."""
    fill = 0.0 if getattr(weight, "zero_out_wgrad", False) else GARBAGE
    return torch.full(weight.main_grad.shape, fill, dtype=weight.dtype, device=weight.device)


def megatron(weight: Any, gradient: Tensor) -> Tensor | None:
    """Follow `LinearWithGradAccumulationAndAsyncCommunication.backward` with
    `gradient_accumulation_fusion` (megatron/core/tensor_parallel/layers.py).
    """
    if weight.main_grad.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise RuntimeError("Unsupported gradient type for gradient accumulation fusion")
    weight.main_grad.add_(gradient)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return dummy(weight)


def transformer_engine(weight: Any, gradient: Tensor) -> Tensor | None:
    """Follow `_Linear.backward` with `fuse_wgrad_accumulation=True`
    (transformer_engine/pytorch/module/linear.py), which overwrites if `overwrite_main_grad` is set.
    """
    if getattr(weight, "overwrite_main_grad", False):
        weight.main_grad.copy_(gradient)
    else:
        weight.main_grad.add_(gradient)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return dummy(weight)


def apex(weight: Any, gradient: Tensor) -> Tensor | None:
    """Follow `LinearWithGradAccumulationAndAsyncCommunication.backward` with
    `gradient_accumulation_fusion` (apex/transformer/tensor_parallel/layers.py), which knows no flag.
    """
    weight.main_grad.add_(gradient)
    return None


def primus(weight: Any, gradient: Tensor) -> Tensor | None:
    """Follow `_bridge_weight_grad` of Primus's Megatron backend for Primus-Turbo
    (primus/backends/megatron/core/extensions/primus_turbo.py), which insists on the flag.
    """
    assert hasattr(weight, "main_grad")
    assert hasattr(weight, "grad_added_to_main_grad")
    weight.main_grad.add_(gradient)
    weight.grad_added_to_main_grad = True
    return dummy(weight)


def quack(weight: Any, gradient: Tensor) -> Tensor | None:
    """Follow `linear_bwd_compute_weight_grad` with `fuse_grad_accum=True` (quack/linear.py). It adds to
    `weight.grad`, takes it away and returns it, so that autograd puts it back.
    """
    if weight.grad is None:
        return gradient
    total = weight.grad
    total.add_(gradient)
    weight.grad = None
    return total


PROTOCOLS: dict[str, Protocol] = {
    "megatron": megatron,
    "transformer_engine": transformer_engine,
    "apex": apex,
    "primus": primus,
    "quack": quack,
}


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, protocol: Protocol) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight = weight
        ctx.protocol = protocol
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        product = rows.t() @ inputs.reshape(-1, inputs.shape[-1])
        return gradient @ ctx.weight, ctx.protocol(ctx.weight, product), None


class AddingLinear(nn.Linear):
    """A Linear whose weight's gradient is handled by a protocol, and its bias by autograd.

    Args:
        sizes: those of `nn.Linear`.
        protocol: one of `PROTOCOLS`.
        options: those of `nn.Linear`.
    """

    def __init__(self, *sizes: int, protocol: str = "megatron", **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.protocol = protocol
        if protocol == "primus":
            self.weight.grad_added_to_main_grad = False

    def forward(self, inputs: Tensor) -> Tensor:
        product = _Product.apply(inputs, self.weight, PROTOCOLS[self.protocol])
        return product if self.bias is None else product + self.bias
