"""The counted loop: every k-th `step()` updates, and sums are private until the window's last backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..autograd.data_parallel import may_defer
from .loop import Loop
from .loss_scale import Scaling
from .micro_batch import MicroBatch


class CountedLoop(Loop):
    """Counts micro-batches; arguments as `Loop`."""

    def step(self, closure: Callable[[], Any] | None, scaling: Scaling, arguments: Mapping[str, Any]) -> Any:
        """End a micro-batch and, if it was the window's last, update; returns what the closure returned."""
        window = self._window
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._capture.settle()
        window.check_untainted()
        self.follow()
        window.begin_step()
        if self._is_asked_for_state():
            self._make_state()
            self._accumulators.grads.ignore_present(self._slots)
            return loss
        self._collect()
        if window.micro.ran:
            window.unsynchronised = window.micro.deferred
            window.end_micro_batch()
        if window.full:
            self._close_window(scaling, arguments, partial=False)
        return loss

    def _collect(self) -> None:
        """What autograd or the user has put into p.grad belongs to this micro-batch."""
        window = self._window
        if window.empty:
            self._registry.refresh()
            self._accumulators.grads.disown_replaced()
        waiting = window.unsynchronised and not window.micro.ran  # for a backward that synchronises
        if self._inner.defaults.get("differentiable"):
            self._check_graphless()
        if not (window.micro.deferred or waiting):
            self._collect_stored()

    def _collect_stored(self) -> None:
        if self._capture.any_gradient():
            self._accumulation.collect(self._slots, self._registry.refresh)

    def _check_graphless(self) -> None:
        """Raise RuntimeError where a sum would lose the graph of a gradient."""
        for slot in self._slots:
            gradient = slot.param.grad
            if gradient is not None and gradient.requires_grad and slot.is_foreign(gradient):
                raise RuntimeError(
                    f"the gradient of parameter {slot.name!r} has a graph, and the optimizer is made with "
                    "differentiable=True: sums over micro-batches have none. Allowed: "
                    "gradient_accumulation_steps=None (the manual loop), or gradients that are detached"
                )

    def closes_window(self) -> bool:
        """Whether a `step()` now would update; takes in what is in p.grad, as that would."""
        window = self._window
        self._capture.settle()
        if window.tainted is None and not self._registry.closed:
            self.follow()
            self._collect()
        return window.full or (window.micro.ran and window.will_update)

    def show_final(self) -> None:
        """On a window's last micro-batch: put the final gradient into p.grad, all of it.

        At the end of the backward its weight may not have been set, and a gradient that autograd has stored
        with its graph is collected later.

        Raises:
            RuntimeError: the weight is still missing.
        """
        window, micro = self._window, self._window.micro
        window.check_untainted()
        if window.weighs and micro.ran and micro.weight is None:
            raise RuntimeError(
                f"reduction={window.reduction!r} needs the weight of the window's last micro-batch before "
                "unscale_(), which acts on the final gradient: set `micro_batch.weight` first"
            )
        self._accumulation.publish(ending=micro.ran)

    def flush(self, scaling: Scaling, arguments: Mapping[str, Any]) -> None:
        """Update from a part-filled window; a no-op if it is empty."""
        window = self._window
        window.check_synchronised("flush() would update every rank with gradients of its own")
        self.follow()
        # After the update, a parameter that was cast before it would look cast since.
        self._registry.refresh()
        if window.empty:
            self._accumulators.grads.disown_replaced()
        self._collect_stored()
        if window.micro.ran:
            window.end_micro_batch()
        if not window.empty:
            self._close_window(scaling, arguments, partial=True)

    def _close_window(self, scaling: Scaling, arguments: Mapping[str, Any], partial: bool) -> None:
        """One update of the inner optimizer from the window's sums.

        If it raises, the window stays as it is: `step()` or `flush()` tries again, `zero_grad()` gives up.
        """
        ratio = self._accumulation.conclude(partial)
        _, skipped = self._run(ratio, scaling, arguments)
        if ratio is None:
            self._accumulators.clear()
        else:
            self._accumulators.leave_step()
            if self._capture.compiled:
                self._accumulators.grads.drop_spent()
        self._end_update(skipped)

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of the last update; nothing in mid-window."""
        window = self._window
        if window.tainted is not None:
            return
        if window.micro.ran:
            raise RuntimeError(
                "zero_grad() after a backward that no step() has ended: its gradients are in the "
                "window's sums and cannot be taken back. Put a backward that shall not count inside "
                "optimizer.ignore(), or call optimizer.discard() to throw the window away"
            )
        if window.micro_step > 0 and not window.full:
            self._accumulators.grads.clear_ignored()
        else:
            self._clear(set_to_none)

    def around(
        self, model: torch.nn.Module | None, micro: MicroBatch
    ) -> contextlib.AbstractContextManager[None]:
        """Context around a micro-batch: the model does not synchronise before the window's last."""
        if hasattr(model, "no_sync") and self._window.reduction != "weighted":
            micro.deferred = not self._window.will_update and may_defer(model)
            if micro.deferred:
                return model.no_sync()  # type: ignore[union-attr, operator]
        return contextlib.nullcontext()
