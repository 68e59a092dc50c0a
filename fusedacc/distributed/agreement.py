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
from ..kernels.checks import switch


def agree_on_settings(
    slots: Sequence[Slot],
    group: dist.ProcessGroup,
    reduce_dtype: torch.dtype | None,
    seed: int | None,
    others: Mapping[str, object],
) -> tuple[int, bool]:
    """Compare the settings of all ranks, as `agree`. seed: None if sums are rounded to nearest.

    Returns the first rank's seed, or 0; and whether a backend has failed its self-test on any rank.
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
    first = [seed or 0 if rank == 0 else 0, int(bool(_own_failures(slots)))]
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
    """Raise ValueError on every rank of a group (None: all) if settings differ. Waits for the device.

    settings: by name, the compared value and its text in the message. what: the beginning of the message.
    Returns the maximum of each of `numbers` over the ranks.
    """
    codes = [zlib.crc32(repr(compared).encode()) for compared, _ in settings.values()]
    values = torch.tensor([*codes, *numbers], device=device)
    least, largest = (found.tolist() for found in extremes(values, group))
    for (name, (_, own)), low, high in zip(settings.items(), least, largest, strict=False):
        if low != high:
            raise ValueError(
                f"{what}: the ranks' optimizers differ in {name}: rank {dist.get_rank(group)} has {own}; "
                "allowed: the same on all ranks"
            )
    return largest[len(codes) :]


def extremes(values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the least and the largest of each value over the ranks of a group, in one collective."""
    reverse = torch.neg if values.is_floating_point() else torch.bitwise_not  # neg overflows for integers
    both = torch.stack([reverse(values), values])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return reverse(both[0]), both[1]


def agree_on_parameters(slots: Sequence[Slot], group: dist.ProcessGroup) -> None:
    """Raise ValueError, on every rank, if the ranks' parameters differ."""
    mine = [f"{slot.name!r} of shape {tuple(slot.param.shape)}, {slot.param.dtype}" for slot in slots]
    lists: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(lists, mine, group=group)
    for rank, other in enumerate(lists):
        if other == lists[0]:
            continue
        differing = next(
            (pair for pair in zip(lists[0], other, strict=False) if pair[0] != pair[1]),
            (f"{len(lists[0])} parameters", f"{len(other)}"),
        )
        raise ValueError(
            f"data_parallel: rank {rank} has other parameters than rank 0: {differing[1]} in place of "
            f"{differing[0]}; allowed: the same names, shapes and dtypes, in the same order, on all ranks"
        )


VARIABLE = "FUSEDACC_CHECK_RANKS"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compares_parameters() -> bool:
    """Whether FUSEDACC_CHECK_RANKS asks to compare parameters. Raises ValueError if it is not "0" or "1"."""
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
    smallest, largest = extremes(torch.stack([checksum(slot.param).to(device) for slot in slots]), group)
    differing = (largest != smallest).nonzero().flatten().tolist()
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        name = slots[differing[0]].name
        raise RuntimeError(
            f"{VARIABLE}=1: after this update the ranks differ in parameter {name!r}{more}. Something "
            "has written to parameters, or to p.grad, on some ranks only: restart from a checkpoint"
        )


def _own_failures(slots: Sequence[Slot]) -> dict[str, str]:
    """Return the backends that have failed a self-test on this rank's devices, and the reasons."""
    return {who: why for device in _devices(slots) for who, why in selftest.failures(device).items()}


def agree_on_backends(slots: Sequence[Slot], group: dist.ProcessGroup, backend: str) -> None:
    """Exclude the backends that have failed on any rank. All ranks call it. Waits for the device.

    The next backends are then tested, and may fail on some ranks too. This repeats until nothing new fails.
    Raises RuntimeError on every rank if a backend that the user requested by name has failed.
    """
    known: set[str] = set()
    while True:
        of_ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(of_ranks, _own_failures(slots), group=group)
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
