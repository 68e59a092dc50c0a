"""Whether the ranks have the same parameters still: asked after each update with FUSEDACC_CHECK_RANKS=1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..accumulators import Slot
from ..kernels.environment import switch

VARIABLE = "FUSEDACC_CHECK_RANKS"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def wanted() -> bool:
    """Whether parameters are to be compared.

    Raises:
        ValueError: FUSEDACC_CHECK_RANKS is neither "0" nor "1".
    """
    return bool(switch(VARIABLE, on="compare the ranks' parameters after every update", off="do not"))


def checksum(parameter: Tensor) -> Tensor:
    """The sum of a parameter's bits, each element's taken as a whole number: 0-dim int64."""
    values = parameter.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(_BITS[values.element_size()]).sum(dtype=torch.int64)


def compare_parameters(slots: Sequence[Slot], group: dist.ProcessGroup) -> None:
    """Compare the ranks' parameters by their checksums, in one collective; waits for the device.

    Raises:
        RuntimeError: they differ; it names the first that does, on every rank.
    """
    if not slots:
        return
    device = slots[0].param.device
    own = torch.stack([checksum(slot.param).to(device) for slot in slots])
    extremes = torch.cat([own, ~own])  # the complement turns the order round
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes[: len(slots)], ~extremes[len(slots) :]
    differing = (largest != smallest).nonzero().flatten().tolist()
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        name = slots[differing[0]].name
        raise RuntimeError(
            f"{VARIABLE}=1: after this update the ranks differ in parameter {name!r}{more}. Something "
            "has written to parameters, or to p.grad, on some ranks only: restart from a checkpoint"
        )
