"""Who watches what the dispatcher cannot show: launches outside it, and the phase that the wrapper is in.

Nobody, as a rule: then a report costs one look at an empty list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol


class Observer(Protocol):
    """What `fusedacc.traffic.TrafficMeter` is to the code that it watches."""

    def launched(self, kernel: str, *operands: Any) -> None:
        """A kernel has been launched; `fusedacc.traffic.rules` has what each kernel's operands are."""

    def during(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Context: fusedacc does work of this phase."""


#: The observers that are watching now.
watching: list[Observer] = []


def launched(kernel: str, *operands: Any) -> None:
    """Report a launch that does not go through torch's dispatcher."""
    for observer in watching:
        observer.launched(kernel, *operands)


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Context: tell observers what the work inside is for, where they cannot see it."""
    return _told(name) if watching else contextlib.nullcontext()


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as told:
        for observer in watching:
            told.enter_context(observer.during(name))
        yield
