"""Which line of the script calls `backward()` or `step()`."""

from __future__ import annotations

import functools
import inspect
import os
import zlib
from typing import NamedTuple

import torch

_STANDARD_LIBRARY = os.path.dirname(inspect.__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_AUDITING = os.path.dirname(__file__) + os.sep
_FUSEDACC = os.path.dirname(os.path.dirname(__file__)) + os.sep


class CallSite(NamedTuple):
    """A call of the script.

    Attributes:
        line: "train.py:139"; empty if only libraries are on the stack.
        place: a number for the call. Two calls on one line differ.
    """

    line: str
    place: int


def call_site() -> CallSite:
    """Return the innermost call of the script: of a file that is in no library."""
    frame = inspect.currentframe()
    calls: list[str] = []
    line = ""
    while frame is not None and not line:
        file = inspect.getfile(frame)
        if not _is_torch_or_auditing(file):
            is_library = _is_library(file)
            if not calls or not is_library:
                calls.append(f"{file}:{frame.f_lasti}")
            if not is_library:
                line = f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return CallSite(line, zlib.crc32(" ".join(calls).encode()))


@functools.cache
def _is_torch_or_auditing(file: str) -> bool:
    return file.startswith((_TORCH, _AUDITING)) or file.endswith("contextlib.py")


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith((_STANDARD_LIBRARY, _FUSEDACC, "<frozen")) or "site-packages" in file
