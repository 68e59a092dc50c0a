"""Process-wide settings of the CPU loops that trials decide: the grain size, and prefetching.

No setting changes bits. Waking a thread for fewer elements than the grain size costs more than it saves.
Prefetching norms' input makes some processors faster and others slower.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from . import checks, library, tuning
from .dtypes import Tensors
from .tuning import Choice

#: Elements per thread. Torch's additions use the first; the second suits processors that wake slowly.
GRAIN_SIZES = (32768, 131072)
#: Elements of a trial: two of torch's grains for each of two threads.
_TRIED_ELEMENTS = 131072


def set_grain_size(elements: int) -> None:
    """Set the fewest elements per thread, for the whole process."""
    library.functions().fusedacc_set_grain(ctypes.c_int64(elements))


def grain_choice() -> Choice | None:
    """Return the choice of the grain size; None with one thread, or without the native library."""
    if library.load_error() is not None or torch.get_num_threads() == 1:
        return None
    return Choice(
        "elements of a thread's least share", tuple(map(str, GRAIN_SIZES)), str(GRAIN_SIZES[-1]), _grain_trial
    )


def _grain_trial() -> dict[str, Callable[[], object]]:
    total, gradient = torch.zeros(_TRIED_ELEMENTS, device="cpu"), torch.ones(_TRIED_ELEMENTS, device="cpu")
    operator = torch.ops.fusedacc.scale_accumulate_.default

    def run(elements: int) -> None:
        set_grain_size(elements)
        operator([total], [gradient], None, 1.0, [])

    return {str(elements): functools.partial(run, elements) for elements in GRAIN_SIZES}


def tune_grain_size() -> None:
    """Set the grain size by a trial, or an earlier one. An inconclusive trial is repeated when due."""
    choice = grain_choice()
    if choice is not None:
        set_grain_size(int(tuning.choose(choice, kept={}).candidate))


@functools.cache
def tune_grain_size_once() -> None:
    tune_grain_size()


#: How many bytes ahead a norm prefetches, by candidate.
PREFETCH_BYTES = {"prefetch": 2048, "no prefetch": 0}
DEFAULT_PREFETCH = "prefetch"
#: Elements of float32 from which a norm is worth a trial.
LARGE_NORM = 2**22
#: Elements per sample. Each sample reads the next stretch, since the last one is in a cache.
_STRETCH = 2**21
#: Elements of a trial's tensor if no tensors are given.
_MADE = 2**24
_prefetch_tuned = False


def set_prefetch(candidate: str) -> None:
    """Set how norms prefetch, for the whole process."""
    library.functions().fusedacc_set_norm_ahead(ctypes.c_int64(PREFETCH_BYTES[candidate]))


def prefetch_choice(tensors: Tensors | None = None) -> Choice | None:
    """Return the choice of prefetching, timed on these tensors or new ones; None without the library."""
    if library.load_error() is not None:
        return None
    trial = functools.partial(_prefetch_trial, tensors)
    return Choice("reading large norms", tuple(PREFETCH_BYTES), DEFAULT_PREFETCH, trial)


def tune_prefetch_once(tensors: Tensors) -> None:
    """After this process's first large norm, time both candidates on its tensors.

    The tensors are only read, need no further memory, and are in the caches as they are in training.
    """
    global _prefetch_tuned
    if _prefetch_tuned or not _large_norm_ran().value or not tuning.may_try():
        return
    own = [tensor for tensor in tensors if _is_usual(tensor)]
    if sum(tensor.numel() for tensor in own) >= LARGE_NORM:
        tune_prefetch(own)
        _prefetch_tuned = True


def tune_prefetch(tensors: Tensors | None = None) -> None:
    """Set prefetching by a trial, or an earlier one."""
    choice = prefetch_choice(tensors)
    if choice is not None:
        set_prefetch(tuning.choose(choice).candidate)


@functools.cache
def _large_norm_ran() -> ctypes.c_int32:
    """Not 0 once the native library has computed the norm of large tensors."""
    if library.load_error() is not None:
        return ctypes.c_int32(0)
    return ctypes.c_int32.in_dll(library.functions(), "fusedacc_large_norm_ran")


def _is_usual(tensor: Tensor) -> bool:
    plain = checks.is_plain(tensor) and tensor.is_contiguous()
    return plain and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _prefetch_trial(tensors: Tensors | None) -> dict[str, Callable[[], object]]:
    # Ones, because pages of zeros would not be in memory yet.
    stretches = itertools.cycle(_stretches(tensors or [torch.ones(_MADE, device="cpu")]))
    operator = torch.ops.fusedacc.norm_partials.default

    def run(candidate: str) -> None:
        set_prefetch(candidate)
        operator(next(stretches), 2.0)

    return {candidate: functools.partial(run, candidate) for candidate in PREFETCH_BYTES}


def _stretches(tensors: Tensors) -> list[list[Tensor]]:
    """Return the tensors in lists of `_STRETCH` elements; the remainder is left out."""
    found: list[list[Tensor]] = [[]]
    missing = _STRETCH
    for tensor in tensors:
        rest = tensor.detach().view(-1)
        while rest.numel() > 0:
            found[-1].append(rest[:missing])
            rest, missing = rest[missing:], missing - found[-1][-1].numel()
            if missing == 0:
                found.append([])
                missing = _STRETCH
    return found[:-1]
