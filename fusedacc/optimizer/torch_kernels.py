"""What torch's own optimizer kernels get wrong, with the wrapper or without: found by trying, and told."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

#: Lengths of vectors, in elements, of the CPUs that torch has kernels for.
VECTORS = (4, 8, 16, 32, 64, 128)


@functools.cache
def unwritten_from(dtype: torch.dtype) -> int | None:
    """From how many elements on torch's fused SGD on a CPU leaves parameters unwritten; None: it does not.

    In torch 2.13 its loop over full vectors of 16-bit parameters stores nothing, only the rest is written
    (pytorch/pytorch#191763).
    """
    with _disable_current_modes(), torch.no_grad():
        for size in VECTORS:
            param, gradient = torch.zeros(size, dtype=dtype), torch.ones(size, dtype=dtype)
            torch._fused_sgd_(
                [param],
                [gradient],
                [],
                weight_decay=0.0,
                momentum=0.0,
                lr=1.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=True,
            )
            if not bool(param.all()):
                return size
    return None


def warn_of_unwritten(inner: Optimizer, groups: Iterable[dict[str, Any]], stacklevel: int) -> None:
    """Warn where a step of `inner` leaves a parameter of these groups of it unwritten.

    Args:
        stacklevel: the caller's, as of `warnings.warn`.
    """
    if not isinstance(inner, torch.optim.SGD):
        return
    for param in itertools.chain.from_iterable(group["params"] for group in groups if group.get("fused")):
        if param.device.type == "cpu" and param.dtype in (torch.bfloat16, torch.float16):
            size = unwritten_from(param.dtype)
            if size is not None and param.numel() >= size:
                dtype = str(param.dtype)[6:]
                warnings.warn(
                    f"SGD(fused=True) of torch {torch.__version__} leaves {dtype} parameters of {size} "
                    "elements and more on a CPU unwritten, but for what fills no vector: they do not train, "
                    "with this wrapper or without (pytorch/pytorch#191763). Use fused=False, or "
                    "master_weights=True",
                    stacklevel=stacklevel + 1,
                )
                return
