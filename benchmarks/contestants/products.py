"""Ways to add a layer's weight gradient into its sum, the product that computes it included.

In the registry `PRODUCT` a gradient is a pair (dy, x) of shapes (tokens, outputs) and (tokens, inputs), and
stands for dy.t() @ x of the accumulator's shape (outputs, inputs). It has no scale: a loop puts that into its
loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedacc.functional import prepare

from .accumulate import PEAK, Provider, loop, needs_cuda


def apex_product(accumulators: Sequence[Tensor], gradients: Sequence[tuple[Tensor, Tensor]], scale: float):
    import fused_weight_gradient_mlp_cuda

    def run() -> None:
        for accumulator, (dy, x) in zip(accumulators, gradients, strict=True):
            fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, dy, accumulator)

    return run


def transformer_engine_product(
    accumulators: Sequence[Tensor], gradients: Sequence[tuple[Tensor, Tensor]], scale: float
):
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    own = {}
    if "workspace" in inspect.signature(general_gemm).parameters:
        from transformer_engine.pytorch.module.base import get_workspace

        own["workspace"] = get_workspace()

    def run() -> None:
        for accumulator, (dy, x) in zip(accumulators, gradients, strict=True):
            general_gemm(
                x,
                dy,
                layout="NT",
                grad=True,
                accumulate=True,
                out=accumulator,
                out_dtype=accumulator.dtype,
                **own,
            )

    return run


def fused_product(accumulators: Sequence[Tensor], gradients: Sequence[tuple[Tensor, Tensor]]) -> int:
    """Both factors read, the sum read and written."""
    return sum(
        dy.nbytes + x.nbytes + 2 * acc.nbytes for acc, (dy, x) in zip(accumulators, gradients, strict=True)
    )


def product_then(added: Callable[[int, int, int], int]) -> Callable[[Sequence[Tensor], Sequence], int]:
    """Both factors read and the product written in their dtype; then so many bytes per element."""

    def moved(accumulators: Sequence[Tensor], gradients: Sequence[tuple[Tensor, Tensor]]) -> int:
        total = 0
        for acc, (dy, x) in zip(accumulators, gradients, strict=True):
            total += dy.nbytes + x.nbytes + acc.numel() * (dy.itemsize + added(acc.itemsize, dy.itemsize, 4))
        return total

    return moved


def addmm_out_dtype(accumulator: Tensor, pair: tuple[Tensor, Tensor], scale: float) -> None:
    dy, x = pair
    torch.addmm(accumulator, dy.t(), x, out_dtype=accumulator.dtype, out=accumulator)


def addmm(accumulator: Tensor, pair: tuple[Tensor, Tensor], scale: float) -> None:
    dy, x = pair
    accumulator.addmm_(dy.t(), x)


def product_plan(accumulators: Sequence[Tensor], gradients: Sequence[tuple[Tensor, Tensor]], scale: float):
    add = prepare(accumulators)
    return lambda: add([dy.t() @ x for dy, x in gradients])


def unequal_dtypes(accumulators: Sequence[Tensor], gradients: Sequence[tuple[Tensor, Tensor]]) -> str | None:
    if any(acc.dtype != dy.dtype for acc, (dy, _) in zip(accumulators, gradients, strict=True)):
        return "addmm_ without out_dtype needs one dtype"
    return None


def no_out_dtype(device: torch.device) -> str | None:
    if "dtype_out" not in torch.ops.aten.addmm.overloads():
        return f"torch {torch.__version__} has no addmm(out_dtype=)"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::addmm.dtype_out", device.type.upper()):
        return f"torch {torch.__version__} has no {device.type} kernel for addmm(out_dtype=)"
    return None


PRODUCT = {
    provider.name: provider
    for provider in (
        *PEAK,
        Provider(
            "addmm out_dtype",
            "torch.addmm(acc, dy.t(), x, out_dtype=acc.dtype, out=acc)",
            loop(addmm_out_dtype),
            fused_product,
            unavailable=no_out_dtype,
        ),
        Provider("addmm_", "acc.addmm_(dy.t(), x)", loop(addmm), fused_product, unsupported=unequal_dtypes),
        Provider(
            "product then fusedacc",
            "a prepared plan over dy.t() @ x, backend auto",
            product_plan,
            product_then(lambda a, g, c: g + 2 * a),
        ),
        Provider(
            "product then add_",
            "acc.add_(dy.t() @ x)",
            loop(lambda acc, pair, s: acc.add_(pair[0].t() @ pair[1])),
            product_then(lambda a, g, c: g + 2 * a),
        ),
        Provider(
            "product then cast and add_",
            "acc.add_((dy.t() @ x).to(acc.dtype))",
            loop(lambda acc, pair, s: acc.add_((pair[0].t() @ pair[1]).to(acc.dtype))),
            product_then(lambda a, g, c: 3 * a if a == g else g + 4 * a),
        ),
        Provider(
            "apex wgrad_gemm_accum",
            "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, dy, acc)",
            apex_product,
            fused_product,
            unavailable=needs_cuda("fused_weight_gradient_mlp_cuda", "Apex with --wgrad"),
            counted=False,
        ),
        Provider(
            "TransformerEngine gemm",
            "general_gemm(x, dy, layout='NT', grad=True, accumulate=True, out=acc)",
            transformer_engine_product,
            fused_product,
            unavailable=needs_cuda("transformer_engine", "TransformerEngine"),
            counted=False,
        ),
    )
}
