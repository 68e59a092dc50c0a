"""What a training program is doing when an operator runs: forward, backward, accumulation or update."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import Tensor

ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"


class Phases:
    """The phase of each thread, by what fusedacc says, by optimizers' steps, and by autograd's engine."""

    def __init__(self) -> None:
        #: Names that the user has given, the innermost last: they hold for all threads.
        self.named: list[str] = []
        #: What fusedacc says that it does, by thread.
        self._observed = threading.local()
        #: Steps of optimizers that run: thread, graph task and Python frame.
        self._steps: list[tuple[int, int, Any]] = []

    def enter(self, name: str) -> None:
        """fusedacc says what it does."""
        self._observed.__dict__.setdefault("names", []).append(name)

    def leave(self) -> None:
        """The end of `enter`."""
        self._observed.names.pop()

    def begin_step(self, frame: Any) -> None:
        """An optimizer's step begins in this thread; `frame` is on the stack as long as it lasts."""
        self._steps.append((threading.get_ident(), torch._C._current_graph_task_id(), frame))

    def end_step(self) -> None:
        """The thread's innermost step has ended."""
        if self._steps and self._steps[-1][0] == threading.get_ident():
            self._steps.pop()

    def end_steps(self) -> None:
        """None is watched any longer."""
        self._steps.clear()

    def automatic(self, namespace: str, touches_gradients: bool, casts_gradient: bool) -> str:
        """The phase, whatever name the user has given it."""
        if names := getattr(self._observed, "names", None):
            return names[-1]
        task = torch._C._current_graph_task_id()
        if self._in_step(task):
            return "update"
        if task != -1:
            node = torch._C._current_autograd_node()
            accumulates = casts_gradient or node is None or node.name() == ACCUMULATE_GRAD
            return "accumulate" if accumulates else "backward"
        if namespace == "fusedacc":
            return "accumulate"
        return "update" if touches_gradients else "forward"

    def _in_step(self, task: int) -> bool:
        """Whether an optimizer's step is at work here, and not a closure or a backward that it has called."""
        while self._steps:
            thread, began_in, frame = self._steps[-1]
            if thread != threading.get_ident():
                return False
            if _on_stack(frame):
                return began_in == task and not torch.is_grad_enabled()
            self._steps.pop()  # an exception has ended it
        return False


def goes_to_a_leaf(result: Tensor) -> bool:
    """Whether what was made inside the engine is a gradient that goes to AccumulateGrad next.

    Autograd casts so for `grad_dtype` and for parameters that autocast has cast.
    """
    node: Any = torch._C._current_autograd_node()
    if torch._C._current_graph_task_id() == -1 or node is None:
        return False
    following = [function for function, _ in node.next_functions if function is not None]
    leaves = [function.variable for function in following if function.name() == ACCUMULATE_GRAD]
    return any(leaf.shape == result.shape and _grad_dtype(leaf) == result.dtype for leaf in leaves)


def _on_stack(frame: Any) -> bool:
    above: Any = sys._getframe(1)
    while above is not None and above is not frame:
        above = above.f_back
    return above is frame


def _grad_dtype(leaf: Tensor) -> torch.dtype:
    return getattr(leaf, "grad_dtype", None) or leaf.dtype
