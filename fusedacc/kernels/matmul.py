"""A layer's weight gradient, multiplied straight into its sum so that the gradient is never stored.

    accumulator <- beta * accumulator + scale * left^T right

The product is summed in float32 (float64 for float64). A 16-bit accumulator is rounded to once, others once
per part of the tokens. AVX512-BF16 and AMX count subnormal numbers as zero. On a CPU there are several
methods (`GemmMethod`), and `cpu_rules` chooses among them.

The native library multiplies on a CPU. The eager backend is plain torch on any device, and the only one on
CUDA; torch's settings decide stream, workspace, determinism and TF32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import checks, cpu_rules, matmul_eager, registry
from .constants import GemmMethod, ProductMethod
from .dtypes import Number
from .lists import bump_versions
from .native import as_argument

Run = Callable[[Tensor, Tensor, Tensor, Number, Number], None]


#: Backends for products, the preferred first.
_NAMES = ("cpu", "eager")


@dataclass(frozen=True)
class Selection:
    """How to multiply: the backend, its method in words, and why it was chosen.

    Attributes:
        run: `run(accumulator, left, right, scale, beta)` does the work of `gemm_accumulate_`. For
            grouped products (`grouped`) the offsets follow the operands.
        product_method: the same for the native modules: a `ProductMethod`, or the operator's method.
    """

    name: str
    how: str
    reason: str
    run: Callable[..., None]
    product_method: int = ProductMethod.PYTHON

    @property
    def in_place(self) -> bool:
        """Whether the product needs no temporary memory."""
        return (
            self.product_method == ProductMethod.BLAS
            or self.product_method - ProductMethod.OPERATOR in _IN_PLACE
        )


#: Methods that need no temporary memory.
_IN_PLACE = (GemmMethod.RANK_K, GemmMethod.MKL)


def gemm_accumulate_(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    scale: Number = 1.0,
    beta: Number = 1.0,
    *,
    backend: str = "auto",
) -> None:
    """accumulator <- beta * accumulator + scale * left^T right, without a temporary of that size.

    Autograd does not record it; the accumulator's version is bumped. It allocates a few MB at most, and a
    copy of an operand of which neither rows nor columns are dense.

    The arguments come from a layer's backward and are not checked here. The native operator refuses unsafe
    ones before anything is modified; torch's products refuse what they cannot do.

    The accumulator is [M, N] with dense rows or columns (the row stride may exceed N). left [n, M] and right
    [n, N] are of one dtype, with any strides, share no memory with it, and n may be 0. Dtype pairs are those
    of `dtypes.PAIRS`. scale and beta are floats, or 0-dim floating tensors on the accumulator's device, read
    there. If beta is 0, the accumulator is not read and may be uninitialized. Backends are "auto", "cpu" and
    "eager"; "cuda" and "triton" have no product, so torch multiplies. Raises as `registry.select`.
    """
    if backend == "auto" and not (checks.is_plain(accumulator) and checks.is_plain(left)):
        backend = "eager"
    chosen = select(accumulator.device, accumulator.dtype, left.dtype, backend, tokens=left.shape[0])
    chosen.run(accumulator, left, right, scale, beta)


def select(
    device: torch.device,
    accumulator_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    backend: str = "auto",
    *,
    tokens: int,
    in_slices: bool = False,
) -> Selection:
    """Select how to multiply operands of one dtype into an accumulator of another on a device; errors as
    `registry.select`.

    tokens: rows of the operands. in_slices: whether temporary memory is scarce, as for the slices of a head.
    """
    name, reason = _backend(backend, device, accumulator_dtype, operand_dtype)
    if name == "eager":
        matmul_eager.passes(device, operand_dtype)
        method = matmul_eager.native_method(device, accumulator_dtype, operand_dtype)
        return Selection(name, _IN_TORCH, reason, matmul_eager.accumulate_, method)
    if in_slices and cpu_rules.loops_multiply_slices(accumulator_dtype, operand_dtype):
        loops = GemmMethod.RANK_K
    else:
        loops = cpu_rules.product_rule(accumulator_dtype, operand_dtype).method(tokens)
    return _on_cpu(accumulator_dtype, operand_dtype, loops, reason)


def describe(
    device: torch.device,
    accumulator_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    backend: str,
    *,
    in_slices: bool = False,
) -> tuple[str, str]:
    """Return the backend, and in words how it multiplies and why, by number of tokens if that matters.

    Arguments as for `select`.
    """
    name, reason = _backend(backend, device, accumulator_dtype, operand_dtype)

    def how(tokens: int) -> str:
        return select(
            device, accumulator_dtype, operand_dtype, backend, tokens=tokens, in_slices=in_slices
        ).how

    return name, f"{cpu_rules.in_words(how)}; {reason}"


def _backend(
    backend: str, device: torch.device, accumulator: torch.dtype, operand: torch.dtype
) -> tuple[str, str]:
    """Return the backend for a pair, and why."""
    name, source = registry.requested(backend)
    work = registry.Work("products", _NAMES, device, accumulator, operand)
    return registry.select_for_work(name, source, work)


def _on_cpu(accumulator: torch.dtype, operand: torch.dtype, method: GemmMethod, reason: str) -> Selection:
    if method is GemmMethod.WHOLE and operand.itemsize > 2 and operand == accumulator:
        return Selection("cpu", "BLAS into the sum", reason, _blas, ProductMethod.BLAS)
    how = _HOW[method]
    if method is GemmMethod.WHOLE and accumulator.itemsize > 2:
        how = "BLAS into the sum, of operands cast to float32 in parts"
    return Selection("cpu", how, reason, _RUNS[method], ProductMethod.OPERATOR + method)


_IN_TORCH = "torch's product"
#: What each method does, unless the dtypes say more.
_HOW = {
    GemmMethod.WHOLE: "BLAS into float32 copies of parts of the sum",
    GemmMethod.ONEDNN: "oneDNN into the sum",
    GemmMethod.RANK_K: "loops of our own into the sum",
    GemmMethod.MKL: "MKL's bfloat16 product into the sum",
}


def _blas(accumulator: Tensor, left: Tensor, right: Tensor, scale: Number, beta: Number) -> None:
    # torch's own call costs less host time than the operator, unless a factor is a tensor.
    if isinstance(scale, Tensor) or isinstance(beta, Tensor):
        _native(accumulator, left, right, scale, beta)
    else:
        with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
            accumulator.addmm_(left.t(), right, beta=beta, alpha=scale)


def _native(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    scale: Number,
    beta: Number,
    method: int = GemmMethod.WHOLE,
) -> None:
    if left.shape[0] == 0:
        matmul_eager.multiply_by_beta(accumulator, beta)
        return
    scale_tensor, scale_number = as_argument(scale)
    beta_tensor, beta_number = as_argument(beta)
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        torch.ops.fusedacc.gemm_accumulate_.default(
            accumulator, left, right, scale_tensor, scale_number, beta_tensor, beta_number, method
        )
    bump_versions([accumulator])


_RUNS = {method: functools.partial(_native, method=int(method)) for method in GemmMethod}
