"""FSDP2: the optimizer has shards, and autograd delivers gradients to unsharded parameters."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor

from .guard import CannotAuditError

#: FSDP2's class for a parameter. It has no public name, and no public function returns the objects.
FSDP_PARAMETER = "FSDPParam"


def find_unsharded() -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of a sharded and an unsharded parameter.

    FSDP2 makes the latter in the first forward pass.
    """
    found = [each for each in gc.get_objects() if type(each).__name__ == FSDP_PARAMETER]
    return [
        (each.sharded_param, each._unsharded_param) for each in found if hasattr(each, "_unsharded_param")
    ]


def first_row(gradient: Any) -> int:
    """Return where this rank's shard of a DTensor begins, along dimension 0.

    Raises:
        CannotAuditError: it is not sharded along dimension 0 of a mesh with one dimension.
    """
    mesh, placements = gradient.device_mesh, gradient.placements
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        raise CannotAuditError(
            f"it cannot read a DTensor with {placements} on a mesh of {mesh.ndim} dimensions: shard along "
            "dimension 0, on a mesh of one dimension"
        )
    rows = gradient.shape[0]
    rows_per_rank = -(-rows // mesh.size())
    return min(rows, rows_per_rank * mesh.get_local_rank())
