"""What the pages of docs/integrations that need torch alone tell users to write."""

from __future__ import annotations

import copy

import pages
import torch
from loops import loss_of, network
from torch import nn

import fusedacc


def data(micro_batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 4, generator=generator), torch.zeros(3, 2)) for _ in range(micro_batches)]


def test_pytorch():
    model = nn.Linear(4, 2)
    given = {"model": model, "loader": data(10), "criterion": nn.MSELoss()}
    found = pages.run("pytorch", torch=torch, num_updates=3, **given)
    assert found["optimizer"].num_updates == found["scheduler"].last_epoch == 3
    assert found["optimizer"].param_groups[0]["lr"] == 0  # the cosine's end


def test_checkpoints(tmp_path):
    model = network()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model.parameters()), 4)
    for seed in range(6):
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict())
    given = {"model": model, "optimizer": optimizer, "path": tmp_path / "file", "folder": tmp_path / "folder"}
    pages.run("checkpoints", torch=torch, **given)
    assert (optimizer.num_updates, optimizer.micro_step) == (1, 2)
    assert str(optimizer.state_dict()) == str(before)
