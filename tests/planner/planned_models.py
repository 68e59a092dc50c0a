"""Small models of each kind whose memory is predicted, with their batches and losses."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedacc
from fusedacc.planner import Plan, plan
from fusedacc.planner.prediction import Batch, Predictor, recipe_of

CPU = torch.device("cpu")


class Block(nn.Module):
    """Attention and an MLP with dropout, on (batch, length, width)."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(0.1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class Checkpointed(nn.Module):
    """Blocks that are run again in the backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Tied(nn.Module):
    """Embedding and head are one weight."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.block, self.head.weight = Block(width), self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.words(tokens)))


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.words(tokens))[0])


class Adapted(nn.Module):
    """A frozen Linear and two small ones beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10))


def convolutions() -> nn.Module:
    def layer(channels: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*layer(3, 32), nn.MaxPool2d(2), *layer(32, 32), *last)


def adapted() -> nn.Module:
    return nn.Sequential(Adapted(128, 4), nn.GELU(), Adapted(128, 4), nn.Linear(128, 10))


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs).float().flatten(0, -2), labels.flatten())


def under_autocast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return classified(model, batch)


def rows(count: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, *shape), torch.randint(10, (count,))


def text(count: int, length: int = 24) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(64, (count, length + 1))
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


@dataclasses.dataclass(frozen=True)
class Kind:
    make: Callable[[], nn.Module]
    draw: Callable[[], Any]


KINDS = {
    "mlp": Kind(mlp, lambda: rows(64, 128)),
    "convolutions": Kind(convolutions, lambda: rows(8, 3, 24, 24)),
    "checkpointed": Kind(lambda: Checkpointed(64), lambda: text(8)),
    "recurrent": Kind(lambda: Recurrent(128), lambda: text(8)),
    "tied": Kind(lambda: Tied(64, 128), lambda: text(8)),
    "adapted": Kind(adapted, lambda: rows(64, 128)),
}


def adamw(model: nn.Module, /, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([own for own in model.parameters() if own.requires_grad], 1e-3, **how)


def wrapped(model: nn.Module, /, steps: int | None = 2, **how: Any) -> fusedacc.AccumulatingOptimizer:
    return fusedacc.AccumulatingOptimizer(adamw(model), steps, **how)


def predicted_and_measured(
    model: nn.Module, optimizer: torch.optim.Optimizer, sample: Any, loss_fn: Any = classified, steps: int = 2
) -> tuple[int, int]:
    batch = Batch(sample)
    predictor = Predictor(model, recipe_of(optimizer), batch, loss_fn, CPU, lambda size: None)
    predicted = predictor.peak(batch.size, steps).bytes
    measured, why = predictor.measured_peak(batch.size, steps)
    assert measured is not None, why
    return predicted, measured


def planned(
    model: nn.Module, optimizer: torch.optim.Optimizer, sample: Any, batch: int = 64, **how: Any
) -> Plan:
    """A plan within 1 GiB, and without a real update, where `how` does not say otherwise."""
    given = {"loss_fn": classified, "verify": False, "memory_budget": "1GiB"} | how
    return plan(model, optimizer, sample, global_batch_size=batch, **given)
