"""The interface to native code that runs the middle micro-batches of a window without Python.

Only the first micro-batch of a window creates sums, and only the last finishes them; those in the middle are
all alike. At the end of a backward pass that Python has handled, Python decides how native code handles the
following ones, and lists the attributes that this decision depends on. Until one of these changes,
`MiddleOfWindow` (csrc/autograd/middle_of_window.h) begins and ends their backward passes and runs their
`step()` and `zero_grad()`. If the last micro-batch adds in the same way, native code begins its backward pass
too, and calls Python only at the end.

After `zero_grad()` has cleared a window, Python decides in the same way how native code begins the backward
pass of the first micro-batch: gradients wait in buckets, and products overwrite the memory of the last
window's sums. At the end of this pass Python creates the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.optim import Optimizer

#: An object and the name of one of its attributes.
Attribute = tuple[Any, str]


class Assumptions(NamedTuple):
    """Conditions for native code in the middle of a window, checked at each use."""

    #: What must be false, None or empty.
    is_false: list[Attribute]
    #: What must stay the same object.
    stays: list[Attribute]


class Owners(NamedTuple):
    """The objects that native code uses in the middle of a window, and its callbacks."""

    #: Counts the micro-batches.
    window: Any
    #: The inner optimizer, whose groups have the parameters.
    inner: Optimizer
    #: The parameter set, whose `_seen` lists the groups' parameters.
    parameters: Any
    #: Called with the identity of a graph task at its end, if Python has taken it over.
    on_end: Callable[[int], None]
    #: Called at the end of a window's first or last backward pass, if Python has not taken it over: with the
    #: factor of its gradients, the numbers of the sums that were added to, and the buckets.
    on_edge: Callable[[float, list[int], list[Any]], None]


class First(NamedTuple):
    """How native code begins the first backward pass of a window."""

    #: The factor of gradients.
    scale: float
    #: A module whose import invalidates this; None for none.
    not_imported: str | None


class Middle(NamedTuple):
    """How native code handles the middle micro-batches of a window."""

    #: The factor of gradients.
    scale: float
    #: The number of micro-batches in the window; 0 in a manual loop.
    steps: int
    #: Whether the last micro-batch adds its gradients in the same way.
    begins_last: bool
    #: A module whose import invalidates this; None for none.
    not_imported: str | None


class LeftToPython:
    """The same interface without native code: Python handles every micro-batch."""

    #: Whether native code is running a backward pass.
    runs = False

    def arm(self, scale: float, steps: int, begins_last: bool, not_imported: str | None, owes: bool) -> None:
        """Handle the following micro-batches. `owes` says whether sums may have deferred scales."""

    def disarm(self) -> None:
        """Stop handling micro-batches."""

    def running(self) -> None:
        """Return the running graph task, for Python to take over until `let_go`; here there is none."""

    def let_go(self) -> None:
        """Release the graph task that Python has taken over."""

    def step(self) -> bool:
        """Run `AccumulatingOptimizer.step()` in mid-window, or return False to leave it to Python."""
        return False

    def zero_grad(self) -> bool:
        """Run `AccumulatingOptimizer.zero_grad()`, or return False to leave it to Python."""
        return False
