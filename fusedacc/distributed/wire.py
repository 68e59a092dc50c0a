"""Computes the bytes that gradients take on the wire.

Bytes and times per update are computed for a ring all-reduce. A ring sends two rounds of n - 1 messages, each
1/n of the data, so every rank sends 2 (n - 1) / n times the data. Latency and overlap with computation are
left out: the times are lower bounds.
"""

from __future__ import annotations

import torch

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
    dtype, reduces_each = SCHEMES[scheme]
    reductions = micro_batches if reduces_each else 1
    return 2 * (ranks - 1) / ranks * parameters * dtype.itemsize * reductions


def table(parameters: int, micro_batches: int, bytes_per_second: float) -> str:
    """Return a Markdown table of gigabytes and milliseconds per update, by number of ranks and scheme."""
    lines = [f"| ranks | {' | '.join(SCHEMES)} |", "|---" * (len(SCHEMES) + 1) + "|"]
    for ranks in (2, 3, 8, 64, 512, 4096, 16384):
        cells = [f"{ranks:,}"]
        for scheme in SCHEMES:
            sent = bytes_per_update(scheme, parameters, ranks, micro_batches)
            cells.append(f"{sent / 1e9:.2f} GB, {sent / bytes_per_second * 1e3:,.0f} ms")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
