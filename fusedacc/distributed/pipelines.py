"""Pipeline schedules (`torch.distributed.pipelining`): tell optimizers when a `step()` begins and ends.

One `schedule.step()` runs many backward passes, divides `p.grad` by the number of its micro-batches
(`scale_grads=True`), and in zero-bubble schedules writes `p.grad` outside of any backward pass. No single
backward pass of it is a micro-batch, only the whole `step()` is.

torch has no hook there, and nothing leads from a parameter to its schedule, which is often made after the
optimizer. A hook on a module would come too late to refuse anything: `step()` sends before it runs the first
module. So `step` is replaced on the two public classes from which every schedule inherits it, as long as an
optimizer listens. Private to torch are `_stage` and `_stages`, the stages of a schedule, and `_has_backward`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..accumulators import Slot
from .ddp import IdleReducer

_MODULE = "torch.distributed.pipelining.schedules"
_CLASSES = ("PipelineScheduleSingle", "PipelineScheduleMulti")


#: Each has `around_step(schedule, parameters)`, a context around one `schedule.step()` that trains those of
#: these ids.
#: They are in the order in which they came, since each may reduce, and all ranks must do so in one order.
_listeners: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
#: By class: the `step` that torch gave it, and ours.
_replaced: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def listen(listener: Any) -> None:
    """Tell this listener of every `schedule.step()` from now on."""
    _listeners[listener] = None
    install()


def leave(listener: Any) -> None:
    """Tell this listener nothing more. With the last listener, torch's classes are as they were."""
    _listeners.pop(listener, None)
    for kind, (former, ours) in () if _listeners else list(_replaced.items()):
        if kind.step is ours:  # else other code has replaced `step` after us, and calls ours
            kind.step = former
            del _replaced[kind]


def install() -> bool:
    """Replace `step`, once schedules have been imported; whether this call has done it."""
    if _replaced or _MODULE not in sys.modules:
        return False
    for name in _CLASSES:
        kind = getattr(sys.modules[_MODULE], name)
        _replaced[kind] = kind.step, _announcing(kind.step)
        kind.step = _replaced[kind][1]
    return True


def unseen_module() -> str | None:
    """The module with whose import `began_unseen` may become true; None: it cannot any more."""
    return None if _replaced else _MODULE


def began_unseen(slots: Iterable[Slot]) -> bool:
    """Whether a `step()` of a schedule that trains these parameters may be running, and no listener was told.

    That is so once, where schedules are imported after the optimizer was made.
    """
    if not install():
        return False
    own, kinds = {id(slot.param) for slot in slots}, tuple(_replaced)
    schedules = (each for each in gc.get_objects() if issubclass(type(each), kinds))
    return not all(own.isdisjoint(parameters_of(schedule)) for schedule in schedules)


def _announcing(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def announced(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as contexts:
            if _listeners and schedule._has_backward:
                _check_bare(schedule)
                parameters = parameters_of(schedule)
                for listener in list(_listeners):
                    contexts.enter_context(listener.around_step(schedule, parameters))
            return step(schedule, *args, **kwargs)

    return announced


def is_schedule(value: Any) -> bool:
    """Whether it is a pipeline schedule of torch."""
    kinds = [getattr(sys.modules[_MODULE], name) for name in _CLASSES] if _MODULE in sys.modules else []
    return isinstance(value, tuple(kinds))


def stages_of(schedule: Any) -> list[Any]:
    """The stages that a schedule has on this rank."""
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def parameters_of(schedule: Any) -> set[int]:
    """The ids of the parameters of these stages."""
    return {id(p) for stage in stages_of(schedule) for p in stage.submod.parameters()}


def _check_bare(schedule: Any) -> None:
    """Raise RuntimeError where a stage is a DistributedDataParallel whose reducer is put away.

    Schedules call that reducer by themselves (torch/distributed/pipelining/stage.py,
    `backward_maybe_with_nosync`).
    """
    for stage in stages_of(schedule):
        module = stage.submod
        if isinstance(module, DistributedDataParallel) and isinstance(module.reducer, IdleReducer):
            raise RuntimeError(
                f"{type(schedule).__name__}.step(): stage {stage.stage_index} is a DistributedDataParallel "
                "whose gradients the optimizer reduces (data_parallel=ddp), and the schedule needs its "
                "reducer. Allowed: stages of bare modules, and data_parallel=<the process group of the "
                "data-parallel ranks>"
            )
