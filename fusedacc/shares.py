"""How many elements a CPU thread gets at least: below that, waking it takes longer than it saves."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from . import ops, tuning

#: Elements. Torch's own additions take the first; the second suits processors that wake slowly.
SHARES = (32768, 131072)
#: Elements of a trial: two of torch's shares for each of two threads.
_TRIED = 131072


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(ops.LIBRARY))
    library.fusedacc_set_grain.argtypes = [ctypes.c_int64]
    library.fusedacc_set_grain.restype = None
    return library


def set_share(elements: int) -> None:
    """From now on a thread of the extension gets no fewer elements, in the whole process."""
    _library().fusedacc_set_grain(elements)


def question() -> tuning.Question | None:
    """What is to be found out; None with one thread, or without the extension."""
    if ops.load_error() is not None or torch.get_num_threads() == 1:
        return None
    return tuning.Question(
        "elements of a thread's least share", tuple(map(str, SHARES)), str(SHARES[-1]), _trial
    )


def _trial() -> dict[str, Callable[[], object]]:
    total, gradient = torch.zeros(_TRIED, device="cpu"), torch.ones(_TRIED, device="cpu")
    operator = torch.ops.fusedacc.scale_accumulate_.default

    def run(share: int) -> None:
        set_share(share)
        operator([total], [gradient], None, 1.0, [])

    return {str(share): functools.partial(run, share) for share in SHARES}


def find_out() -> None:
    """Set what a trial finds, or has found."""
    asked = question()
    if asked is not None:
        set_share(int(tuning.choose(asked).way))


@functools.cache
def settle() -> None:
    """The same, once a process."""
    find_out()
