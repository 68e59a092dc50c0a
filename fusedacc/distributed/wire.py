"""What travels over the wire: numbers that come back as exact sums, and what gradients cost there.

A window's numbers are sent behind its gradients as binary digits, one element each: a sum of few ones is
exact in every dtype on the wire, in whatever order the ranks are added, where a sum of weights would be
rounded differently here and there.

Bytes and time per update are by arithmetic, of ranks in a ring.

A ring adds up in two rounds of n - 1 messages, each an n-th of the whole, so every rank sends 2 (n - 1) / n
times what is reduced. Latency, and work that a transfer hides behind, are left out: the times are the least
that the link allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Binary digits before and behind the point.
WHOLE, FRACTION = 62, 62
#: Elements that one number takes.
DIGITS = WHOLE + FRACTION
#: Ranks whose digits a dtype adds up exactly.
MOST_RANKS = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}


def encode(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """The digits of numbers of at least 0, each one's lowest first: zeros and ones, int64 [values * DIGITS].

    A number on a device is not waited for; where it is nan or below 0 its digits mean nothing.
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
    """The number whose digits, added up over the ranks, are these: 0-dim float64 on their device."""
    exponents = torch.arange(-FRACTION, WHOLE, dtype=torch.float64, device=digits.device)
    return (digits.to(torch.float64) * torch.exp2(exponents)).sum()


#: How gradients are reduced, of float32 parameters or sums: the dtype on the wire, and whether every
#: micro-batch reduces, and not the window's last alone.
SCHEMES = {
    "stock DDP": (torch.float32, True),
    "stock DDP, `no_sync()` before the last": (torch.float32, False),
    "fusedacc": (torch.float32, False),
    "fusedacc, `reduce_dtype=torch.bfloat16`": (torch.bfloat16, False),
}
#: What docs/distributed.md shows: 7 billion parameters, windows of 8, a link of 400 Gbit/s for each GPU.
SHOWN = {"parameters": 7_000_000_000, "micro_batches": 8, "bytes_per_second": 50e9}


def bytes_per_update(scheme: str, parameters: int, ranks: int, micro_batches: int) -> float:
    """Bytes that each rank sends in a window of so many micro-batches."""
    dtype, each = SCHEMES[scheme]
    return 2 * (ranks - 1) / ranks * parameters * dtype.itemsize * (micro_batches if each else 1)


def table(parameters: int, micro_batches: int, bytes_per_second: float) -> str:
    """Gigabytes and milliseconds per update in Markdown: a row per number of ranks, a column per scheme."""
    lines = [f"| ranks | {' | '.join(SCHEMES)} |", "|---" * (len(SCHEMES) + 1) + "|"]
    for ranks in (2, 3, 8, 64, 512, 4096, 16384):
        cells = [f"{ranks:,}"]
        for scheme, (dtype, _) in SCHEMES.items():
            sent = bytes_per_update(scheme, parameters, ranks, micro_batches)
            told = f"{sent / 1e9:.2f} GB, {sent / bytes_per_second * 1e3:,.0f} ms"
            cells.append(told if ranks <= MOST_RANKS[dtype] else "refused")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
