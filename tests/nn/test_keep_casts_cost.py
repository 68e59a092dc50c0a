"""The bytes that `keep_casts=True` saves, and the memory that it needs."""

import functools

import pytest
import torch
from kept_casts import autocast, loss_of, make
from memory import peak_of
from torch import nn
from torch.utils import checkpoint


class Wide(nn.Module):
    """Large Linear layers after a norm, so that their inputs need gradients."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed, self.norm = checkpointed, nn.LayerNorm(512)
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(6))

    def forward(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = checkpoint.checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x

    @staticmethod
    def batch(generator):
        return torch.randn(2, 512, generator=generator)


def peak_of_a_window(keep: bool, checkpointed: bool, inside: bool) -> float:
    """Return the peak bytes relative to a weight.

    `inside`: the backward runs where autocast's cache exists.
    """
    model, optimizer = make(
        functools.partial(Wide, checkpointed), keep, 3, functools.partial(torch.optim.AdamW, fused=True)
    )

    def window():
        for seed in range(3):
            with autocast(enabled=inside):
                loss_of(model, seed).backward()
            optimizer.step(), optimizer.zero_grad()

    window()
    return peak_of(window) / sum(layer.weight.numel() for layer in model.layers)


@pytest.mark.parametrize("inside", [False, True])
def test_peak_memory_is_that_of_autocasts_cache(inside):
    ours, theirs = (peak_of_a_window(keep, False, inside) for keep in (True, False))
    assert ours <= theirs + 0.05


def test_peak_memory_with_activation_checkpointing():
    """Either one block's casts exist at a time, or all."""
    ours, theirs = (peak_of_a_window(keep, True, False) for keep in (True, False))
    assert 0.05 < ours - theirs <= 2.05
