"""Micro-batches in the middle of a window, with which native code deals without Python.

They are all alike: the first of a window makes the sums, and the last finishes them. When a backward that
Python has handled ends, Python decides how native code handles those that follow, and lists the attributes on
which this depends. `MiddleOfWindow` (csrc/autograd/middle_of_window.h) then begins and ends their backward
passes, and does their `step()` and `zero_grad()`, until one of these attributes changes. Where the last
micro-batch adds as they do, native code begins its backward too, and asks Python only at its end.

When `zero_grad()` has emptied a window, Python decides likewise how native code begins the backward of its
first micro-batch: gradients wait in buckets, and products are written over the memory of the last window's
sums. At its end Python makes the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.optim import Optimizer

#: An object and the name of one of its attributes.
Attribute = tuple[Any, str]


class Assumptions(NamedTuple):
    """What must be so in the middle of a window; looked up at each use, so that nothing has to tell."""

    #: What must be false, None or empty.
    is_false: list[Attribute]
    #: What must stay the same object.
    stays: list[Attribute]


class Owners(NamedTuple):
    """What native code reads and writes in the middle of a window, and whom it tells."""

    #: Counts the micro-batches.
    window: Any
    #: The inner optimizer, whose groups have the parameters.
    inner: Optimizer
    #: Has noted which parameters these are, in `_seen`.
    parameters: Any
    #: Called with the identity of a graph task at its end, where Python has taken it over.
    on_end: Callable[[int], None]
    #: Called at the end of a window's first or last backward, where Python has not taken it over: by what its
    #: gradients were multiplied, the numbers of the sums that were added to, and the buckets.
    on_edge: Callable[[float, list[int], list[Any]], None]


class First(NamedTuple):
    """What is done when the first backward of a window begins."""

    #: By what gradients are multiplied.
    scale: float
    #: A module whose import ends this; None: there is none.
    not_imported: str | None


class Middle(NamedTuple):
    """What is done in the middle of a window."""

    #: By what gradients are multiplied.
    scale: float
    #: The micro-batches of the window; 0 where `step()` ends none.
    steps: int
    #: Whether the last micro-batch adds its gradients as these do.
    begins_last: bool
    #: A module whose import ends this; None: there is none.
    not_imported: str | None


class LeftToPython:
    """The same interface where there is no native code: Python deals with every micro-batch."""

    #: Whether native code has begun a backward pass that goes on.
    runs = False

    def arm(self, scale: float, steps: int, begins_last: bool, not_imported: str | None, owes: bool) -> None:
        """Deal with further micro-batches: they are like the last. owes: sums may have deferred scales."""

    def disarm(self) -> None:
        """Deal with no further one."""

    def running(self) -> None:
        """Hand the graph task that runs over to Python, until `let_go`: there is none."""

    def let_go(self) -> None:
        """Python has taken it over."""

    def step(self) -> bool:
        """`AccumulatingOptimizer.step()` in mid-window; False: nothing is done, that is left to Python."""
        return False

    def zero_grad(self) -> bool:
        """`AccumulatingOptimizer.zero_grad()` likewise."""
        return False
