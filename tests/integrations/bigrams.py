"""The smallest task of tokens: from each of eleven, tell the next."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def batches(sizes: Sequence[int]) -> list[Batch]:
    """Micro-batches of so many tokens, each with the one that is to be told from it."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(11, (2, n), generator=generator)) for n in sizes]  # type: ignore[misc]


def tolerance(updates: int, terms: int) -> float:
    """Of `difference`: each update sums `terms` products, rounded once each; momentum 0.5 doubles it."""
    return 2 * torch.finfo(torch.float32).eps * updates * terms
