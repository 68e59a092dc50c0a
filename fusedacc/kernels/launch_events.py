"""Reports to observers that the dispatcher cannot make: launches outside it, and the wrapper's phase."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from . import native_module

#: The active instances of `fusedacc.traffic.TrafficMeter`; usually none, so that a report costs little.
watching: list[Any] = []


def watch(observer: Any) -> None:
    """Report to this observer. Python then makes all launches of wrappers."""
    watching.append(observer)
    tell_engines()


def unwatch(observer: Any) -> None:
    """Report no longer to this observer."""
    watching.remove(observer)
    tell_engines()


def tell_engines() -> None:
    """Tell native engines whether there are observers. Call it again when the module has been loaded."""
    module: Any = native_module.loaded_before()
    if module is not None:
        module.Engine.set_watched(bool(watching))


def launched(kernel: str, *operands: Any) -> None:
    """Report a launch outside torch's dispatcher. `fusedacc.traffic.rules` documents the operands."""
    for observer in watching:
        observer.launched(kernel, *operands)


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Context: report the phase of the work inside."""
    return _in_phase(name) if watching else contextlib.nullcontext()


@contextlib.contextmanager
def _in_phase(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for observer in watching:
            stack.enter_context(observer.during(name))
        yield
