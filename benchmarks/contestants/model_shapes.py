"""The parameters of real models, names and shapes: `shapes/MODEL.csv`, in order of registration."""

import csv
import math
import re
from pathlib import Path

import torch

from fusedacc.commands.machine import available_memory

FOLDER = Path(__file__).resolve().parent / "shapes"
NAMES = ("resnet50", "vit_b_16", "bert_base", "gpt2", "gpt2_xl", "llama3_8b", "mixtral_8x7b")
NO_MEMORY = "no memory for one layer of each stack"
#: The share of the free memory that an estimate may fill.
SHARE = 0.9

Parameters = list[tuple[str, tuple[int, ...]]]

#: The first number between dots is a layer's: transformer.h.7.attn, encoder_layer_7.ln_1, layer2.0.conv1.
_LAYER = re.compile(r"^(?P<stack>.*?)[._](?P<index>\d+)\.")


def load(name: str, tiny: bool = False) -> Parameters:
    """Return the name and shape of every parameter, tied ones once. Raises ValueError for other models.

    tiny: to try the code, return the first 24, with every dimension limited to 16.
    """
    if name not in NAMES:
        raise ValueError(f"unknown model {name!r}; allowed: {', '.join(NAMES)}")
    with (FOLDER / f"{name}.csv").open(newline="") as file:
        lines = csv.DictReader(line for line in file if not line.startswith("#"))
        found = [(line["name"], tuple(int(n) for n in line["shape"].split("x"))) for line in lines]
    return [(name, tuple(min(n, 16) for n in shape)) for name, shape in found[:24]] if tiny else found


def elements(parameters: Parameters) -> int:
    return sum(math.prod(shape) for _, shape in parameters)


def layers(parameters: Parameters) -> int:
    """Return the number of repeated layers in all stacks (16 blocks in ResNet-50's four)."""
    return len({match.group() for name, _ in parameters if (match := _LAYER.match(name))})


def fitting(parameters: Parameters, most: int) -> Parameters:
    """Return the first layers of each stack with at most `most` elements; empty if one layer is too much.

    All parameters that belong to no stack stay.
    """
    depth_of = {name: int(match["index"]) for name, _ in parameters if (match := _LAYER.match(name))}
    for depth in range(1 + max(depth_of.values(), default=0), 0, -1):
        kept = [(name, shape) for name, shape in parameters if depth_of.get(name, -1) < depth]
        if elements(kept) <= most:
            return kept
    return []


def fitting_memory(parameters: Parameters, per_element: int, device: torch.device) -> Parameters:
    """Return what `fitting` keeps, with so many bytes per element, in the device's free memory.

    A gradient of the largest parameter, its cast and an update's temporaries are added.
    """
    largest = 12 * max(elements([parameter]) for parameter in parameters)
    return fitting(parameters, int((SHARE * available_memory(device) - largest) // per_element))


def describe(kept: Parameters, of: Parameters) -> str:
    """Return such as "161 parameters, 25.6 M elements", and the number of layers if some were left out."""
    count = elements(kept)
    size = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
    text = f"{len(kept)} parameters, {size} elements"
    return text if len(kept) == len(of) else f"{text}: {layers(kept)} of {layers(of)} layers"


def shapes(parameters: Parameters) -> list[tuple[int, ...]]:
    return [shape for _, shape in parameters]
