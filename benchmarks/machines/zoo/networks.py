"""Networks that are no transformers: recurrent ones, MLPs, recommendation, convolutions."""

import itertools
from collections.abc import Sequence

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
    """A selective state space with `states` numbers per channel; keeps the shape [batch, length, width]."""

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


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Return Linear layers from each width to the next, with ReLU between them."""
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class MLP(nn.Module):
    """Features [rows, widths[0]] to logits [rows, widths[-1]].

    This is not a bare Sequential, because Dynamo skips frames of torch's own modules when it compiles.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = mlp(widths)

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


class DLRM(nn.Module):
    """Features [samples, 13] and a row number per table, int64 [samples, tables], to a logit per sample."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = mlp((13, 512, 256, width))
        self.top = mlp((width + tables * (tables + 1) // 2, 512, 256, 1))

    def forward(self, features: Tensor, looked_up: Tensor) -> Tensor:
        dense = self.bottom(features)
        rows = [table(column) for table, column in zip(self.tables, looked_up.unbind(1), strict=True)]
        stacked = torch.stack([dense, *(row.to(dense.dtype) for row in rows)], 1)
        first, second = torch.tril_indices(stacked.shape[1], stacked.shape[1], -1)
        products = (stacked @ stacked.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([dense, products], 1))[:, 0]


class Linears(nn.Module):
    """The four Linear layers of a transformer block side by side: [tokens, 4 width] to [tokens, 9 width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.layers = nn.ModuleList(nn.Linear(*shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x[:, : layer.in_features]) for layer in self.layers], 1)


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [batch, 3, height, width] to logits [batch, classes]; each stage doubles the channels."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        stem = nn.Conv2d(3, channels, 3, 1, 1, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(channels), nn.ReLU())
        self.stages = nn.Sequential()
        for stage, before in enumerate((channels, channels, 2 * channels)):
            after = channels * 2**stage
            self.stages.append(
                nn.Sequential(Residual(before, after, 1 + (stage > 0)), Residual(after, after, 1))
            )
        self.head = nn.Linear(4 * channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


def _twice(channels: int, out: int) -> nn.Sequential:
    """Return two convolutions with group norms."""
    layers: list[nn.Module] = []
    for size in (channels, out):
        layers += [nn.Conv2d(size, out, 3, 1, 1), nn.GroupNorm(8, out), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Images [batch, 3, height, width] to the same shape; height and width are multiples of 4."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        one, two, four = channels, 2 * channels, 4 * channels
        self.down = nn.ModuleList([_twice(3, one), _twice(one, two), _twice(two, four)])
        self.widen = nn.ModuleList([nn.ConvTranspose2d(four, two, 2, 2), nn.ConvTranspose2d(two, one, 2, 2)])
        self.up = nn.ModuleList([_twice(four, two), _twice(two, one)])
        self.out = nn.Conv2d(one, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level in self.down:
            x = level(functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for widen, level, skipped in zip(self.widen, self.up, kept[1::-1], strict=True):
            x = level(torch.cat([widen(x), skipped], 1))
        return self.out(x)
