"""Pipeline schedules (`torch.distributed.pipelining`): notify optimizers when a `step()` begins and ends.

One `schedule.step()` runs many backward passes and divides `p.grad` by the number of its micro-batches
(`scale_grads=True`). Zero-bubble schedules also write `p.grad` outside any backward pass. So the whole
`step()` is one micro-batch, and a single backward pass is not.

torch has no hook for this, and a parameter has no reference to its schedule, which is often made after the
optimizer. A module hook runs too late to raise an error: `step()` communicates before it runs the first
module. So this file replaces `step` on the two public base classes of all schedules while an optimizer
listens. The private names that it uses are in `torch_names`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ..accumulators import Slot
from .torch_names import NAMES, missing

_MODULE = "torch.distributed.pipelining.schedules"

#: Objects with `around_step(schedule)`: a context around one `schedule.step()`. Each may reduce, and all
#: ranks must reduce in the same order, so the listeners are kept in the order of their `listen()` calls.
_listeners: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
#: By class: torch's `step`, and the function that replaces it.
_replaced: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}
#: Which of these classes this version of torch lacks, in words.
_lacking = ""


def listen(listener: Any) -> None:
    """Notify this listener of every `schedule.step()` from now on."""
    _listeners[listener] = None
    install()


def leave(listener: Any) -> None:
    """Stop notifying this listener. After the last one, restore torch's classes."""
    _listeners.pop(listener, None)
    for kind, (former, ours) in () if _listeners else list(_replaced.items()):
        if kind.step is ours:  # else other code has replaced it again, and may still call this one
            kind.step = former
            del _replaced[kind]


def install() -> bool:
    """Replace `step` if torch's schedules are imported, and return whether this call replaced it."""
    global _lacking
    module = sys.modules.get(_MODULE)
    if _replaced or module is None:
        return False
    known, _lacking = _lacking, missing(_MODULE, module)
    if _lacking:
        if _lacking != known:
            warnings.warn(
                f"{_lacking}: fusedacc cannot see when schedule.step() begins, and sums of counted loops "
                "inside a schedule are wrong",
                stacklevel=2,
            )
        return False
    for name in NAMES[_MODULE]:
        kind = getattr(module, name)
        _replaced[kind] = kind.step, _announcing(kind.step)
        kind.step = _replaced[kind][1]
    return True


def unseen_module() -> str | None:
    """Return the module whose import can make `began_unseen` true, or None if it stays false."""
    return None if _replaced or _lacking else _MODULE


def began_unseen(slots: Iterable[Slot]) -> bool:
    """Whether a schedule's `step()` may be training these parameters without having notified the listeners.

    Happens at most once, if schedules are imported after the optimizer was made.
    """
    if not install():
        return False
    own, kinds = {id(slot.param) for slot in slots}, tuple(_replaced)
    schedules = (each for each in gc.get_objects() if issubclass(type(each), kinds))
    return any(trains(schedule, own) for schedule in schedules)


def _announcing(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def announced(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as contexts:
            if _listeners and getattr(schedule, "_has_backward", True):
                for listener in list(_listeners):
                    contexts.enter_context(listener.around_step(schedule))
            return step(schedule, *args, **kwargs)

    return announced


def is_schedule(value: Any) -> bool:
    """Whether the value is one of torch's pipeline schedules."""
    module = sys.modules.get(_MODULE)
    return isinstance(value, tuple(getattr(module, name) for name in NAMES[_MODULE] if hasattr(module, name)))


def stages_of(schedule: Any) -> list[Any]:
    """Return the schedule's stages on this rank."""
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def trains(schedule: Any, parameters: set[int]) -> bool:
    """Whether the schedule may train parameters with these ids; True if this torch does not say which."""
    unknown = missing("pipeline schedule", schedule)
    return bool(unknown) or not parameters.isdisjoint(parameters_of(schedule))


def parameters_of(schedule: Any) -> set[int]:
    """Return the ids of the parameters in the schedule's stages on this rank."""
    return {id(p) for stage in stages_of(schedule) for p in stage.submod.parameters()}
