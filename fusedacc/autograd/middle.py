"""The interface to native code that runs the middle micro-batches of a window without Python.

Only the first micro-batch of a window creates sums, and only the last finishes them; those in the middle are
all alike. At the end of a backward pass that Python has handled, Python decides how native code handles the
following ones, and lists the attributes that this decision depends on. Until one of these changes,
`MiddleOfWindow` (csrc/autograd/middle_of_window.h) begins and ends their backward passes and runs their
`step()` and `zero_grad()`. If the last micro-batch adds in the same way, native code begins its backward pass
too, and calls Python only at the end.

After `zero_grad()` has cleared a window, Python decides in the same way how native code handles the next one.
In the first backward pass gradients wait in buckets, and products overwrite the memory of the last window's
sums. Ordinary gradients then become the sums natively; otherwise Python creates the sums and decides again.

After a window's last backward pass, native code puts the sums into p.grad, or Python does, and native code
remembers them. If nothing has changed them by the time of `step()`, `ends()` is true, and only the inner
optimizer runs. `clear()` then begins the next window with the same plan if Python has decided nothing since.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: An object and the name of one of its attributes.
Attribute = tuple[Any, str]


class Assumptions(NamedTuple):
    """Conditions for native code in the middle of a window, checked at each use."""

    #: What must be false, None or empty.
    is_false: list[Attribute]
    #: What must stay the same object.
    stays: list[Attribute]
    #: What only native code may change.
    versions: list[Attribute]


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

    def step(self) -> bool:
        """Leave it to Python."""
        return False

    note_update = disarm
    ends = clear = zero_grad = step
