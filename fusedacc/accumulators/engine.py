"""The state of parameters, sums and windows, and the engine that adds gradients.

The classes come from the compiled module if there is one (`csrc/autograd/module.cpp`), else from `state.py`.
`engine_for` chooses the engine of each wrapper.
"""

from __future__ import annotations

from typing import Any

from ..kernels import launch_events, native_module
from . import state
from .fallback import FallbackEngine

_module: Any = native_module.loaded() or state
launch_events.tell_engines()

Slot: Any = _module.Slot
Sums: Any = _module.Sums
WindowState: Any = _module.WindowState
#: One call of autograd's engine. `csrc/autograd/backward_pass.h` describes the fields.
BackwardPass: Any = _module.BackwardPass

#: Gradients that wait for a launch are added when they have this many bytes.
LAUNCH_BYTES = 25 * 2**20


def engine_for(sums: Any, window: Any, **callbacks: Any) -> Any:
    """Return a new engine: the native one, or the fallback if it is missing or switched off.

    sums, window: a `Sums` and a `WindowState`. callbacks: functions for the engine to call, as in
    `Engine::Callbacks` in csrc/autograd/engine.h. None may refer strongly to an object that has the engine.
    """
    module = native_module.module()
    if module is None:
        return FallbackEngine(sums, window, **callbacks)
    return module.Engine(native_module.add_flat(), LAUNCH_BYTES, sums, window, **callbacks)
