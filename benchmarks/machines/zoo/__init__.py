"""Models as people train them, small enough that a window of eight micro-batches takes well under a second.

Each is a plain module with its micro-batch's shapes and its loss; data are random, nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from ...contestants import experts as stacked
from . import recurrent, tables, transformers, vision

Batch = tuple[tuple[Tensor, ...], Tensor]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Over the last dimension."""
    return functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs.float(), targets)


def clicks(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits.float(), targets)


#: Blocks, loops and precisions that share a class, and more.
RECOMPILES = 64


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model, and what it is trained on.

    `make()` builds it in float32, from torch's random state; `batch(generator)` draws a micro-batch, the
    model's arguments and the targets; `loss(outputs, targets)` is float32 []. `compiled`: under
    `torch.compile`, by the modules that `regions` picks. `shapes`: in words a reader can check.
    """

    name: str
    shapes: str
    make: Callable[[], nn.Module]
    batch: Callable[[Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    regions: Callable[[nn.Module], list[nn.Module]] | None = None

    @property
    def compiled(self) -> bool:
        return self.regions is not None

    def model(self) -> nn.Module:
        model = self.make()
        if self.regions is not None:
            # Each loop has a model of its own, of one class: beyond it Dynamo would run some as written.
            torch._dynamo.config.recompile_limit = RECOMPILES
            for region in self.regions(model):
                region.compile(dynamic=False)
        return model


def _tokens(count: int, *shape: int) -> Callable[[Generator], Tensor]:
    return lambda generator: torch.randint(count, shape, generator=generator)


def _text(count: int, batch: int, length: int) -> Callable[[Generator], Batch]:
    """Random tokens, and those that follow them."""

    def draw(generator: Generator) -> Batch:
        tokens = _tokens(count, batch, length + 1)(generator)
        return (tokens[:, :-1],), tokens[:, 1:]

    return draw


def _labelled(classes: int, batch: int, *shape: int) -> Callable[[Generator], Batch]:
    """Random features or images, and a class of each."""

    def draw(generator: Generator) -> Batch:
        return (torch.randn(batch, *shape, generator=generator),), _tokens(classes, batch)(generator)

    return draw


def gpt(name: str, words: int, width: int, layers: int, length: int, compiled: bool = False) -> Entry:
    make = functools.partial(transformers.GPT, words, width, layers, max(1, width // 64), length)
    return Entry(
        name,
        f"decoder of {layers} blocks of width {width}, {words:,} words, tied; 1 x {length} tokens",
        make,
        _text(words, 1, length),
        regions=(lambda model: list(model.blocks)) if compiled else None,
    )


def vit(image: int, patch: int, width: int, layers: int) -> Entry:
    return Entry(
        "vit",
        f"{layers} blocks of width {width}, {(image // patch) ** 2 + 1} tokens an image; 2 images",
        functools.partial(transformers.ViT, image, patch, width, layers, max(1, width // 64), 1000),
        _labelled(1000, 2, 3, image, image),
    )


def lstm(width: int, length: int) -> Entry:
    return Entry(
        "lstm",
        f"2 layers of width {width}, 256 bytes; 4 x {length} tokens",
        functools.partial(recurrent.LSTM, 256, width, 2),
        _text(256, 4, length),
    )


def mlp(name: str, width: int, rows: int, compiled: bool = False) -> Entry:
    return Entry(
        name,
        f"784 features, 2 layers of width {width}, 10 classes; {rows} rows",
        functools.partial(tables.MLP, (784, width, width, 10)),
        _labelled(10, rows, 784),
        regions=(lambda model: [model]) if compiled else None,
    )


def conv(width: int, image: int) -> Entry:
    return Entry(
        "conv",
        f"residual net of 3 stages from {width} channels, batch norm; 4 images of {image} x {image}",
        functools.partial(vision.ResNet, width, 10),
        _labelled(10, 4, 3, image, image),
    )


def unet(width: int, image: int) -> Entry:
    def noisy(generator: Generator) -> Batch:
        clean = torch.randn(2, 3, image, image, generator=generator)
        noise = torch.randn(2, 3, image, image, generator=generator)
        return (clean + noise,), noise

    return Entry(
        "unet",
        f"3 levels from {width} channels, group norm, predicts noise; 2 images of {image} x {image}",
        functools.partial(vision.UNet, width),
        noisy,
        squared_error,
    )


def _moe(width: int, experts: int, length: int) -> Entry:
    return Entry(
        "moe",
        f"decoder of 2 blocks of width {width}, {experts} experts, 2 for each token; 1 x {length} tokens",
        functools.partial(transformers.MoE, 256, width, 2, max(1, width // 64), length, experts),
        _text(256, 1, length),
    )


def _moe_stacked(shape: stacked.Shape) -> Entry:
    return Entry(
        "moe-stacked",
        f"decoder of 2 blocks, stacked weights: {shape}",
        functools.partial(
            transformers.StackedMoE, 256, shape.width, 2, max(1, shape.width // 64), shape.tokens, shape
        ),
        _text(256, 1, shape.tokens),
    )


def t5(words: int, width: int, source: int, target: int) -> Entry:
    def pair(generator: Generator) -> Batch:
        words_in = _tokens(words, 2, source)(generator)
        (before,), after = _text(words, 2, target)(generator)
        return (words_in, before), after

    return Entry(
        "t5",
        f"encoder and decoder of 2 blocks of width {width}, {words:,} words, tied; "
        f"2 x ({source} + {target}) tokens",
        functools.partial(transformers.T5, words, width, 2, max(1, width // 64)),
        pair,
    )


def _mamba(width: int, length: int) -> Entry:
    return Entry(
        "mamba",
        f"2 selective scans of width {2 * width} over {length} steps, 256 bytes; 1 x {length} tokens",
        functools.partial(recurrent.Mamba, 256, width, 2),
        _text(256, 1, length),
    )


def _dlrm(rows: int, width: int, samples: int) -> Entry:
    def draw(generator: Generator) -> Batch:
        features = torch.randn(samples, 13, generator=generator)
        looked_up = _tokens(rows, samples, 5)(generator)
        return (features, looked_up), torch.rand(samples, generator=generator).round()

    return Entry(
        "dlrm",
        f"5 tables of {rows:,} x {width}, MLPs of 13-512-256-{width} and 512-256-1; {samples} samples",
        functools.partial(tables.DLRM, 5, rows, width),
        draw,
        clicks,
    )


def _linears(width: int, tokens: int) -> Entry:
    """The four Linears of a block, side by side: a layer, not a model."""
    return Entry(
        "linears",
        f"4 Linears of a block of width {width}, side by side; {tokens} tokens",
        functools.partial(tables.Linears, width),
        lambda generator: (
            (torch.randn(tokens, 4 * width, generator=generator),),
            torch.randn(tokens, 9 * width, generator=generator),
        ),
        squared_error,
    )


def _lookup(rows: int, width: int, tokens: int) -> Entry:
    """An Embedding: a layer, not a model."""
    return Entry(
        "lookup",
        f"a table of {rows:,} x {width}; {tokens} tokens",
        functools.partial(nn.Embedding, rows, width),
        lambda generator: (
            (_tokens(rows, tokens)(generator),),
            torch.randn(tokens, width, generator=generator),
        ),
        squared_error,
    )


#: Layers by themselves: their figures stand beside those of models, and count for none.
LAYERS = frozenset(("linears", "lookup"))


def entries(quick: bool = False) -> dict[str, Entry]:
    """The models and layers by name; with `quick` of the same shapes and tiny."""
    if quick:
        found = [
            gpt("gpt-64", 50, 32, 1, 16), gpt("gpt-256", 50, 32, 1, 32), gpt("gpt-words", 500, 16, 1, 16),
            vit(16, 8, 32, 1), lstm(16, 8), mlp("mlp", 32, 8), conv(8, 8), unet(8, 8), _moe(32, 4, 16),
            _moe_stacked(stacked.Shape(4, 32, 16, 16, 2)), t5(50, 32, 8, 8), _mamba(16, 8), _dlrm(50, 8, 16),
            gpt("gpt-compiled", 50, 32, 1, 16, True), mlp("mlp-compiled", 32, 8, True),
            _linears(16, 8), _lookup(50, 8, 16),
        ]  # fmt: skip
    else:
        found = [
            gpt("gpt-64", 256, 512, 1, 64), gpt("gpt-256", 256, 512, 1, 256),
            gpt("gpt-words", 50_257, 64, 2, 64), vit(112, 16, 192, 3), lstm(384, 32), mlp("mlp", 2048, 8),
            conv(32, 16), unet(32, 16), _moe(192, 8, 64),
            _moe_stacked(stacked.Shape(16, 192, 384, 64, 2)), t5(4096, 192, 32, 16), _mamba(192, 32),
            _dlrm(10_000, 64, 128), gpt("gpt-compiled", 256, 256, 2, 64, True),
            mlp("mlp-compiled", 1024, 16, True), _linears(512, 64), _lookup(20_000, 128, 256),
        ]  # fmt: skip
    return {entry.name: entry for entry in found}
