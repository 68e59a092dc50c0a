"""What has to be alike on all ranks: their parameters, and the wrapper's arguments.

Ranks with other arguments would wait for each other, or add up nonsense. With FUSEDACC_CHECK_RANKS=1 the
parameters are compared after each update too.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..accumulators import Slot
from ..kernels.environment import switch
from .backends import own_failures


def agree_on_settings(
    slots: Sequence[Slot],
    group: dist.ProcessGroup,
    reduce_dtype: torch.dtype | None,
    seed: int | None,
    others: Mapping[str, object],
) -> tuple[int, bool]:
    """See that these are the same on all ranks, in one collective of a few numbers; waits for the device.

    Args:
        seed: of sums that are rounded stochastically; None: to nearest.
        others: the wrapper's other arguments that all ranks must share, by name.

    Returns:
        The seed of the group's first rank; 0 where sums are rounded to nearest. And whether a backend has
        failed its self-test on any rank.

    Raises:
        ValueError: ranks differ in one of them, or in their parameters' shapes and dtypes; on every rank.
    """
    rank, params = dist.get_rank(group), [slot.param for slot in slots]
    sums = [slot.accumulate_dtype for slot in slots]
    settings: dict[str, tuple[object, str]] = {  # what is compared, and what is said of it
        "parameters": (
            [(p.shape, p.dtype) for p in params],
            f"{len(params)} with {sum(p.numel() for p in params)} elements",
        ),
        "accumulate_dtype": (sums, ", ".join(sorted({str(dtype) for dtype in sums}))),
        "rounding": (seed is None, repr("nearest" if seed is None else "stochastic")),
        "reduce_dtype": (reduce_dtype, str(reduce_dtype)),
        **{name: (value, repr(value)) for name, value in others.items()},
    }
    codes = torch.tensor([zlib.crc32(repr(compared).encode()) for compared, _ in settings.values()])
    first = torch.tensor([seed or 0 if rank == 0 else 0, int(bool(own_failures(slots)))])
    extremes = torch.cat([first, codes, ~codes])  # the complement turns the order round
    extremes = extremes.to(slots[0].param.device if slots else "cpu")
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    agreed, failed, *found = extremes.tolist()
    for place, (name, (_, own)) in enumerate(settings.items()):
        if found[place] != ~found[place + len(settings)]:
            raise ValueError(
                f"data_parallel: the ranks' optimizers differ in {name}: rank {rank} has {own}; allowed: the "
                "same on all ranks"
            )
    return agreed, bool(failed)


def agree_on_parameters(slots: Sequence[Slot], group: dist.ProcessGroup) -> None:
    """See that every rank has the same parameters.

    Raises:
        ValueError: another rank has other parameters; it names them and the rank, on every rank.
    """
    mine = [(slot.name, tuple(slot.param.shape), str(slot.param.dtype)) for slot in slots]
    lists: list[list[tuple]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(lists, mine, group=group)
    for rank, other in enumerate(lists):
        if other == lists[0]:
            continue
        differing = next(
            (pair for pair in zip(lists[0], other, strict=False) if pair[0] != pair[1]),
            (f"{len(lists[0])} parameters", f"{len(other)}"),
        )
        raise ValueError(
            f"data_parallel: rank {rank} has other parameters than rank 0: {_spelt(differing[1])} in place "
            f"of {_spelt(differing[0])}; allowed: the same names, shapes and dtypes, in the same order, on "
            "all ranks"
        )


def share_parameters(slots: Sequence[Slot], group: dist.ProcessGroup) -> None:
    """Give every rank the parameters of the group's first."""
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for slot in slots:
            dist.broadcast(slot.param.detach(), source, group=group)


def _spelt(parameter: tuple | str) -> str:
    if isinstance(parameter, str):
        return parameter
    name, shape, dtype = parameter
    return f"{name!r} of shape {shape}, {dtype}"


VARIABLE = "FUSEDACC_CHECK_RANKS"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compares_parameters() -> bool:
    """Whether parameters are to be compared.

    Raises:
        ValueError: FUSEDACC_CHECK_RANKS is neither "0" nor "1".
    """
    on = "compare the ranks' parameters after every update"
    return bool(switch(VARIABLE, on=on, off="do not", unset="do not"))


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
