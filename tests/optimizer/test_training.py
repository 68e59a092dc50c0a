"""Wrapped against stock training where `test_optim_db.py` does not look: sums, clipping by hand, autocast."""

from __future__ import annotations

import pytest
import torch
from loops import assert_close_weights, assert_equal_weights, loss_of, network, wrap
from torch import nn

import fusedacc

K, UPDATES = 4, 3


def test_a_counted_sum_of_float32_has_stocks_bits():
    stock, wrapped = network(), network()
    bare = torch.optim.SGD(stock.parameters(), lr=0.05, momentum=0.9)
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    optimizer = fusedacc.AccumulatingOptimizer(inner, K, reduction="sum")
    for seed in range(K * UPDATES):
        for model in (stock, wrapped):
            loss_of(model, seed).backward()
        optimizer.step(), optimizer.zero_grad()
        if seed % K == K - 1:
            bare.step(), bare.zero_grad()
            assert_equal_weights(stock, wrapped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [None, K])
def test_clipping_the_visible_gradient_acts_as_in_stock(dtype, steps):
    stock, wrapped = network(dtype), network(dtype)
    bare, optimizer = torch.optim.SGD(stock.parameters(), lr=0.1), wrap(wrapped, steps)
    eps = torch.finfo(dtype).eps
    for seed in range(K * 2):
        (loss_of(wrapped, seed) / (1 if steps else K)).backward()
        (loss_of(stock, seed) / K).backward()
        last = seed % K == K - 1
        if last:
            theirs, ours = (nn.utils.clip_grad_norm_(net.parameters(), 0.01) for net in (stock, wrapped))
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=20 * eps, atol=0.0)
            bare.step(), bare.zero_grad()
        if last or steps:
            optimizer.step(), optimizer.zero_grad()
    assert_close_weights(wrapped, stock, 8 * eps, eps * 0.01)


def test_autocast_trains_as_stock():
    """Float32 parameters under bfloat16 autocast: gradients reach them in float32, bit for bit."""
    stock, wrapped = network(), network()
    bare = torch.optim.AdamW(stock.parameters(), lr=0.01)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(wrapped.parameters(), lr=0.01))
    for seed in range(K * UPDATES):
        for model in (stock, wrapped):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, seed)
            loss.backward()
        if seed % K == K - 1:
            for each in (bare, optimizer):
                each.step(), each.zero_grad()
    assert_equal_weights(stock, wrapped)
