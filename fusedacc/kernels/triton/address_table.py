"""What the Triton backend's passes share: loading the kernels, and tables of addresses in device memory."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..checks import reach


@functools.cache
def load() -> tuple[ModuleType | None, str | None]:
    """The kernels, or why they cannot be had. A Triton that is there and fails to import warns, once."""
    if importlib.util.find_spec("triton") is None:
        return None, "Triton is not installed (pip install triton)"
    try:
        from . import kernels as found
    except Exception as error:
        problem = f"Triton fails to import ({type(error).__name__}: {error}); reinstall it"
        warnings.warn(f"fusedacc: {problem}. Another backend is used instead.", stacklevel=2)
        return None, problem
    return found, None


def kernels() -> ModuleType:
    """The kernels' module.

    Raises:
        RuntimeError: they cannot be had.
    """
    module, problem = load()
    if module is None:
        raise RuntimeError(problem)
    return module


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory (given that none overlap)."""
    return reach(tensor) == tensor.numel()


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def upload(words: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The table on the device and the pinned host memory that it is copied from (itself, on a CPU)."""
    if device.type == "cpu":
        return words, words
    pinned = words.pin_memory()
    return pinned.to(device, non_blocking=True), pinned


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """A launch goes to the current device, which this makes it."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def address_table(tensors: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The table of `kernels.scale_accumulate`, on the host, and the number of programs."""
    chunk = kernels().CHUNK
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
    sizes = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64)
    programs = (sizes + chunk - 1) // chunk
    first = programs.cumsum(0) - programs
    rows = torch.stack([addresses, sizes, first], dim=1)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), programs)
    return torch.cat([rows.flatten(), owner]), len(owner)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))
