"""What an update is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .param import Slot


@dataclass(slots=True)
class Finals:
    """The accumulators of which an update is made, and what one look at each has shown.

    Who holds accumulators keeps their memory from casts: the lists are emptied before casts are made.

    Attributes:
        slots: the parameters that have an accumulator.
        tensors: the accumulator of each.
        dtypes: of the accumulators.
        on_gpu: True if a parameter is on a GPU, and False if one is not.
        need_casts: whether any is of another dtype than its parameter.
        stand: whether all are in p.grad already.
    """

    slots: list[Slot] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)
    on_gpu: set[bool] = field(default_factory=set)
    need_casts: bool = False
    stand: bool = True
