"""Queries of torch's state. They run in every backward, so the cheapest check comes first."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from .dtypes import Tensors

#: Whether functions written in Python must stay out of autograd's graph. `distributed.pipelines` sets it.
no_python_functions = False
#: Whether this torch supports GPUs. Without them nothing is ever captured.
_HAS_GPUS = torch.backends.cuda.is_built() or torch.version.hip is not None


def capturing() -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    return _HAS_GPUS and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def in_compiled_autograd() -> bool:
    """Return whether compiled autograd runs this backward, which then has no final callbacks."""
    if torch._C._current_graph_task_id() == -1 or torch.compiler.is_compiling():
        return True
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and getattr(compiled, "in_compiled_autograd_region", False)


def traces_backward() -> bool:
    """Return whether Dynamo may trace a backward, in which autograd runs no hooks (torch 2.13 or newer)."""
    config = sys.modules.get("torch._dynamo.config")
    return config is not None and getattr(config, "trace_autograd_ops", False)


def in_function_mode() -> bool:
    """Return whether a torch function mode is active that may change or watch what PyTorch's functions do.

    `torch.set_default_device` is one that does neither.
    """
    if torch._C._len_torch_function_stack() == 0:
        return False
    modes = _get_current_function_mode_stack()
    return any(not type(mode).__module__.startswith(("torch.utils._device", "fusedacc.")) for mode in modes)


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


def process_group() -> list[tuple[object, str]]:
    """Return the object and the name of its attribute that is None while there is no process group."""
    if not torch.distributed.is_available():
        return []
    return [(torch.distributed.distributed_c10d._world, "_default_pg")]


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context: make a GPU the current device, which launches use."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def raw_stream(tensor: Tensor) -> int:
    """Return the address of the tensor's device's current stream; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0


_Function = TypeVar("_Function", bound=Callable[..., Any])
# Private names of torch since 2.7. Reading them imports no compiler.
_compiler: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)

#: Returns the compiler of the frames that this thread calls; None if they run uncompiled. Check
#: `torch.compiler.is_compiling()` first: Dynamo cannot trace a call of this C function.
frame_compiler: Callable[[], Any] = getattr(_compiler, "get_eval_frame_callback", type(None))


def runs_as_written(function: _Function, calls_too: bool = True) -> _Function:
    """Mark a function that Dynamo neither compiles nor looks into.

    Dynamo leaves frames of torch.nn such as `nn.Linear.forward` alone unless it inlines them; a function of
    ours in its place, or in a backward, would be compiled with further guards. It is still inlined into a
    compiled forward. Imports no compiler.

    calls_too: whether Dynamo also leaves alone what the function calls.
    """
    with contextlib.suppress(AttributeError):
        skip = _compiler._FrameAction.SKIP
        default = _compiler._FrameAction.DEFAULT
        strategy = _compiler._FrameExecStrategy(skip, skip if calls_too else default)
        _compiler.set_code_exec_strategy(function.__code__, strategy)
    return function


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
