"""The cases of `bench`: sizes, dtypes and models, by how much is to be measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch

from .work import Additions, Norms, Pair, Products, Rows, Shapes, Work


def resnet50() -> Shapes:
    """Return the shapes of torchvision's ResNet-50: 161 parameters, 25.6 M elements."""

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
    """Return the shapes of GPT-2 small: 148 parameters, 124 M elements; the tied one once."""
    width = 768
    block = (
        *((width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)),
        *((width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)),
    )
    return ((50_257, width), (1024, width), *(12 * block), (width,), (width,))


_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16
_MI = 2**20

#: Gradient and accumulator.
PAIRS: tuple[Pair, ...] = ((_F32, _F32), (_BF16, _F32))
OTHER_PAIRS: tuple[Pair, ...] = ((_F16, _F32), (_BF16, _BF16))

_ONES: dict[str, Shapes] = {"64 Ki elements": ((2**16,),), "16 Mi elements": ((16 * _MI,),)}
_LARGE_ONES: dict[str, Shapes] = {"64 Mi elements": ((64 * _MI,),)}
_SMALL: dict[str, Shapes] = {"1000 tensors of 1000": ((1000,),) * 1000}
_SMALLER: dict[str, Shapes] = {"300 tensors of 16 x 16": ((16, 16),) * 300}
_MODELS = {"ResNet-50": resnet50()}
_LARGE_MODELS = {"GPT-2 small": gpt2()}
_LAYER = (3072, 768)
_TABLE = (50_257, 768)

#: Bytes per element of an addition at most, with what variants and checks need; it limits a model's list.
_MOST_BYTES = 8 + 12 + 12


def _cut(name: str, shapes: Shapes, limit: int) -> tuple[str, Shapes]:
    """Return a model's name and parameters: only the first ones if memory does not hold all."""
    most = (limit - 48 * _MI) // _MOST_BYTES
    kept = sum(elements <= most for elements in itertools.accumulate(map(math.prod, shapes)))
    if kept in (0, len(shapes)):
        return f"{name}'s {len(shapes)} parameters", shapes  # it is reported if there is no memory for it
    return f"{name}'s first {kept} of {len(shapes)} parameters", shapes[:kept]


def of(effort: str, device: torch.device, limit: int) -> Iterable[Work]:
    """Yield the cases of a "short" or "full" run. limit: bytes that a case may use."""
    full, large = effort == "full", effort == "full" or device.type == "cuda"
    listed = _ONES | (_LARGE_ONES if large else {}) | _SMALL | (_SMALLER if full else {})
    of_models = dict(_cut(*item, limit) for item in (_MODELS | (_LARGE_MODELS if large else {})).items())
    for name, shapes in (listed | of_models).items():
        is_large = name in _LARGE_ONES or name.startswith(tuple(_LARGE_MODELS))
        for pair in (*PAIRS, *(OTHER_PAIRS if full and not is_large else ())):
            yield Additions(name, shapes, pair, device, compiled=full and pair in PAIRS)
            if full and pair in PAIRS and name in (_SMALL | _SMALLER):
                yield Additions(name, shapes, pair, device, warm=True)
    for name, shapes in ((_SMALL if full else {}) | of_models).items():
        for dtype in (_F32, *([_BF16] if full else [])):
            yield Norms(name, shapes, dtype, device)
    for tokens in (16, 64, 256, 1024) if full else (64, 1024):
        # Many tokens in float16 take seconds on a CPU.
        others = full and (device.type == "cuda" or tokens <= 64)
        for pair in (*PAIRS, *(OTHER_PAIRS if others else ())):
            yield Products(tokens, *_LAYER, pair, device)
    for tokens in (64, 1024, 8192) if full else (1024,):
        for pair in PAIRS if full else PAIRS[:1]:
            yield Rows(*_TABLE, tokens, pair, device)
