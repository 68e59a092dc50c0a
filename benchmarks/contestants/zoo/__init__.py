"""Models as people train them, so small that a window of eight micro-batches takes well under a second.

Each has its module, the shapes of its micro-batch and its loss. Data are random; nothing is downloaded.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from .. import experts as stacked
from . import networks

Batch = tuple[tuple[Tensor, ...], Tensor]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs.float(), targets)


#: More than the blocks, loops and precisions that share a class.
RECOMPILES = 64


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model, and `batch(generator)`: its arguments and the targets. `shapes` describes both.

    Attributes:
        make: builds the model in float32 from torch's random state.
        loss: of outputs and targets, float32 [].
        regions: the modules of the model to compile by `torch.compile`; None compiles nothing.
    """

    name: str
    shapes: str
    make: Callable[[], nn.Module]
    batch: Callable[[Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    regions: Callable[[nn.Module], list[nn.Module]] | None = None

    def model(self) -> nn.Module:
        model = self.make()
        if self.regions is not None:
            # Every loop has a separate model of one class. Above the limit Dynamo would run it uncompiled.
            torch._dynamo.config.recompile_limit = RECOMPILES
            for region in self.regions(model):
                region.compile(dynamic=False)
        return model


def _tokens(count: int, *shape: int) -> Callable[[Generator], Tensor]:
    return lambda generator: torch.randint(count, shape, generator=generator)


def _normal(*shape: int) -> Callable[[Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator)


def _drawn(*draws: Callable[[Generator], Tensor]) -> Callable[[Generator], Batch]:
    """Return what draws the model's arguments and, last, the targets."""

    def draw(generator: Generator) -> Batch:
        *inputs, targets = [each(generator) for each in draws]
        return tuple(inputs), targets

    return draw


def _text(count: int, batch: int, length: int) -> Callable[[Generator], Batch]:
    """Return what draws random tokens, and the tokens that follow them."""

    def draw(generator: Generator) -> Batch:
        tokens = _tokens(count, batch, length + 1)(generator)
        return (tokens[:, :-1],), tokens[:, 1:]

    return draw


def gpt(name: str, words: int, width: int, layers: int, length: int, compiled: bool = False) -> Entry:
    return Entry(
        name,
        f"decoder of {layers} blocks of width {width}, {words:,} words, tied; 1 x {length} tokens",
        lambda: networks.GPT(words, width, layers, length),
        _text(words, 1, length),
        regions=(lambda model: list(model.blocks)) if compiled else None,
    )


def vit(image: int, patch: int, width: int, layers: int) -> Entry:
    return Entry(
        "vit",
        f"{layers} blocks of width {width}, {(image // patch) ** 2 + 1} tokens an image; 2 images",
        lambda: networks.ViT(image, patch, width, layers, 1000),
        _drawn(_normal(2, 3, image, image), _tokens(1000, 2)),
    )


def lstm(width: int, length: int, rows: int = 4) -> Entry:
    shapes = f"2 layers of width {width}, 256 bytes; {rows} x {length} tokens"
    return Entry("lstm", shapes, lambda: networks.LSTM(256, width, 2), _text(256, rows, length))


def mlp(name: str, width: int, rows: int, compiled: bool = False) -> Entry:
    return Entry(
        name,
        f"784 features, 2 layers of width {width}, 10 classes; {rows} rows",
        lambda: networks.MLP((784, width, width, 10)),
        _drawn(_normal(rows, 784), _tokens(10, rows)),
        regions=(lambda model: [model]) if compiled else None,
    )


def conv(width: int, image: int) -> Entry:
    return Entry(
        "conv",
        f"residual net of 3 stages from {width} channels, batch norm; 4 images of {image} x {image}",
        lambda: networks.ResNet(width, 10),
        _drawn(_normal(4, 3, image, image), _tokens(10, 4)),
    )


def unet(width: int, image: int, rows: int = 2) -> Entry:
    def noisy(generator: Generator) -> Batch:
        clean, noise = (_normal(rows, 3, image, image)(generator) for _ in range(2))
        return (clean + noise,), noise

    shapes = f"3 levels from {width} channels, group norm, predicts noise; {rows} images of {image} x {image}"
    return Entry("unet", shapes, lambda: networks.UNet(width), noisy, squared_error)


def _moe(width: int, experts: int, length: int) -> Entry:
    shapes = f"decoder of 2 blocks of width {width}, {experts} experts, 2 for each token; 1 x {length} tokens"
    mlp = functools.partial(networks.Experts, width, experts)
    return Entry("moe", shapes, lambda: networks.GPT(256, width, 2, length, mlp), _text(256, 1, length))


def _moe_stacked(shape: stacked.Shape) -> Entry:
    mlp = functools.partial(networks.StackedExperts, shape)
    make = functools.partial(networks.GPT, 256, shape.width, 2, shape.tokens, mlp)
    shapes = f"decoder of 2 blocks, stacked weights: {shape}"
    return Entry("moe-stacked", shapes, make, _text(256, 1, shape.tokens))


def t5(words: int, width: int, source: int, target: int) -> Entry:
    def pair(generator: Generator) -> Batch:
        words_in = _tokens(words, 2, source)(generator)
        (before,), after = _text(words, 2, target)(generator)
        return (words_in, before), after

    shapes = f"encoder and decoder of 2 blocks of width {width}, {words:,} words, tied; "
    shapes += f"2 x ({source} + {target}) tokens"
    return Entry("t5", shapes, lambda: networks.T5(words, width, 2), pair)


def _mamba(width: int, length: int) -> Entry:
    shapes = f"2 selective scans of width {2 * width} over {length} steps, 256 bytes; 1 x {length} tokens"
    return Entry("mamba", shapes, lambda: networks.Mamba(256, width, 2), _text(256, 1, length))


def _dlrm(rows: int, width: int, samples: int) -> Entry:
    return Entry(
        "dlrm",
        f"5 tables of {rows:,} x {width}, MLPs of 13-512-256-{width} and 512-256-1; {samples} samples",
        lambda: networks.DLRM(5, rows, width),
        _drawn(
            _normal(samples, 13),
            _tokens(rows, samples, 5),
            lambda generator: torch.rand(samples, generator=generator).round(),
        ),
        lambda logits, targets: functional.binary_cross_entropy_with_logits(logits.float(), targets),
    )


def entries(quick: bool = False) -> dict[str, Entry]:
    """Return the models by name; with `quick` tiny ones of the same kinds."""
    if quick:
        found = [
            gpt("gpt-64", 50, 32, 1, 16),
            gpt("gpt-256", 50, 32, 1, 32),
            gpt("gpt-words", 500, 16, 1, 16),
            vit(16, 8, 32, 1),
            lstm(16, 8),
            mlp("mlp", 32, 8),
            conv(8, 8),
            unet(8, 8),
            _moe(32, 4, 16),
            _moe_stacked(stacked.Shape(4, 32, 16, 16, 2)),
            t5(50, 32, 8, 8),
            _mamba(16, 8),
            _dlrm(50, 8, 16),
            gpt("gpt-compiled", 50, 32, 1, 16, True),
            mlp("mlp-compiled", 32, 8, True),
        ]
    else:
        found = [
            gpt("gpt-64", 256, 512, 1, 64),
            gpt("gpt-256", 256, 512, 1, 256),
            gpt("gpt-words", 50_257, 64, 2, 64),
            vit(112, 16, 192, 3),
            lstm(384, 32),
            mlp("mlp", 2048, 8),
            conv(32, 16),
            unet(32, 16),
            _moe(192, 8, 64),
            _moe_stacked(stacked.Shape(16, 192, 384, 64, 2)),
            t5(4096, 192, 32, 16),
            _mamba(192, 32),
            _dlrm(10_000, 64, 128),
            gpt("gpt-compiled", 256, 256, 2, 64, True),
            mlp("mlp-compiled", 1024, 16, True),
        ]
    return {entry.name: entry for entry in found}
