"""How many elements a CPU thread gets at least: below that, waking it takes longer than it saves."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from . import library, tuning

#: Elements. Torch's own additions take the first; the second suits processors that wake slowly.
GRAIN_SIZES = (32768, 131072)
#: Elements of a trial: two of torch's grains for each of two threads.
_TRIED = 131072


def set_grain_size(elements: int) -> None:
    """From now on a thread of the extension gets no fewer elements, in the whole process."""
    library.functions().fusedacc_set_grain(ctypes.c_int64(elements))


def question() -> tuning.Question | None:
    """What is to be found out; None with one thread, or without the extension."""
    if library.load_error() is not None or torch.get_num_threads() == 1:
        return None
    return tuning.Question(
        "elements of a thread's least share", tuple(map(str, GRAIN_SIZES)), str(GRAIN_SIZES[-1]), _trial
    )


def _trial() -> dict[str, Callable[[], object]]:
    total, gradient = torch.zeros(_TRIED, device="cpu"), torch.ones(_TRIED, device="cpu")
    operator = torch.ops.fusedacc.scale_accumulate_.default

    def run(elements: int) -> None:
        set_grain_size(elements)
        operator([total], [gradient], None, 1.0, [])

    return {str(elements): functools.partial(run, elements) for elements in GRAIN_SIZES}


def tune() -> None:
    """Set what a trial finds, or has found. Every size gives the same bits: an inconclusive trial is repeated
    when it is due."""
    asked = question()
    if asked is not None:
        set_grain_size(int(tuning.choose(asked, kept={}).way))


@functools.cache
def tune_once() -> None:
    """Do the same once a process."""
    tune()
