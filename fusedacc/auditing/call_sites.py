"""Which line of the script calls `backward()` or `step()`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

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
        library: the package that the line calls, which calls torch. Empty: the line calls torch itself.
    """

    line: str
    place: int
    library: str

    def describe(self, function: str) -> str:
        """Say where a function is called: "step() at train.py:139". Empty without a line."""
        if not self.line:
            return ""
        if self.library:
            return f"{function} in {self.library}, called from {self.line}"
        return f"{function} at {self.line}"


def call_site(made: Any = None) -> CallSite:
    """Return the innermost call of the script: of a file that is in no library.

    Args:
        made: an object whose `__init__()` runs. Then it is the call that makes the object.
    """
    inits = 0 if made is None else _count_own_inits(made)
    frame = inspect.currentframe()
    calls: list[str] = []
    line = library = ""
    while frame is not None and not line:
        file = inspect.getfile(frame)
        if not _is_torch_or_auditing(file):
            is_library = _is_library(file)
            if not calls or not is_library:
                calls.append(f"{file}:{frame.f_lasti}")
            if is_library:
                library = _package(file) or library
            elif inits:
                inits -= 1
            else:
                line = f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return CallSite(line, zlib.crc32(" ".join(calls).encode()), library)


def _count_own_inits(made: Any) -> int:
    """Return how many classes of the script have an `__init__()` that runs when an object is made."""
    count = 0
    for each in type(made).__mro__:
        with contextlib.suppress(TypeError, OSError):  # a class without a file
            file = inspect.getfile(each)
            count += "__init__" in vars(each) and not (_is_torch_or_auditing(file) or _is_library(file))
    return count


def describe_calls(sites: Iterable[CallSite], function: str) -> str:
    """Say where a function is called, without repetitions, for a text with "{name}" for amounts."""
    found = {site.describe(function) for site in sites}
    return ", ".join(sorted(found - {""})).replace("{", "{{").replace("}", "}}")


@functools.cache
def _is_torch_or_auditing(file: str) -> bool:
    return file.startswith((_TORCH, _AUDITING)) or file.endswith("contextlib.py")


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith((_STANDARD_LIBRARY, _FUSEDACC, "<frozen")) or "site-packages" in file


@functools.cache
def _package(file: str) -> str:
    """Return the name of an installed package, or an empty string."""
    if file.startswith(_FUSEDACC):
        return "fusedacc"
    _, _, path = file.rpartition("site-packages" + os.sep)
    return path.partition(os.sep)[0] if "site-packages" in file else ""
