"""Peak memory by kind: what was alive at the peak, and what each piece of it was.

As `fusedacc.planner` records real training; here with the kinds that loops of any sort have. All that no look
has found is activations, temporaries, and gradients on their way to a sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusedacc.planner.allocations import Look, recorded_peak

OTHER = "activations and others"
KINDS = ("weights", "gradients", "optimizer", OTHER)


def peak_by_kind(train: Callable[[Look], object], device: torch.device) -> dict[str, int]:
    """Runs `train`, which must make all it uses and look where kinds may have changed.

    Returns the bytes of each of KINDS at the first moment at which most bytes were alive; their sum is the
    peak. Bytes are those asked for, without the allocator's rounding.
    """
    found = recorded_peak(train, device, OTHER).by_kind
    return {kind: found.get(kind, 0) for kind in KINDS}
