"""The shapes of two models' parameters, in order of registration; a tied one once."""

from __future__ import annotations

Shapes = tuple[tuple[int, ...], ...]


def resnet50() -> Shapes:
    """torchvision's ResNet-50: 161 parameters, 25.6 M elements."""

    def norm(channels: int) -> list[tuple[int, ...]]:
        return [(channels,), (channels,)]

    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), *norm(64)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            shapes += [(width, inputs, 1, 1), *norm(width)]
            shapes += [(width, width, 3, 3), *norm(width)]
            shapes += [(outputs, width, 1, 1), *norm(outputs)]
            if block == 0:
                shapes += [(outputs, inputs, 1, 1), *norm(outputs)]
            inputs = outputs
    return (*shapes, (1000, inputs), (1000,))


def gpt2() -> Shapes:
    """GPT-2 small: 148 parameters, 124 M elements."""
    width = 768
    block = (
        *((width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)),
        *((width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)),
    )
    return ((50_257, width), (1024, width), *(12 * block), (width,), (width,))
