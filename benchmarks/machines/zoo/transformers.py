"""Transformers: decoders with an MLP or with experts, an image classifier, and an encoder with a decoder."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.demo.model import Block

from ...contestants import experts as stacked


class GPT(nn.Module):
    """A decoder over `words` tokens: int64 [batch, length] to logits [batch, length, words].

    The head and the embedding share one weight. `mlp` makes the module that replaces each block's MLP.
    """

    def __init__(
        self,
        words: int,
        width: int,
        layers: int,
        heads: int,
        length: int,
        mlp: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential()
        for _ in range(layers):
            block = Block(width, heads)
            block.mlp = mlp() if mlp else block.mlp
            self.blocks.append(block)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
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
        self.router, self.top = nn.Linear(shape.width, shape.experts, bias=False), shape.top
        self.experts = stacked.Experts(shape, "grouped")

    def forward(self, x: Tensor) -> Tensor:
        tokens, dtype = x.flatten(0, -2), self.experts.down.dtype
        shares, chosen = _routed(self.router, tokens, self.top)
        return self.experts(tokens.to(dtype), chosen, shares.to(dtype)).to(x.dtype).view_as(x)


class ViT(nn.Module):
    """Images [batch, 3, image, image] to logits [batch, classes]."""

    def __init__(self, image: int, patch: int, width: int, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.summary = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.summary.expand(len(images), -1, -1).to(patches.dtype), patches], 1)
        return self.head(self.norm(self.blocks(tokens + self.positions)[:, 0]))


class Attention(nn.Module):
    """Attention from `x` to `seen`, both [batch, length, width]. T5 has no biases."""

    def __init__(self, width: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)
        self.key, self.value = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, seen: Tensor, causal: bool = False) -> Tensor:
        projected = self.query(x), self.key(seen), self.value(seen)
        split = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected)
        attended = functional.scaled_dot_product_attention(*split, is_causal=causal)
        return self.out(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A block with attention in both directions; with `crossed` also to an encoder's output.

    `rms`: use T5's norm, and no biases.
    """

    def __init__(
        self, width: int, heads: int, crossed: bool = False, causal: bool = False, rms: bool = False
    ) -> None:
        super().__init__()
        norm = nn.RMSNorm if rms else nn.LayerNorm
        self.causal = causal
        self.norms = nn.ModuleList(norm(width) for _ in range(2 + crossed))
        self.attention = Attention(width, heads, bias=not rms)
        self.crossed = Attention(width, heads, bias=not rms) if crossed else None
        wide, narrow = (nn.Linear(a, b, bias=not rms) for a, b in ((width, 4 * width), (4 * width, width)))
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, self.causal)
        if self.crossed is not None:
            x = x + self.crossed(self.norms[2](x), encoded)
        return x + self.mlp(self.norms[1](x))


class T5(nn.Module):
    """int64 [batch, source] and [batch, target] to logits [batch, target, words].

    The encoder, the decoder and the head share one table of words.
    """

    def __init__(self, words: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=0.02)
        self.encoder = nn.Sequential(*(Layer(width, heads, rms=True) for _ in range(layers)))
        crossed = {"crossed": True, "causal": True, "rms": True}
        self.decoder = nn.ModuleList(Layer(width, heads, **crossed) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        encoded = self.norms[0](self.encoder(self.words(source)))
        x = self.words(target)
        for layer in self.decoder:
            x = layer(x, encoded)
        return self.head(self.norms[1](x))
