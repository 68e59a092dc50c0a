"""Who watches what the dispatcher cannot show: launches outside it, and the phase that the wrapper is in.

Nobody, as a rule: then a report costs one look at an empty list.
"""

from __future__ import annotations

import contextlib
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
    if not watching:
        return contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        for observer in watching:
            stack.enter_context(observer.during(name))
        return stack.pop_all()
