"""What gradients cost on the wire, by arithmetic: bytes and time per update of ranks in a ring.

A ring adds up in two rounds of n - 1 messages, each an n-th of the whole, so every rank sends 2 (n - 1) / n
times what is reduced. Latency, and work that a transfer hides behind, are left out: the times are the least
that the link allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .numbers import MOST_RANKS


@dataclass(frozen=True)
class Way:
    """How gradients are reduced.

    Attributes:
        name: in the table.
        dtype: on the wire.
        each: whether every micro-batch reduces, and not the window's last alone.
    """

    name: str
    dtype: torch.dtype
    each: bool = False


#: Of float32 parameters, or of float32 sums.
WAYS = (
    Way("stock DDP", torch.float32, each=True),
    Way("stock DDP, `no_sync()` before the last", torch.float32),
    Way("fusedacc", torch.float32),
    Way("fusedacc, `reduce_dtype=torch.bfloat16`", torch.bfloat16),
)

#: What docs/distributed.md shows: 7 billion parameters, windows of 8, a link of 400 Gbit/s for each GPU.
SHOWN = {"parameters": 7_000_000_000, "micro_batches": 8, "bytes_per_second": 50e9}


def bytes_per_update(way: Way, parameters: int, ranks: int, micro_batches: int) -> float:
    """Bytes that each rank sends in a window of so many micro-batches."""
    return 2 * (ranks - 1) / ranks * parameters * way.dtype.itemsize * (micro_batches if way.each else 1)


def seconds_per_update(
    way: Way, parameters: int, ranks: int, micro_batches: int, bytes_per_second: float
) -> float:
    """Seconds that a link of this rate, each rank's own and in each direction, is busy in a window."""
    return bytes_per_update(way, parameters, ranks, micro_batches) / bytes_per_second


def table(
    parameters: int,
    micro_batches: int,
    bytes_per_second: float,
    counts: Sequence[int] = (2, 3, 8, 64, 512, 4096, 16384),
) -> str:
    """Gigabytes and milliseconds per update in Markdown: a row per number of ranks, a column per way."""
    lines = [f"| ranks | {' | '.join(way.name for way in WAYS)} |", "|---" * (len(WAYS) + 1) + "|"]
    for ranks in counts:
        cells = [f"{ranks:,}"]
        for way in WAYS:
            if ranks > MOST_RANKS[way.dtype]:
                cells.append("refused")
                continue
            sent = bytes_per_update(way, parameters, ranks, micro_batches)
            seconds = seconds_per_update(way, parameters, ranks, micro_batches, bytes_per_second)
            cells.append(f"{sent / 1e9:.2f} GB, {seconds * 1e3:,.0f} ms")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
