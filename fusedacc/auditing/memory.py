"""Memory outside of the heap, for what the audit keeps.

Sketches are made while gradients and activations are alive, and live longer than those. In glibc's heap each
of them would keep the freed memory around it from being merged and used again: the peak of a GPT of 10 M
parameters grew by 40 MB, although the audit's tensors take 3 MB.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def allocate(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return float64 memory of zeros; on the CPU outside of the heap."""
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(shape, dtype=torch.float64, device=device)
    # A forked process, such as a DataLoader's worker, must not write to it.
    memory = mmap.mmap(-1, count * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float64).view(shape)
