"""Encodes a window's numbers for an exact all-reduce, and computes the bytes that gradients take on the wire.

A window's numbers are sent behind its gradients as binary digits, one element for each digit. A sum of a few
ones is exact in every dtype and in every order of the ranks. A sum of weights would be rounded.

Bytes and times per update are computed for a ring all-reduce. A ring sends two rounds of n - 1 messages, each
1/n of the data, so every rank sends 2 (n - 1) / n times the data. Latency and overlap with computation are
left out: the times are lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Binary digits before and after the point.
WHOLE, FRACTION = 62, 62
#: Elements for one number.
DIGITS = WHOLE + FRACTION
#: The most ranks whose digits a dtype adds exactly.
MOST_RANKS = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}


def encode(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Return the binary digits of non-negative numbers, lowest first: int64 of shape (values * DIGITS,).

    It does not synchronise with a device. The digits of nan or a negative number are undefined.
    """
    if any(isinstance(value, Tensor) for value in values):
        each = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
        numbers = torch.stack(each)
    else:
        numbers = torch.tensor(values, dtype=torch.float64, device=device)
    whole = numbers.floor()
    parts = torch.stack([(numbers - whole) * 2.0**FRACTION, whole], dim=1).to(torch.int64)
    return ((parts.unsqueeze(-1) >> torch.arange(WHOLE, device=device)) & 1).flatten()


def decode(digits: Tensor) -> Tensor:
    """Return the sum over the ranks from the sums of their digits: 0-dim float64 on the same device."""
    exponents = torch.arange(-FRACTION, WHOLE, dtype=torch.float64, device=digits.device)
    return (digits.to(torch.float64) * torch.exp2(exponents)).sum()


#: By scheme, for float32 parameters or sums: the dtype on the wire, and whether every micro-batch reduces.
SCHEMES = {
    "plain DDP": (torch.float32, True),
    "plain DDP, `no_sync()` before the last": (torch.float32, False),
    "fusedacc": (torch.float32, False),
    "fusedacc, `reduce_dtype=torch.bfloat16`": (torch.bfloat16, False),
}
#: The example in docs/distributed.md: 7 billion parameters, windows of 8, a link of 400 Gbit/s for each GPU.
SHOWN = {"parameters": 7_000_000_000, "micro_batches": 8, "bytes_per_second": 50e9}


def bytes_per_update(scheme: str, parameters: int, ranks: int, micro_batches: int) -> float:
    """Return the bytes that each rank sends in one window."""
    dtype, each = SCHEMES[scheme]
    return 2 * (ranks - 1) / ranks * parameters * dtype.itemsize * (micro_batches if each else 1)


def table(parameters: int, micro_batches: int, bytes_per_second: float) -> str:
    """Return a Markdown table of gigabytes and milliseconds per update, by number of ranks and scheme."""
    lines = [f"| ranks | {' | '.join(SCHEMES)} |", "|---" * (len(SCHEMES) + 1) + "|"]
    for ranks in (2, 3, 8, 64, 512, 4096, 16384):
        cells = [f"{ranks:,}"]
        for scheme, (dtype, _) in SCHEMES.items():
            sent = bytes_per_update(scheme, parameters, ranks, micro_batches)
            told = f"{sent / 1e9:.2f} GB, {sent / bytes_per_second * 1e3:,.0f} ms"
            cells.append(told if ranks <= MOST_RANKS[dtype] else "refused")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
