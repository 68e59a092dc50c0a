"""Checks that all ranks have the same parameters and the same arguments of the wrapper.

If arguments differed, ranks would wait for each other or compute wrong sums. With FUSEDACC_CHECK_RANKS=1 the
parameters are also compared after each update. If a backend fails its self-test on one rank, no rank uses it.
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
from ..kernels.choices import switch


def agree_on_settings(
    slots: Sequence[Slot],
    group: dist.ProcessGroup,
    reduce_dtype: torch.dtype | None,
    seed: int | None,
    others: Mapping[str, object],
) -> tuple[int, bool]:
    """Compare the settings of all ranks, in one collective of a few numbers. Waits for the device.

    Args:
        slots: the parameters.
        group: the ranks.
        reduce_dtype: the dtype of the reduction.
        seed: of stochastic rounding; None if sums are rounded to nearest.
        others: further settings, by name.

    Returns:
        The first rank's seed, or 0; and whether a backend has failed its self-test on any rank.

    Raises:
        ValueError: on every rank, if a setting differs.
    """
    rank, params = dist.get_rank(group), [slot.param for slot in slots]
    sums = [slot.accumulate_dtype for slot in slots]
    settings: dict[str, tuple[object, str]] = {  # the compared value, and its text in the message
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
    """Compare settings over the ranks of a group, in one collective. Waits for the device.

    Args:
        settings: by name, the compared value and its text in the message.
        group: the ranks; None: all.
        device: where the collective runs.
        what: the beginning of the message.
        numbers: this rank's numbers.

    Returns:
        The maximum of each of `numbers` over all ranks.

    Raises:
        ValueError: on every rank, if a setting differs.
    """
    codes = torch.tensor([zlib.crc32(repr(compared).encode()) for compared, _ in settings.values()])
    extremes = torch.cat([torch.tensor(numbers, dtype=codes.dtype), codes, ~codes])  # ~ reverses the order
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
    """Raise ValueError, on every rank, if the ranks' parameters differ."""
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
    """Broadcast the parameters of the group's first rank."""
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
    """Whether FUSEDACC_CHECK_RANKS asks to compare parameters.

    Raises:
        ValueError: FUSEDACC_CHECK_RANKS is neither "0" nor "1".
    """
    on = "compare the ranks' parameters after every update"
    return bool(switch(VARIABLE, on=on, off="do not", unset="do not"))


def checksum(parameter: Tensor) -> Tensor:
    """Return the sum of a parameter's elements, with their bits read as integers, as a 0-dim int64 tensor."""
    values = parameter.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(_BITS[values.element_size()]).sum(dtype=torch.int64)


def compare_parameters(slots: Sequence[Slot], group: dist.ProcessGroup) -> None:
    """Raise RuntimeError, on every rank, if parameters differ. Compares checksums in one collective."""
    if not slots:
        return
    device = slots[0].param.device
    own = torch.stack([checksum(slot.param).to(device) for slot in slots])
    extremes = torch.cat([own, ~own])  # the complement reverses the order
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
    """Return the backends that have failed a self-test on this rank's devices, and the reasons."""
    found: dict[str, str] = {}
    for device in _devices(slots):
        found |= selftest.failures(device)
    return found


def agree_on_backends(slots: Sequence[Slot], group: dist.ProcessGroup, backend: str) -> None:
    """Exclude the backends that have failed on any rank. All ranks call it. Waits for the device.

    The next backends are then tested, and may fail on some ranks too. This repeats until nothing new fails.

    Raises:
        RuntimeError: on every rank, if a backend that the user requested by name has failed.
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
