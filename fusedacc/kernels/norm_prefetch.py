"""Whether the CPU loops prefetch what norms read: it makes some processors faster and others slower."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import checks, library, tuning

#: How many bytes ahead of what it reads a norm prefetches, by way. Every way gives the same bits.
PREFETCH_BYTES = {"prefetch": 2048, "no prefetch": 0}
DEFAULT = "prefetch"
#: Elements: a norm of fewer float32 numbers is not worth a trial.
LARGE_NORM = 2**22
#: Elements that a sample of a trial reads. Each sample reads the next stretch of the tensors, since the one
#: before is in a cache now.
_STRETCH = 2**21
#: Elements that are made for a trial where no tensors are at hand.
_MADE = 2**24
_done = False


def set_prefetch(way: str) -> None:
    """Read norms in this way from now on, in the whole process."""
    library.functions().fusedacc_set_norm_ahead(ctypes.c_int64(PREFETCH_BYTES[way]))


def question(tensors: Sequence[Tensor] | None = None) -> tuning.Question | None:
    """What to find out, timed on large tensors, or on new ones; None without the extension."""
    if library.load_error() is not None:
        return None
    trial = functools.partial(_trial, tensors)
    return tuning.Question("reading large norms", tuple(PREFETCH_BYTES), DEFAULT, trial)


def tune_once(tensors: Sequence[Tensor]) -> None:
    """Time both ways on tensors whose norm was taken just now, after the first large norm of this process.

    The tensors are read only. They take no memory beside those of the user, and lie in the caches as they do
    in training.
    """
    global _done
    if _done or not _large_norm_ran().value or not tuning.may_try():
        return
    own = [tensor for tensor in tensors if _is_usual(tensor)]
    if sum(tensor.numel() for tensor in own) >= LARGE_NORM:
        tune(own)
        _done = True


def tune(tensors: Sequence[Tensor] | None = None) -> None:
    """Set what a trial finds, or has found."""
    asked = question(tensors)
    if asked is not None:
        set_prefetch(tuning.choose(asked).way)


@functools.cache
def _large_norm_ran() -> ctypes.c_int32:
    """Not 0 once the extension has taken the norm of large tensors."""
    if library.load_error() is not None:
        return ctypes.c_int32(0)
    return ctypes.c_int32.in_dll(library.functions(), "fusedacc_large_norm_ran")


def _is_usual(tensor: Tensor) -> bool:
    plain = checks.is_plain(tensor) and tensor.is_contiguous()
    return plain and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _trial(tensors: Sequence[Tensor] | None) -> dict[str, Callable[[], object]]:
    # Ones, since the pages of zeros would not be memory yet.
    stretches = itertools.cycle(_stretches(tensors or [torch.ones(_MADE, device="cpu")]))
    operator = torch.ops.fusedacc.norm_partials.default

    def run(way: str) -> None:
        set_prefetch(way)
        operator(next(stretches), 2.0)

    return {way: functools.partial(run, way) for way in PREFETCH_BYTES}


def _stretches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in lists of `_STRETCH` elements each; what remains is left out."""
    found: list[list[Tensor]] = []
    stretch, missing = [], _STRETCH
    for tensor in tensors:
        rest = tensor.detach().view(-1)
        while rest.numel() > 0:
            stretch.append(rest[:missing])
            rest = rest[missing:]
            missing -= stretch[-1].numel()
            if missing == 0:
                found.append(stretch)
                stretch, missing = [], _STRETCH
    return found
