"""The interface to native code that runs the micro-batches of a window without Python.

Only the first micro-batch of a window creates sums, and only the last finishes them; those in the middle are
all alike. Native code also begins the first and the last backward pass, checks before an update whether it
needs more than the inner optimizer, and clears the window afterwards. At the end of a backward pass that
Python has handled, Python decides how native code handles the following ones, and lists the attributes that
this decision depends on. Until one of these changes, `MiddleOfWindow` (csrc/autograd/middle_of_window.h)
begins and ends their backward passes and runs their `step()` and `zero_grad()`. If the last micro-batch adds
in the same way, native code begins its backward pass too, and calls Python only at the end.

After `zero_grad()` has cleared a window, Python decides in the same way how native code handles the next one.
In the first backward pass gradients wait in buckets, and products allocate their sums. Ordinary gradients
then become the sums natively; otherwise Python creates the sums and decides again.

After a window's last backward pass, native code puts the sums into p.grad, or Python does, and native code
remembers them. If nothing has changed them by the time of `step()`, `end_before_update()` is true, and only
the inner optimizer runs. `clear()` then begins the next window with the same plan if Python has decided
nothing since.

`MiddleOfWindow` reads the fields of these records by position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

#: An object and the name of one of its attributes.
Attribute = tuple[Any, str]


class Assumptions(NamedTuple):
    """Conditions for native code in the middle of a window, checked at each use.

    The argument of the C++ class with the same name, which reads the attributes.
    """

    #: What must be false, None or empty.
    is_false: list[Attribute]
    #: What must stay the same object.
    stays: list[Attribute]
    #: What only native code may change.
    versions: list[Attribute]


class Owners(NamedTuple):
    """The objects of one wrapper that native code works for; it refers weakly to the first four."""

    window: Any
    #: The inner optimizer, whose groups have the parameters.
    inner: Any
    #: The `ParameterSet`.
    parameters: Any
    registry: Any
    #: Ends a backward pass that Python has taken over, by its graph task's identity.
    finish: Callable[[int], None]
    #: Ends a window's first or last backward pass: called with the scale, the native indices of the sums that
    #: were added to, and the buckets.
    finish_first_or_last: Callable[[float, list[int], list[Any]], None]


class SumRecords(NamedTuple):
    """Python's records of the sums, which native code reads and writes.

    The argument of the C++ class with the same name, which changes them.
    """

    grads: Any
    deferred: Any
    #: The slots by native index.
    slots_by_index: list[Any]
    #: Two `GradState`s.
    not_ours: Any
    published: Any


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
    #: Whether the window's last backward pass has ended, and the update needs only the sums in p.grad.
    awaits_update: bool = False


class First(NamedTuple):
    """How native code begins the first backward pass of a window."""

    #: The factor of gradients.
    scale: float
    #: A module whose import invalidates this; None for none.
    not_imported: str | None
    #: How it handles the following micro-batches; None if Python decides at the end of this backward pass.
    following: Middle | None
    #: Whether the update needs nothing but the sums in p.grad.
    updates: bool


class LeftToPython:
    """Leaves every micro-batch to Python, as without native code (see csrc/autograd/middle_of_window.h)."""

    #: Whether native code is running a backward pass.
    runs = False

    def disarm(self) -> None:
        """Do nothing."""

    def note_update(self) -> None:
        """Do nothing."""

    def step(self) -> bool:
        """Return False: `AccumulatingOptimizer.step()` runs in Python."""
        return False

    def zero_grad(self) -> bool:
        """Return False: `AccumulatingOptimizer.zero_grad()` runs in Python."""
        return False

    def end_before_update(self) -> bool:
        """Return False: `step()` has to look at p.grad."""
        return False

    def clear(self) -> bool:
        """Return False: `zero_grad()` after an update runs in Python."""
        return False
