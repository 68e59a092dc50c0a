"""What keeps torch.compile away from functions of ours, and lets it compile what they stand in for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Private names of torch, here since 2.7. Reading them imports no compiler.
_compiler: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)

#: Returns what compiles the frames that this thread calls; None where they run as written. Ask
#: `torch.compiler.is_compiling()` first: Dynamo cannot trace a call of this C function.
frame_compiler: Callable[[], Any] = getattr(_compiler, "get_eval_frame_callback", type(None))


def runs_as_written(function: _Function, calls_too: bool = True) -> _Function:
    """Mark a function that Dynamo neither compiles by itself nor looks into for others to compile.

    Dynamo leaves the frames of torch.nn alone unless it inlines them, such as that of `nn.Linear.forward`; a
    function of ours in its place, or in a backward, would be compiled with further guards. It is still
    inlined into a forward that is compiled. Imports no compiler.

    Args:
        function: what is marked, and returned.
        calls_too: whether Dynamo also leaves alone what the function calls.
    """
    with contextlib.suppress(AttributeError):
        skip, default = _compiler._FrameAction.SKIP, _compiler._FrameAction.DEFAULT
        strategy = _compiler._FrameExecStrategy(skip, skip if calls_too else default)
        _compiler.set_code_exec_strategy(function.__code__, strategy)
    return function
