"""Keeps failures of the audit away from the script, and measures the audit's time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from ..kernels import torch_private

_P = ParamSpec("_P")
_R = TypeVar("_R")


class CannotAuditError(Exception):
    """The audit cannot look at something. Its text ends the sentence "the audit stopped: "."""


class Stoppable(Protocol):
    """What `guarded` needs of a watch."""

    is_closed: bool
    seconds: float

    def stop(self, reason: str) -> None: ...


class Guarded(Protocol):
    """What `guarded` needs of an object."""

    @property
    def watch(self) -> Stoppable: ...


_G = TypeVar("_G", bound=Guarded)


def guarded(method: Callable[Concatenate[_G, _P], _R]) -> Callable[Concatenate[_G, _P], _R | None]:
    """Time a method. If it fails, the audit stops with a note, and the script goes on.

    Returns:
        A method that returns None if the audit has ended or fails.
    """

    @functools.wraps(method)
    @torch_private.disable_dynamo  # a compiled function may call it, as a compiled optimizer does
    def run(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        if self.watch.is_closed:
            return None
        start = time.perf_counter()
        try:
            with torch.no_grad():
                return method(self, *args, **kwargs)
        except CannotAuditError as error:
            self.watch.stop(str(error))
        except Exception as error:  # whatever it is, the script must go on
            self.watch.stop(f"{type(error).__name__} in {method.__name__}: {error}")
        finally:
            self.watch.seconds += time.perf_counter() - start
        return None

    return run
