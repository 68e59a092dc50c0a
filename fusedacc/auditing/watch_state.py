"""What the parts of a watch share: what is recorded, wrapped functions, and how the watch ends."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .leaves import GradState, Leaves
from .optimizers import OptimizerRecord, Optimizers
from .records import BackwardPass, History
from .sketch_sets import SketchPages
from .sketches import SketchMap


class WatchState:
    """The state of a watch.

    Args:
        history: passes and updates.
        model: names the parameters. None: look for the modules that have them.

    Attributes:
        history: passes and updates.
        optimizers: all that the watch has seen.
        leaves: the parameters.
        sketch: makes a sketch of a gradient.
        pages: memory of sketches.
        current: the backward pass that runs.
        num_waiting: passes since the last update of any optimizer.
        versions: `Optimizers.versions()` after the last pass.
        loss_scale: that of a GradScaler.
        unclipped: by a parameter's id: sketch of p.grad before clip_grad_value_, and state of p.grad after
            it.
        seconds: time that the audit took.
        is_closed: whether the watch has ended.
    """

    def __init__(self, history: History, model: nn.Module | None) -> None:
        self.history = history
        self.optimizers = Optimizers(history, model)
        self.leaves = Leaves()
        self.sketch = SketchMap().sketch
        self.pages = SketchPages()
        self.current: BackwardPass | None = None
        self.num_waiting = 0
        self.versions: dict[int, int] = {}
        self.loss_scale: Any = 1.0
        self.unclipped: dict[int, tuple[Tensor, GradState]] = {}
        self.seconds = 0.0
        self.is_closed = False
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a function by `around(function, *arguments)`."""
        original = getattr(owner, name)

        @functools.wraps(original)  # with its signature: Accelerate reads that of zero_grad
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        def undo() -> None:
            # Other code may have replaced the wrapper, and may call it. The wrapper then only calls on.
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)

        setattr(owner, name, wrapper)
        self._undo.append(undo)

    def close(self) -> None:
        """Put everything back, and remove all hooks but those of `step()`, which may be running."""
        self.is_closed = True
        while self._undo:
            self._undo.pop()()
        self.leaves.remove_hooks()

    def stop(self, reason: str) -> None:
        """End because the audit cannot look at something, or has failed."""
        self.history.add_note(f"the audit stopped: {reason}")
        self.history.failed = True
        self.close()

    def own(self, record: OptimizerRecord, param: Tensor) -> int:
        """Note that an optimizer has a parameter. Return the number of the leaf whose gradients it gets."""
        number = self.leaves.number_of_gradient(param)
        record.owned.setdefault(number, weakref.ref(param))
        record.owned_mask |= 1 << number
        self.history.owned_by_any |= 1 << number
        return number
