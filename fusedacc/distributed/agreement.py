"""What has to be alike on all ranks: their parameters, and the wrapper's arguments.

Ranks with other arguments would wait for each other, or add up nonsense. With FUSEDACC_CHECK_RANKS=1 the
parameters are compared after each update too. What has failed its self-test on one rank, no rank uses.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..accumulators import Slot
from ..accumulators.param import check_backend
from ..kernels import selftest
from ..kernels.environment import switch


def agree_on_settings(
    slots: Sequence[Slot],
    group: dist.ProcessGroup,
    reduce_dtype: torch.dtype | None,
    seed: int | None,
    others: Mapping[str, object],
) -> tuple[int, bool]:
    """See that these are the same on all ranks, in one collective of a few numbers; waits for the device.

    `seed`: None where sums are rounded to nearest. Returns that of the first rank, or 0; and whether a
    backend has failed its self-test on any rank. Where they differ, every rank raises ValueError.
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
    first = [seed or 0 if rank == 0 else 0, int(bool(own_failures(slots)))]
    device = slots[0].param.device if slots else torch.device("cpu")
    agreed, failed = agree(settings, group, device, "data_parallel", first)
    return agreed, bool(failed)


def agree(
    settings: Mapping[str, tuple[object, str]],
    group: dist.ProcessGroup | None,
    device: torch.device,
    what: str,
    numbers: Sequence[int] = (),
) -> list[int]:
    """Compare settings over the ranks of a group, in one collective; waits for the device.

    Args:
        settings: by name, what is compared and what is said of it.
        group: the ranks; None: all.
        device: where the collective runs.
        what: begins the message.
        numbers: of this rank.

    Returns:
        The largest of all ranks' `numbers`, one by one.

    Raises:
        ValueError: on every rank, if a setting differs.
    """
    codes = torch.tensor([zlib.crc32(repr(compared).encode()) for compared, _ in settings.values()])
    extremes = torch.cat([torch.tensor(numbers, dtype=codes.dtype), codes, ~codes])  # ~ turns the order round
    extremes = extremes.to(device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, found = extremes[: len(numbers)].tolist(), extremes[len(numbers) :].tolist()
    for place, (name, (_, own)) in enumerate(settings.items()):
        if found[place] != ~found[place + len(settings)]:
            raise ValueError(
                f"{what}: the ranks' optimizers differ in {name}: rank {dist.get_rank(group)} has {own}; "
                "allowed: the same on all ranks"
            )
    return largest


def agree_on_parameters(slots: Sequence[Slot], group: dist.ProcessGroup) -> None:
    """Raise ValueError, on every rank, unless every rank has the same parameters."""
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
    """Raise RuntimeError, on every rank, where parameters differ; by one collective of their checksums."""
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


# Backends


def own_failures(slots: Sequence[Slot]) -> dict[str, str]:
    """Return who has failed a self-test on this rank's devices, and why."""
    found: dict[str, str] = {}
    for device in _devices(slots):
        found |= selftest.failures(device)
    return found


def agree_on_backends(slots: Sequence[Slot], group: dist.ProcessGroup, backend: str) -> None:
    """Exclude on every rank what has failed on any. Every rank calls it; waits for the device.

    The backends that come next are tested, and may fail on some ranks too: it repeats until nothing new
    fails. If a backend was asked for by name, every rank raises RuntimeError.
    """
    known: set[str] = set()
    while True:
        of_ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(of_ranks, own_failures(slots), group=group)
        found: dict[str, str] = {}
        for rank, own in enumerate(of_ranks):
            for who, why in own.items():
                found.setdefault(who, why if why.startswith("on rank ") else f"on rank {rank}: {why}")
        if found.keys() == known:
            return
        known = set(found)
        for device in _devices(slots):
            for who, why in found.items():
                selftest.exclude(who, device, why)
        for lane in {slot.lane for slot in slots}:
            check_backend(lane, backend)


def _devices(slots: Sequence[Slot]) -> list:
    return [device for device in {slot.lane[0] for slot in slots} if device.type in selftest.DEVICE_TYPES]
