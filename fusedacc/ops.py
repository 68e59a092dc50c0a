"""Loads the native library once and gives its operators fake implementations.

The library registers `torch.ops.fusedacc.*` by itself; it uses no CPython API, so one file serves every
Python, and the LibTorch stable ABI, so it serves torch 2.10 and later.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY = Path(__file__).with_name("libfusedacc.so")
#: `kChunkElements` of csrc/common/work.h: the elements behind one partial norm.
CHUNK_ELEMENTS = 8192
REINSTALL = "pip install --no-build-isolation --no-deps --force-reinstall fusedacc"


@functools.cache
def load_error() -> str | None:
    """Loads the library on the first call; returns None if it is loaded, else why not and what to do."""
    if not LIBRARY.exists():
        return (
            f"{LIBRARY.name} is not there: fusedacc was installed without a C++ compiler. "
            f"Install g++ (and nvcc for CUDA), then run: {REINSTALL}"
        )
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        problem = (
            f"{LIBRARY} does not load under torch {torch.__version__}: {error}. "
            f"It needs torch 2.10 or later; to build it again run: {REINSTALL}"
        )
        warnings.warn(f"fusedacc: {problem}. Triton or plain torch is used instead.", stacklevel=2)
        return problem
    _register_fakes()
    return None


def built_with() -> dict[str, Any]:
    """What the loaded library is: its path, the torch and CUDA it was built with, its CUDA architectures
    (an empty list: built without CUDA) and the vector instructions its CPU kernels use on this machine.

    Raises RuntimeError if the library is not loaded.
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
def _reference_brackets() -> tuple[Callable[[], None], Callable[[], None]]:
    library = ctypes.PyDLL(str(LIBRARY))  # its functions are called with the GIL held
    brackets = library.fusedacc_keep_references, library.fusedacc_drop_references
    for function in brackets:
        function.argtypes, function.restype = (), None
    return brackets


def call(operator: Callable[..., Any], *arguments: Any) -> Any:
    """`operator(*arguments)` of the loaded library, at three quarters of the cost for lists of small tensors.

    Operators run without the GIL, and recent torch takes it once for every tensor that is let go without it;
    here the library keeps its references until the GIL is held again.
    """
    keep, drop = _reference_brackets()
    keep()
    try:
        return operator(*arguments)
    finally:
        drop()


def _check_fake(accumulators: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    if len(accumulators) != len(gradients):
        raise RuntimeError(f"fusedacc: {len(accumulators)} accumulators but {len(gradients)} gradients")
    for index, (accumulator, gradient) in enumerate(zip(accumulators, gradients, strict=True)):
        for what, of_sum, of_gradient in (
            ("device", accumulator.device, gradient.device),
            ("shape", accumulator.shape, gradient.shape),
        ):
            if of_sum != of_gradient:
                raise RuntimeError(
                    f"fusedacc: gradients[{index}] has {what} {of_gradient} but its accumulator has {of_sum}"
                )


def _check_not_meta(plan: Tensor, gradients: Sequence[Tensor], *factors: Tensor | None) -> None:
    """A meta tensor among real ones brings a call here; without this it would return with nothing done."""
    others = [factor for factor in factors if factor is not None]
    if plan.device.type != "meta" and any(tensor.device.type == "meta" for tensor in (*gradients, *others)):
        raise RuntimeError("fusedacc: a gradient, the scale or keep is on meta")


def _fake_partials(tensors: Sequence[Tensor]) -> Tensor:
    chunks = sum((tensor.numel() + CHUNK_ELEMENTS - 1) // CHUNK_ELEMENTS for tensor in tensors)
    return torch.empty(chunks, dtype=torch.float64, device=tensors[0].device if tensors else "cpu")


def _register_fakes() -> None:
    @torch.library.register_fake("fusedacc::scale_accumulate_")
    def _(
        accumulators: list[Tensor],
        gradients: list[Tensor],
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        overwrite: Sequence[bool] = (),
        keep_tensor: Tensor | None = None,
        keep: float = 1.0,
    ) -> None:
        _check_fake(accumulators, gradients)
        if accumulators:
            _check_not_meta(accumulators[0], gradients, scale_tensor, keep_tensor)

    @torch.library.register_fake("fusedacc::prepare")
    def _(accumulators: list[Tensor]) -> Tensor:
        # As csrc/ops/tensor_checks.h lays it out.
        words = 7 + sum(5 + 2 * tensor.dim() + (3 if tensor.numel() else 0) for tensor in accumulators)
        return torch.empty(words, dtype=torch.int64, device="cpu")

    @torch.library.register_fake("fusedacc::accumulate_prepared_")
    def _(
        plan: Tensor,
        gradients: list[Tensor],
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        overwrite: Sequence[bool] = (),
        keep_tensor: Tensor | None = None,
        keep: float = 1.0,
    ) -> None:
        _check_not_meta(plan, gradients, scale_tensor, keep_tensor)

    @torch.library.register_fake("fusedacc::scale_accumulate_norm_")
    def _(
        accumulators: list[Tensor],
        gradients: list[Tensor],
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        overwrite: Sequence[bool] = (),
        norm_type: float = 2.0,
        keep_tensor: Tensor | None = None,
        keep: float = 1.0,
    ) -> Tensor:
        _check_fake(accumulators, gradients)
        if accumulators:
            _check_not_meta(accumulators[0], gradients, scale_tensor, keep_tensor)
        return _fake_partials(accumulators)

    @torch.library.register_fake("fusedacc::accumulate_prepared_norm_")
    def _(
        plan: Tensor,
        gradients: list[Tensor],
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        overwrite: Sequence[bool] = (),
        norm_type: float = 2.0,
        keep_tensor: Tensor | None = None,
        keep: float = 1.0,
    ) -> Tensor:
        _check_not_meta(plan, gradients, scale_tensor, keep_tensor)
        return _fake_partials(gradients)

    @torch.library.register_fake("fusedacc::norm_partials")
    def _(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
        if tensors:
            _check_not_meta(tensors[0], tensors)
        return _fake_partials(tensors)

    @torch.library.register_fake("fusedacc::finish_norm")
    def _(partials: list[Tensor], norm_type: float = 2.0, wide: bool = False) -> tuple[Tensor, Tensor]:
        device = partials[0].device if partials else "cpu"
        dtype = torch.float64 if wide else torch.float32
        return torch.empty((), dtype=dtype, device=device), torch.empty((), device=device)

    @torch.library.register_fake("fusedacc::gemm_accumulate_")
    def _(
        accumulator: Tensor,
        left: Tensor,
        right: Tensor,
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        keep_tensor: Tensor | None = None,
        keep: float = 1.0,
        way: int = 0,
    ) -> None:
        torch._check(accumulator.dim() == left.dim() == right.dim() == 2, lambda: "fusedacc: not matrices")
        for size, other in (
            (left.shape[0], right.shape[0]),
            (left.shape[1], accumulator.shape[0]),
            (right.shape[1], accumulator.shape[1]),
        ):
            torch._check(
                size == other,
                lambda: (
                    f"fusedacc: left {tuple(left.shape)} and right {tuple(right.shape)} do not go into "
                    f"accumulator {tuple(accumulator.shape)}"
                ),
            )
        others = [tensor for tensor in (left, right, scale_tensor, keep_tensor) if tensor is not None]
        if any(tensor.device != accumulator.device for tensor in others):
            raise RuntimeError("fusedacc: left, right, scale or keep is not on the accumulator's device")

    @torch.library.register_fake("fusedacc::accumulate_rows_")
    def _(
        table: Tensor,
        indices: Tensor,
        gradients: Tensor,
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        padding: int = -1,
        by_frequency: bool = False,
    ) -> None:
        wanted = (indices.shape[0], table.shape[1])
        if gradients.shape != wanted:
            raise RuntimeError(f"fusedacc: gradients has shape {gradients.shape}; it must be {wanted}")
        _check_not_meta(table, [indices, gradients], scale_tensor)


load_error()
