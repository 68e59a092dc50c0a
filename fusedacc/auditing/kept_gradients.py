"""Which gradients nothing has cleared since an optimizer's last update.

This is a fact about `p.grad`, which is looked at before each backward pass. Least squares alone cannot tell
it if the gradient of the last update is tiny beside new ones, as under a large loss scale, or if it is left
in half of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .leaves import Leaves, is_distributed
from .optimizers import OptimizerRecord


def note_used(record: OptimizerRecord, params: Sequence[Tensor], leaves: Leaves) -> None:
    """Note the gradients that are in p.grad after an update."""
    own = {
        leaves.watch(param): param
        for param in params
        if param.grad is not None and not (is_distributed(param) or leaves.is_substituted(param))
    }
    leaves.remember(own.values())
    record.kept, record.cleared = {*own}, set()


def look_at_kept(record: OptimizerRecord, leaves: Leaves) -> None:
    """Find out which of the noted gradients were cleared since. Call it before other code can change them."""
    for number in list(record.kept):
        leaf = leaves.find(number)
        gradient = None if leaf is None else leaf.grad
        if leaf is None or gradient is None:
            is_cleared = True
        elif leaves.is_changed(leaf, gradient):
            is_cleared = gradient.layout is torch.strided and not bool(gradient.any())
        else:
            continue
        record.kept.discard(number)
        if is_cleared:
            record.cleared.add(number)
