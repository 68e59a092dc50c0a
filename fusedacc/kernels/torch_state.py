"""Queries of torch's state. They run in every backward, so the cheapest check comes first."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .dtypes import Tensors
from .torch_private import (
    DefaultDeviceMode,
    current_graph_task,
    current_raw_stream,
    function_modes,
    in_compiled_autograd_region,
    num_function_modes,
)
from .torch_private import frame_compiler as frame_compiler
from .torch_private import runs_as_written as runs_as_written
from .torch_private import traces_backward as traces_backward

#: Whether functions written in Python must stay out of autograd's graph. `distributed.pipelines` sets it.
no_python_functions = False
#: Whether this torch supports GPUs. Without them nothing is ever captured.
_HAS_GPUS = torch.backends.cuda.is_built() or torch.version.hip is not None


def capturing() -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    return _HAS_GPUS and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def in_compiled_autograd() -> bool:
    """Return whether compiled autograd runs this backward, which then has no final callbacks."""
    if current_graph_task() == -1 or torch.compiler.is_compiling():
        return True
    return in_compiled_autograd_region()


def in_function_mode() -> bool:
    """Return whether a torch function mode is active that may change or watch what PyTorch's functions do.

    `torch.set_default_device` is one that does neither.
    """
    if num_function_modes() == 0:
        return False
    return any(
        not (isinstance(mode, DefaultDeviceMode) or type(mode).__module__.startswith("fusedacc."))
        for mode in function_modes()
    )


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Context in which new tensors can be used in training, also inside `torch.inference_mode()`."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def process_group_up() -> bool:
    """Return whether a process group exists, also of one rank."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context: make a GPU the current device, which launches use."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def raw_stream(tensor: Tensor) -> int:
    """Return the address of the tensor's device's current stream; 0 on a CPU."""
    return current_raw_stream(tensor.device.index) if tensor.is_cuda else 0


@contextlib.contextmanager
def on_stream(raw: int, device: torch.device) -> Iterator[None]:
    """Run the block on the existing stream with this address, and let the current stream wait for it."""
    current = torch.cuda.current_stream(device)
    if current.cuda_stream == raw:
        yield
        return
    # For the default stream, whose address is 0, `torch.cuda.ExternalStream` would create a new stream.
    stream = torch.cuda.get_stream_from_external(raw, device)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@runs_as_written
def _call_if_alive(owner: weakref.ref, method: str, *arguments: Any) -> Any:
    known = owner()
    return None if known is None else getattr(known, method)(*arguments)


def weakly(method: Any) -> Callable[..., Any]:
    """Return a function that calls a bound method while its object exists, and returns None after that."""
    return functools.partial(_call_if_alive, weakref.ref(method.__self__), method.__name__)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to another device; return it unchanged if it is there already.

    A copy to a GPU needs no wait: streams order the copy and its readers. A copy to the CPU has no such
    order, so the host waits for it.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def common_device(tensors: Tensors) -> torch.device:
    """Return where to combine numbers of several devices: the first GPU, or the first device."""
    first = tensors[0].device
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), first)
