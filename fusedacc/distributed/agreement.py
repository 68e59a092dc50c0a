"""Checks that all ranks have the same parameters and the same arguments of the wrapper.

If arguments differed, ranks would wait for each other or compute wrong sums. With FUSEDACC_CHECK_RANKS=1 the
parameters are also compared after each update. If a backend fails its self-test on one rank, no rank uses it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..accumulators import Slot
from ..accumulators.param import check_backend
from ..kernels import selftest
from ..kernels.checks import switch


class Setting(NamedTuple):
    """A setting that must be equal on all ranks."""

    compared: Any
    #: Its text in the message.
    text: str

    @classmethod
    def of(cls, value: object) -> Setting:
        """Return the setting with the value's `repr` as its text."""
        return cls(value, repr(value))


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
    params = [slot.param for slot in slots]
    dtypes = [slot.accumulate_dtype for slot in slots]
    settings = {
        "parameters": Setting(
            [(p.shape, p.dtype) for p in params],
            f"{len(params)} with {sum(p.numel() for p in params)} elements",
        ),
        "accumulate_dtype": Setting(dtypes, ", ".join(sorted({str(dtype) for dtype in dtypes}))),
        "rounding": Setting(seed is None, repr("nearest" if seed is None else "stochastic")),
        "reduce_dtype": Setting(reduce_dtype, str(reduce_dtype)),
        **{name: Setting.of(value) for name, value in others.items()},
    }
    # The maximum over the ranks is the first rank's seed.
    seed_of_first = seed if seed is not None and dist.get_rank(group) == 0 else 0
    has_failed = int(bool(_failures_here(slots)))
    device = slots[0].param.device if slots else torch.device("cpu")
    agreed_seed, any_has_failed = agree(settings, group, device, "data_parallel", [seed_of_first, has_failed])
    return agreed_seed, bool(any_has_failed)


def agree(
    settings: Mapping[str, Setting],
    group: dist.ProcessGroup | None,
    device: torch.device,
    what: str,
    numbers: Sequence[int] = (),
) -> list[int]:
    """Raise ValueError on every rank of a group (None: all) if settings differ. Waits for the device.

    settings: by name. what: the beginning of the message. Returns the maximum of each of `numbers` over the
    ranks.
    """
    codes = [zlib.crc32(repr(setting.compared).encode()) for setting in settings.values()]
    values = torch.tensor([*codes, *numbers], device=device)
    of_least, of_largest = extremes(values, group)
    least = of_least.tolist()
    largest = of_largest.tolist()
    for (name, setting), low, high in zip(settings.items(), least, largest, strict=False):
        if low != high:
            raise ValueError(
                f"{what}: the ranks' optimizers differ in {name}: rank {dist.get_rank(group)} has "
                f"{setting.text}; allowed: the same on all ranks"
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


def _failures_here(slots: Sequence[Slot]) -> dict[str, str]:
    """Return the backends that have failed a self-test on this rank's devices, and the reasons."""
    failures: dict[str, str] = {}
    for device in _devices(slots):
        failures.update(selftest.failures(device))
    return failures


def agree_on_backends(slots: Sequence[Slot], group: dist.ProcessGroup, backend: str) -> None:
    """Exclude the backends that have failed on any rank. All ranks call it. Waits for the device.

    The next backends are then tested, and may fail on some ranks too. This repeats until nothing new fails.
    Raises RuntimeError on every rank if a backend that the user requested by name has failed.
    """
    excluded: set[str] = set()
    while True:
        of_ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(of_ranks, _failures_here(slots), group=group)
        reasons: dict[str, str] = {}
        for rank, failures in enumerate(of_ranks):
            for name, why in failures.items():
                reasons.setdefault(name, why if why.startswith("on rank ") else f"on rank {rank}: {why}")
        if reasons.keys() == excluded:
            return
        excluded = set(reasons)
        for device in _devices(slots):
            for name, why in reasons.items():
                selftest.exclude(name, device, why)
        for lane in {slot.lane for slot in slots}:
            check_backend(lane, backend)


def _devices(slots: Sequence[Slot]) -> list[torch.device]:
    """Return the devices of these slots that have backends with self-tests."""
    devices = {slot.lane[0] for slot in slots}
    return [device for device in devices if device.type in selftest.DEVICE_TYPES]
