"""Functions of ours that torch.compile is to leave alone where it meets them by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def runs_as_written(function: _Function) -> _Function:
    """Mark a function that Dynamo neither compiles by itself nor looks into for others to compile.

    Dynamo leaves the frames of torch.nn alone unless it inlines them, such as that of `nn.Linear.forward`; a
    function of ours in its place, or in a backward, would be compiled with guards of its own. It is still
    inlined into a forward that is compiled. Imports no compiler.
    """
    compiler: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    with contextlib.suppress(AttributeError):  # private names of torch, here since 2.7
        skip = compiler._FrameAction.SKIP
        compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, skip))
    return function
