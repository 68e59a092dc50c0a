"""The memory of an update by kind against the size of a micro-batch, for one loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch

from ...planner import budget as amounts
from ...planner.allocations import KINDS, LIBRARIES
from ...planner.prediction import Predictor
from ...planner.training import Batch, models_own_loss
from .factory import Training

#: Sizes at which a curve is asked for; it is nearly straight in between.
POINTS = 6
#: How far beyond the micro-batch that fits it is drawn.
BEYOND = 2


@dataclasses.dataclass(frozen=True)
class Curve:
    """Bytes by kind at a few micro-batch sizes, and where the whole batch is one."""

    title: str
    by_size: Mapping[int, Mapping[str, int]]
    full: Mapping[str, int]
    samples: int
    #: The micro-batch that fits; None where not even one sample does.
    chosen: int | None


def sizes_to(reach: int) -> list[int]:
    """From 1 to `reach`, evenly."""
    count = min(POINTS, reach)
    return sorted({round(1 + (reach - 1) * index / max(1, count - 1)) for index in range(count)})


def reach_of(chosen: int | None, samples: int) -> int:
    """The largest micro-batch that is worth drawing, short of the whole batch."""
    return max(1, min(samples - 1, max(4, BEYOND * (chosen or 1))))


def curve(
    title: str,
    training: Training,
    samples: int,
    chosen: int | None,
    reach: int,
    device: torch.device,
    note: Callable[[int], None],
) -> Curve:
    """Predicts by running the step on fake tensors at each size.

    Args:
        samples: of an update on one rank.
        chosen: see `Curve`.
        reach: the largest micro-batch beside the whole batch.
        note: called with each size that is about to be run.
    """
    predictor = Predictor(
        training.model,
        training.optimizer,
        Batch(training.sample_batch, training.batch_dims),
        training.loss_fn or models_own_loss,
        device,
        note,
    )
    scratch = amounts.scratch_bytes() if device.type == "cpu" else 0

    def kinds(size: int) -> dict[str, int]:
        found = predictor.peak(size, math.ceil(samples / size)).by_kind
        return {kind: found.get(kind, 0) for kind in KINDS} | {LIBRARIES: scratch}

    return Curve(title, {size: kinds(size) for size in sizes_to(reach)}, kinds(samples), samples, chosen)
