"""A small task on tokens: predict the next token from each of eleven."""

from collections.abc import Sequence

import torch
from comparison import difference, snapshot
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def batches(sizes: Sequence[int]) -> list[Batch]:
    """Return micro-batches with these numbers of tokens, each token with its target."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(11, (2, n), generator=generator)) for n in sizes]  # type: ignore[misc]


def tolerance(updates: int, terms: int) -> float:
    """Return the limit of `difference`: an update rounds `terms` products, and momentum 0.5 doubles that."""
    return 2 * torch.finfo(torch.float32).eps * updates * terms


def assert_near(net: nn.Module, wanted: nn.Module, updates: int) -> None:
    assert difference(snapshot(net), snapshot(wanted), snapshot(network())) < tolerance(updates, 40)
