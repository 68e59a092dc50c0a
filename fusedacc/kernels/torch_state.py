"""Small questions about the state that torch is in.

They are asked in every backward, so that the cheapest answer comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Whether this torch has GPUs at all: without them nothing is ever captured.
_HAS_GPUS = torch.backends.cuda.is_built() or torch.version.hip is not None


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return _HAS_GPUS and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def process_group_up() -> bool:
    """Whether a process group is up, whose reducer (of one rank too) needs the gradients in p.grad."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def raw_stream(tensor: Tensor) -> int:
    """The address of the stream that is current where the tensor is; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0
