"""Random tokens that are distributed as in text."""

import math

import torch
from torch import Tensor


def text_like(count: int, height: int, device: torch.device) -> Tensor:
    """Return tokens of which the k-th most frequent has a share of about 1/k."""
    ranks = torch.exp(torch.rand(count, device=device) * math.log(height + 1)).long() - 1
    return ranks.clamp_(max=height - 1)
