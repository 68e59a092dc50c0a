"""The networks: recurrent ones, MLPs, recommendation, convolutions, and transformers."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.demo.model import Block

from .. import experts as stacked


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
        inner = 2 * width
        self.states = states
        self.rank = max(1, width // 16)
        self.enter = nn.Linear(width, 2 * inner, bias=False)
        self.leave = nn.Linear(inner, width, bias=False)
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
        write = parts[1].float()
        read = parts[2].float()
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


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
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
        one = channels
        two = 2 * channels
        four = 4 * channels
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


def heads(width: int) -> int:
    """Return the number of attention heads, which have a width of 64."""
    return max(1, width // 64)


class GPT(nn.Module):
    """A decoder over `words` tokens: int64 [batch, length] to logits [batch, length, words].

    The head and the embedding share one weight. `mlp` makes the module that replaces each block's MLP.
    """

    def __init__(
        self, words: int, width: int, layers: int, length: int, mlp: Callable[[], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential()
        for _ in range(layers):
            block = Block(width, heads(width))
            block.mlp = mlp() if mlp else block.mlp
            self.blocks.append(block)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        for weight in (self.words.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.words(tokens) + positions)))


def _routed(router: nn.Module, tokens: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the float32 weights and the numbers of each token's `top` experts."""
    shares, chosen = router(tokens).float().softmax(-1).topk(top)
    return shares / shares.sum(-1, keepdim=True), chosen


class Experts(nn.Module):
    """[batch, length, width] to the same shape: each token goes to the two experts its router prefers."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        shares, chosen = _routed(self.router, tokens, 2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            weighted = expert(tokens[token]) * shares.to(x.dtype)[token, place, None]
            out = out.index_add(0, token, weighted.to(out.dtype))
        return out.view_as(x)


class StackedExperts(nn.Module):
    """The same with all experts stacked in two weights, as in Transformers.

    The experts multiply in the dtype of their weights, also under autocast: `grouped_mm` takes no other
    dtype, and Transformers casts to it as well.
    """

    def __init__(self, shape: stacked.Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.top = shape.top
        self.experts = stacked.Experts(shape, "grouped")

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        dtype = self.experts.down.dtype
        shares, chosen = _routed(self.router, tokens, self.top)
        return self.experts(tokens.to(dtype), chosen, shares.to(dtype)).to(x.dtype).view_as(x)


class ViT(nn.Module):
    """Images [batch, 3, image, image] to logits [batch, classes]."""

    def __init__(self, image: int, patch: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.summary = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.summary.expand(len(images), -1, -1).to(patches.dtype), patches], 1)
        return self.head(self.norm(self.blocks(tokens + self.positions)[:, 0]))


class Attention(nn.Module):
    """Attention from `x` to `seen`, both [batch, length, width]. T5 has no biases."""

    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads(width)
        self.query = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, seen: Tensor, causal: bool = False) -> Tensor:
        projected = self.query(x), self.key(seen), self.value(seen)
        split = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected)
        attended = functional.scaled_dot_product_attention(*split, is_causal=causal)
        return self.out(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A block with attention; with `crossed` also to an encoder's output. `rms`: T5's norm, and no biases."""

    def __init__(self, width: int, crossed: bool = False, causal: bool = False, rms: bool = False) -> None:
        super().__init__()
        norm = nn.RMSNorm if rms else nn.LayerNorm
        self.causal = causal
        self.norms = nn.ModuleList(norm(width) for _ in range(2 + crossed))
        self.attention = Attention(width, bias=not rms)
        self.crossed = Attention(width, bias=not rms) if crossed else None
        wide, narrow = (nn.Linear(a, b, bias=not rms) for a, b in ((width, 4 * width), (4 * width, width)))
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, self.causal)
        if self.crossed is not None:
            x = x + self.crossed(self.norms[2](x), encoded)
        return x + self.mlp(self.norms[1](x))


class T5(nn.Module):
    """int64 [batch, source] and [batch, target] to logits [batch, target, words], with one table of words."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=0.02)
        self.encoder = nn.Sequential(*(Layer(width, rms=True) for _ in range(layers)))
        crossed = {"crossed": True, "causal": True, "rms": True}
        self.decoder = nn.ModuleList(Layer(width, **crossed) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        encoded = self.norms[0](self.encoder(self.words(source)))
        x = self.words(target)
        for layer in self.decoder:
            x = layer(x, encoded)
        return self.head(self.norms[1](x))
