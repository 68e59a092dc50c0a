"""Small questions about the state that torch is in.

They are asked in every backward, so that the cheapest answer comes first.
"""

from __future__ import annotations

import sys

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
    """Whether a process group is up, whose reducer (of one rank too) needs the gradients in p.grad."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def process_group() -> list[tuple[object, str]]:
    """The object and the name of its attribute that is None while no process group is up."""
    if not torch.distributed.is_available():
        return []
    return [(torch.distributed.distributed_c10d._world, "_default_pg")]


def raw_stream(tensor: Tensor) -> int:
    """The address of the stream that is current where the tensor is; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0
