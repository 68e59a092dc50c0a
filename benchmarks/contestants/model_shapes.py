"""The parameters of real models, names and shapes: `shapes/MODEL.csv`, in order of registration."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import torch

from fusedacc.commands.measuring.machine import available_memory

FOLDER = Path(__file__).resolve().parent / "shapes"
NAMES = ("resnet50", "vit_b_16", "bert_base", "gpt2", "gpt2_xl", "llama3_8b", "mixtral_8x7b")

#: Of the memory that is free, what an estimate may fill.
SHARE = 0.9

Parameters = list[tuple[str, tuple[int, ...]]]

#: The first number between dots is a layer's: transformer.h.7.attn, encoder_layer_7.ln_1, layer2.0.conv1.
_LAYER = re.compile(r"^(?P<stack>.*?)[._](?P<index>\d+)\.")


def load(name: str) -> Parameters:
    """The name and shape of every parameter, tied ones once; ValueError for an unknown model."""
    if name not in NAMES:
        raise ValueError(f"unknown model {name!r}; allowed: {', '.join(NAMES)}")
    with (FOLDER / f"{name}.csv").open(newline="") as file:
        lines = csv.DictReader(line for line in file if not line.startswith("#"))
        return [(line["name"], tuple(int(n) for n in line["shape"].split("x"))) for line in lines]


def elements(parameters: Parameters) -> int:
    return sum(math.prod(shape) for _, shape in parameters)


def layers(parameters: Parameters) -> int:
    """How many layers are repeated, over all stacks (16 blocks in ResNet-50's four)."""
    return len({match.group() for name, _ in parameters if (match := _LAYER.match(name))})


def first_layers(parameters: Parameters, depth: int) -> Parameters:
    """The list with only the first `depth` layers of each stack, whole; what is in no stack stays."""
    return [
        (name, shape)
        for name, shape in parameters
        if (match := _LAYER.match(name)) is None or int(match["index"]) < depth
    ]


def fitting(parameters: Parameters, most: int) -> Parameters:
    """The deepest `first_layers` with at most `most` elements; empty if one layer is too much."""
    depth = 1 + max((int(m["index"]) for name, _ in parameters if (m := _LAYER.match(name))), default=0)
    while depth and elements(first_layers(parameters, depth)) > most:
        depth -= 1
    return first_layers(parameters, depth) if depth else []


def fitting_memory(parameters: Parameters, per_element: int, device: torch.device) -> Parameters:
    """As `fitting`, for so many bytes per element in the device's free memory.

    A gradient of the largest parameter, its cast and what an update makes of it come on top.
    """
    largest = 12 * max(elements([parameter]) for parameter in parameters)
    return fitting(parameters, int((SHARE * available_memory(device) - largest) // per_element))


def describe(kept: Parameters, of: Parameters) -> str:
    """In words: 161 parameters, 25.6 M elements; and how many layers, where some were left out."""
    text = f"{len(kept)} parameters, {_millions(elements(kept))}"
    return text if len(kept) == len(of) else f"{text}: {layers(kept)} of {layers(of)} layers"


def shapes(parameters: Parameters) -> list[tuple[int, ...]]:
    return [shape for _, shape in parameters]


def tiny(parameters: Parameters, most: int = 24, side: int = 16) -> Parameters:
    """The first parameters with every dimension cut to `side`: to try code, not to measure."""
    return [(name, tuple(min(n, side) for n in shape)) for name, shape in parameters[:most]]


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B elements" if count >= 1e9 else f"{count / 1e6:.3g} M elements"
