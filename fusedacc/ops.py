"""Loads the native library once and gives its operators fake implementations.

The library registers `torch.ops.fusedacc.*` by itself; it uses no CPython API, so one file serves every Python,
and the LibTorch stable ABI, so it serves torch 2.10 and later.
"""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY = Path(__file__).with_name("libfusedacc.so")


@functools.cache
def load_error() -> str | None:
    """Loads the library on the first call; returns None if it is loaded, else why not and what to do."""
    if not LIBRARY.exists():
        return (
            f"{LIBRARY.name} is not there: fusedacc was installed without a C++ compiler. "
            "Install g++ (and nvcc for CUDA), then run: pip install --no-build-isolation --force-reinstall --no-deps fusedacc"
        )
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        problem = (
            f"{LIBRARY} does not load under torch {torch.__version__}: {error}. "
            "It needs torch 2.10 or later; build it again with: "
            "pip install --no-build-isolation --force-reinstall --no-deps fusedacc"
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
    return {"path": str(LIBRARY), **json.loads(torch.ops.fusedacc.build_info())}


def _register_fakes() -> None:
    @torch.library.register_fake("fusedacc::scale_accumulate_")
    def _(
        accumulators: list[Tensor],
        gradients: list[Tensor],
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        overwrite: list[bool] = [],  # noqa: B006  (a schema default)
    ) -> None:
        if len(accumulators) != len(gradients):
            raise RuntimeError(f"{len(accumulators)} accumulators but {len(gradients)} gradients")

    @torch.library.register_fake("fusedacc::prepare")
    def _(accumulators: list[Tensor]) -> Tensor:
        return torch.empty(
            torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64, device="cpu"
        )

    @torch.library.register_fake("fusedacc::accumulate_prepared_")
    def _(
        plan: Tensor,
        gradients: list[Tensor],
        scale_tensor: Tensor | None = None,
        scale: float = 1.0,
        overwrite: list[bool] = [],  # noqa: B006  (a schema default)
    ) -> None:
        return None


load_error()
