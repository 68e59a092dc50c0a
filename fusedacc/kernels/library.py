"""The native library, libfusedacc.so: loaded once, or why not and what to do.

It registers `torch.ops.fusedacc.*`. It uses no CPython API, so one file serves every Python, and the LibTorch
stable ABI, so it serves torch 2.10 and newer.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import flops
from .checks import check_pairs, check_product
from .constants import CHUNK_ELEMENTS, plan_words
from .installation import FOLDER, how_to_build

LIBRARY = FOLDER / "libfusedacc.so"


@functools.cache
def load_error() -> str | None:
    """Load the library on the first call. Return None if it is loaded, else why not and what to do."""
    if not LIBRARY.exists():
        return (
            f"{LIBRARY.name} does not exist: fusedacc was installed without a C++ compiler. "
            f"Install g++ (and nvcc for CUDA). Then {how_to_build()}"
        )
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        problem = (
            f"{LIBRARY} does not load under torch {torch.__version__}: {error}. "
            f"It needs torch 2.10 or later. To build it again, {how_to_build()}"
        )
        warnings.warn(f"fusedacc uses Triton or plain torch, because {problem}", stacklevel=2)
        return problem
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"fusedacc::{name}", fake)
    return None


def built_with() -> dict[str, Any]:
    """Return the library's path, the torch and CUDA versions and CUDA architectures (empty without CUDA) that
    it was built with, and the vector instructions of its CPU kernels here. Raises RuntimeError if it is not
    loaded.
    """
    problem = load_error()
    if problem is not None:
        raise RuntimeError(problem)
    info = json.loads(torch.ops.fusedacc.build_info())
    return {
        "path": str(LIBRARY),
        **info,
        "cuda_architectures": re.findall(r"[^; ,]+", info["cuda_architectures"]),
    }


@functools.cache
def functions() -> ctypes.CDLL:
    """Return the library's plain C functions. The library must exist."""
    return ctypes.CDLL(str(LIBRARY))


def address_of(function: str) -> int:
    """Return the address of a plain C function, for `native_module`."""
    return ctypes.cast(getattr(functions(), function), ctypes.c_void_p).value or 0


@functools.cache
def launch_problem(device_index: int) -> str | None:
    """Return why the library's CUDA kernels cannot be launched on a GPU, or None."""
    function = functions().fusedacc_launch_problem
    function.argtypes = [ctypes.c_int32]
    function.restype = ctypes.c_char_p
    problem = function(device_index)
    return None if problem is None else problem.decode()


@functools.cache
def _reference_brackets() -> tuple[Callable[[], None], Callable[[], None]]:
    library = ctypes.PyDLL(str(LIBRARY))  # its functions are called with the GIL held
    brackets = library.fusedacc_keep_references, library.fusedacc_drop_references
    for function in brackets:
        function.argtypes = ()
        function.restype = None
    return brackets


def call(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operator of the loaded library, at three quarters of the cost for lists of small tensors.

    Operators run without the GIL, and recent torch takes it for each tensor whose last reference is dropped
    without it. Here the library keeps its references until the GIL is held again.
    """
    keep, drop = _reference_brackets()
    keep()
    try:
        return operator(*arguments)
    finally:
        drop()


# `factors`: the schema's other arguments, among them the scale and beta if they are tensors.


def _scale_accumulate(accumulators: list[Tensor], gradients: list[Tensor], *factors: Any) -> None:
    try:
        check_pairs(accumulators, gradients)
    except (TypeError, ValueError) as problem:
        raise RuntimeError(f"fusedacc: {problem}") from None
    if accumulators:
        _check_not_meta(accumulators[0], gradients, *factors)


def _check_not_meta(first: Tensor, *others: Any) -> None:
    """Raise for a meta tensor among real ones, since the fake would return with nothing done."""
    if first.device.type == "meta":
        return
    for other in others:
        tensors = other if isinstance(other, (list, tuple)) else [other]
        if any(isinstance(tensor, Tensor) and tensor.device.type == "meta" for tensor in tensors):
            raise RuntimeError("fusedacc: a gradient, the scale or beta is on meta")


def _prepare(accumulators: list[Tensor]) -> Tensor:
    return torch.empty(plan_words(accumulators), dtype=torch.int64, device="cpu")


def _norm_partials(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
    if tensors:
        _check_not_meta(tensors[0], tensors)
    chunks = sum((tensor.numel() + CHUNK_ELEMENTS - 1) // CHUNK_ELEMENTS for tensor in tensors)
    return torch.empty(chunks, dtype=torch.float64, device=tensors[0].device if tensors else "cpu")


def _finish_norm(partials: list[Tensor], norm_type: float = 2.0, wide: bool = False) -> tuple[Tensor, Tensor]:
    device = partials[0].device if partials else "cpu"
    dtype = torch.float64 if wide else torch.float32
    return torch.empty((), dtype=dtype, device=device), torch.empty((), device=device)


def _gemm_accumulate(accumulator: Tensor, *operands_and_factors: Any, operands: int = 2) -> None:
    """Also of grouped products, whose offsets are one more operand."""
    check_product(accumulator, *operands_and_factors[:operands])
    for factor in operands_and_factors[operands:]:
        if isinstance(factor, Tensor) and factor.device != accumulator.device:
            raise RuntimeError("fusedacc: scale or beta is not on the accumulator's device")


def _accumulate_rows(table: Tensor, indices: Tensor, gradients: Tensor, *factors: Any) -> None:
    wanted = (indices.shape[0], table.shape[1])
    if gradients.shape != wanted:
        raise RuntimeError(f"fusedacc: gradients has shape {gradients.shape}; it must be {wanted}")
    _check_not_meta(table, indices, gradients, *factors)


_FAKES: dict[str, Callable[..., Any]] = {
    "scale_accumulate_": _scale_accumulate,
    "prepare": _prepare,
    "accumulate_prepared_": _check_not_meta,
    "norm_partials": _norm_partials,
    "finish_norm": _finish_norm,
    "gemm_accumulate_": _gemm_accumulate,
    "grouped_accumulate_": functools.partial(_gemm_accumulate, operands=3),
    "accumulate_rows_": _accumulate_rows,
    "softmax_statistics_": _check_not_meta,
    "softmax_gradient_": _check_not_meta,
}


load_error()
flops.register_in_time()
