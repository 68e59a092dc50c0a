"""Models that go through a sequence step by step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class LSTM(nn.Module):
    """Tokens int64 [batch, length] to logits [batch, length, words]."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.words(tokens))[0])


class Mamba(nn.Module):
    """Tokens int64 [batch, length] to logits [batch, length, words]."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Scan(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers + 1))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        return self.head(self.norms[-1](x))


class Scan(nn.Module):
    """A selective state space, [batch, length, width] to the same, `states` numbers to a channel."""

    def __init__(self, width: int, states: int = 8, kernel: int = 4) -> None:
        super().__init__()
        inner, self.states, self.rank = 2 * width, states, max(1, width // 16)
        self.enter, self.leave = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.mix = nn.Conv1d(inner, inner, kernel, padding=kernel - 1, groups=inner)
        self.select = nn.Linear(inner, self.rank + 2 * states, bias=False)
        self.pace = nn.Linear(self.rank, inner)
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.enter(x).chunk(2, -1)
        inner = functional.silu(self.mix(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        parts = self.select(inner).split((self.rank, self.states, self.states), -1)
        pace = functional.softplus(self.pace(parts[0])).float()
        write, read = parts[1].float(), parts[2].float()
        kept = torch.exp(pace[..., None] * -self.decay.float().exp())
        written = (pace * inner)[..., None] * write[:, :, None]
        state = torch.zeros_like(written[:, 0])
        out = []
        for keep, new, looked_at in zip(kept.unbind(1), written.unbind(1), read.unbind(1), strict=True):
            state = keep * state + new
            out.append(state @ looked_at[..., None])
        scanned = torch.cat(out, -1).transpose(1, 2).to(inner.dtype) + self.skip * inner
        return self.leave(scanned * functional.silu(gate))
