"""One real update of the size that was chosen, on a copy: what was predicted beside what is there."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .allocations import TEMPORARIES
from .batches import Batch
from .budget import available, format_bytes
from .copies import Recipe, real_copy, recipe_of
from .prediction import kept_random_state
from .recorded import Look, recorded_peak
from .training import LossFunction, held, train, windows_of


def measured_peak(
    model: nn.Module,
    optimizer: Optimizer | Recipe,
    batch: Batch,
    loss_fn: LossFunction,
    device: torch.device,
    size: int,
    steps: int,
    predicted: int,
) -> tuple[int | None, str]:
    """The bytes at the peak of real updates on a copy of model and optimizer, which are not touched.

    Args:
        size, steps: the micro-batch, and how many make an update.
        predicted: bytes that it may need.

    Returns:
        The bytes and "", or None and why they were not measured.
    """
    first = next(model.parameters()).device
    if first.type != device.type:
        return None, f"the model is on {first.type}, and is planned for {device.type}"
    free = available(device)
    if predicted > free:
        return None, f"a copy would take {format_bytes(predicted)}, and {format_bytes(free)} are free"
    windows, recipe = windows_of(steps), recipe_of(optimizer)

    def updates(look: Look) -> None:
        copy = real_copy(model, recipe, windows)

        def at_rest() -> None:
            look(held(copy))

        def draw() -> Any:
            return batch.drawn(size)

        train(copy, draw, loss_fn, windows, lambda _: contextlib.nullcontext(), at_rest)

    with kept_random_state(device):
        return recorded_peak(updates, device, TEMPORARIES).bytes, ""
