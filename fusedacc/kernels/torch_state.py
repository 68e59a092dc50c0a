"""Small questions about the state that torch is in.

They are asked in every backward, so that the cheapest answer comes first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

#: Whether this torch has GPUs at all: without them nothing is ever captured.
_HAS_GPUS = torch.backends.cuda.is_built() or torch.version.hip is not None


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return _HAS_GPUS and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs the backward at hand, which then has no callbacks at its end."""
    if torch._C._current_graph_task_id() == -1 or torch.compiler.is_compiling():
        return True
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and getattr(compiled, "in_compiled_autograd_region", False)


def traces_backward() -> bool:
    """Whether Dynamo may put a backward into a graph, where autograd runs no hooks (torch 2.13 or newer)."""
    config = sys.modules.get("torch._dynamo.config")
    return config is not None and getattr(config, "trace_autograd_ops", False)


def process_group_up() -> bool:
    """Whether a process group is up, of one rank or more."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def process_group() -> list[tuple[object, str]]:
    """The object and the name of its attribute that is None while no process group is up."""
    if not torch.distributed.is_available():
        return []
    return [(torch.distributed.distributed_c10d._world, "_default_pg")]


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context: a GPU is the current device, to which launches go."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def raw_stream(tensor: Tensor) -> int:
    """The address of the stream that is current where the tensor is; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0


_Function = TypeVar("_Function", bound=Callable[..., Any])
# Private names of torch, here since 2.7. Reading them imports no compiler.
_compiler: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)

#: Returns what compiles the frames that this thread calls; None where they run as written. Ask
#: `torch.compiler.is_compiling()` first: Dynamo cannot trace a call of this C function.
frame_compiler: Callable[[], Any] = getattr(_compiler, "get_eval_frame_callback", type(None))


def runs_as_written(function: _Function, calls_too: bool = True) -> _Function:
    """Mark a function that Dynamo neither compiles by itself nor looks into for others to compile.

    Dynamo leaves the frames of torch.nn alone unless it inlines them, such as that of `nn.Linear.forward`; a
    function of ours in its place, or in a backward, would be compiled with further guards. It is still
    inlined into a forward that is compiled. Imports no compiler.

    calls_too: whether Dynamo also leaves alone what the function calls.
    """
    with contextlib.suppress(AttributeError):
        skip, default = _compiler._FrameAction.SKIP, _compiler._FrameAction.DEFAULT
        strategy = _compiler._FrameExecStrategy(skip, skip if calls_too else default)
        _compiler.set_code_exec_strategy(function.__code__, strategy)
    return function


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to another device; return it as it is if it is there already.

    What is read on a GPU needs no wait: streams order the copy and its readers. A copy to the CPU has no such
    order. The CPU would read memory that the GPU has not written yet, so the host waits for it.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def common_device(tensors: Sequence[Tensor]) -> torch.device:
    """Return where to bring numbers of several devices together: the first GPU, or the first device.

    On a GPU nothing has to wait for numbers of the others.
    """
    first = tensors[0].device
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), first)
