"""Parameters of an optimizer that get the gradients of others: FSDP2's shards, and float32 copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .leaves import is_distributed
from .optimizers import OptimizerRecord
from .shards import find_unsharded
from .watch_state import WatchState


class Substitutes:
    """Finds the leaves whose gradients an optimizer's parameters get.

    Args:
        watch: the state of the watch.
    """

    def __init__(self, watch: WatchState) -> None:
        self.watch = watch

    def find(self, record: OptimizerRecord, params: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Find them for the parameters of an update, and note them."""
        if any(map(is_distributed, params)):
            if record.number in self.watch.history.optimizers:
                return
            for shard, whole in find_unsharded():
                self.watch.leaves.let_stand_for(shard, whole)
            for each in self.watch.optimizers:  # so that passes are kept for optimizers that step later
                for reference in list(each.owned.values()):
                    if (param := reference()) is not None:
                        self.watch.own(each, param)
        else:
            self._find_copies(record, dict(zip(params, gradients, strict=True)))

    def _find_copies(self, record: OptimizerRecord, gradients: dict[Tensor, Tensor | None]) -> None:
        """Match an optimizer's copies, by their values, with the parameters that get gradients.

        A parameter without a gradient in the first update is matched in a later one.
        """
        if record.number in self.watch.history.optimizers:
            if not self.watch.leaves.has_substitutes:
                return
            params = [param for param in gradients if not self.watch.leaves.is_substituted(param)]
            if not 0 < len(params) < len(gradients):
                return
            gradients = {param: gradients[param] for param in params}
        numbers = {number for each in self.watch.history.window(record.number) for number in each.sketches}
        if not numbers.isdisjoint(map(self.watch.leaves.watch, gradients)):
            return
        free = self.watch.leaves.find_all(numbers - self.watch.optimizers.owned_numbers())
        for param, gradient in gradients.items():
            equal = [
                leaf
                for leaf in free
                if leaf.shape == param.shape and torch.equal(leaf, param.to(leaf.device, leaf.dtype))
            ]
            if gradient is not None and equal:
                found = max(equal, key=lambda leaf: self._likeness(record, leaf, gradient))
                free = [leaf for leaf in free if leaf is not found]
                number = self.watch.leaves.let_stand_for(param, found)
                record.owned.pop(number, None)
                record.owned_mask &= ~(1 << number)

    def _likeness(self, record: OptimizerRecord, leaf: Tensor, gradient: Tensor) -> float:
        """Return the cosine of a gradient and the sum of what the window's passes deliver to a leaf.

        It tells parameters of equal values apart, as those of normalization layers at the beginning.
        """
        number, wanted = self.watch.leaves.watch(leaf), self.watch.sketch(gradient, leaf.shape)
        window = self.watch.history.window(record.number)
        passes = [each.sketches for each in window if number in each.sketches]
        total = torch.stack([sketches[number] for sketches in passes]).sum(0)
        return float(torch.nn.functional.cosine_similarity(total, wanted.to(total.device), dim=0))
