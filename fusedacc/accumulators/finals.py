"""What an update is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from .param import Slot


class Finals:
    """The accumulators of which an update is made, and what one look at each has shown.

    Who holds accumulators keeps their memory from casts: the lists are emptied before casts are made.
    """

    __slots__ = ("dtypes", "need_casts", "slots", "stand", "tensors")

    def __init__(self) -> None:
        #: The slots, and the accumulator of each.
        self.slots: list[Slot] = []
        self.tensors: list[Tensor] = []
        self.dtypes: set[torch.dtype] = set()
        #: Whether any is of another dtype than its parameter.
        self.need_casts = False
        #: Whether all are in p.grad already.
        self.stand = True
