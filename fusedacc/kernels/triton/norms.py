"""Norms by Triton: a table of addresses for each dtype, one launch for it, and one small launch at the end.

A tensor that is not dense is copied first (its size read and written once more).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import launch_events
from ..checks import overlaps_itself
from ..dtypes import computation_dtype
from ..norm_kind import INFINITY, norm_kind
from . import address_table as shared


def partials(tensors: Sequence[Tensor], norm_type: float) -> tuple[Tensor, list[Tensor]]:
    """A float64 norm for each program's chunk, and, in a graph capture, the pinned memory that it reads."""
    kernels = shared.kernels()
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        plain = tensor.detach()
        if not shared.is_dense(plain) or overlaps_itself(plain):
            plain = plain.contiguous()
        by_dtype.setdefault(plain.dtype, []).append(plain)
    tables = [(group, *shared.address_table(group)) for group in by_dtype.values()]
    device = tensors[0].device
    found = torch.empty(sum(programs for *_, programs in tables), dtype=torch.float64, device=device)
    pinned, first = [], 0
    for group, words, programs in tables:
        if programs == 0:
            continue
        dtype = group[0].dtype
        with shared.on_device(device):
            table, source = shared.upload(words, device)
            if shared.capturing(device):
                pinned.append(source)
            kernels.norm_partials[(programs,)](
                table,
                found[first : first + programs],
                len(group),
                dtype=shared.triton_dtype(dtype),
                wide=shared.triton_dtype(computation_dtype(dtype)),
                infinity=norm_kind(norm_type) is INFINITY,
                num_warps=kernels.WARPS,
            )
        if launch_events.watching:
            launch_events.launched("triton::norm_partials", group, [found[first : first + programs]])
        first += programs
    return found, pinned


def finish(partials: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The norm of all partials, and 1.0 or 0.0: whether one is not finite."""
    kernels = shared.kernels()
    together = torch.cat(list(partials)) if len(partials) > 1 else partials[0].contiguous()
    norm = together.new_empty((), dtype=dtype)
    found = together.new_empty((), dtype=torch.float32)
    options = {"infinity": norm_kind(norm_type) is INFINITY, "num_warps": kernels.WARPS}
    last = together
    with shared.on_device(together.device):
        if together.numel() > kernels.MOST_PARTIALS:
            last = together.new_empty(-(-together.numel() // kernels.CHUNK))
            kernels.join_partials[(last.numel(),)](together, together.numel(), last, **options)
        kernels.finish_norm[(1,)](last, last.numel(), norm, found, **options)
    if launch_events.watching:
        launch_events.launched("triton::finish_norm", [together], [norm, found])
    return norm, found
