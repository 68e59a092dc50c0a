"""The engine where the native one is missing: autograd stores each gradient, and Python adds it from there.

Every loop gives the same results, but nothing is saved (docs/limits.md has what differs). The methods are
those that csrc/autograd/module.cpp binds; engine.h, hook.h and reason.h describe them.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.torch_private import current_graph_task, queue_callback, runs_as_written


class FallbackEngine:
    """Leaves all gradients to autograd."""

    def __init__(
        self,
        sums: Any,
        window: Any,
        *,
        begin: Callable[[], Any],
        receive: Callable[..., bool],
        stored: Callable[[Any], None],
        finish: Callable[[Any], None],
        **of_native: Any,
    ) -> None:
        self.lock = threading.RLock()
        self.is_bypassed = False
        self._begin = begin
        self._receive = receive
        self._stored = stored
        self._finish = finish
        self._backwards: Any = {}  # by graph task
        #: The callback of each. Only autograd's engine keeps it alive: it is gone once the pass has failed.
        self._callbacks: dict[Any, weakref.ref] = {}
        self._nodes: dict[Any, Any] = {}
        self._handles: dict[Any, list[Any]] = {}
        #: The slots whose gradient is added as soon as their node has run.
        self._collects: set[Any] = set()
        self._slots: Sequence[Any] = ()
        #: The thread that has ended the last backward pass, and whether there were others.
        self._last_thread: int | None = None
        self.has_threads = False

    def attach(self, slot: Any, node: Any) -> None:
        """Put hooks on the slot's AccumulateGrad node."""
        engine = weakref.ref(self)

        @runs_as_written
        def before(gradients: tuple[Tensor | None]) -> tuple[None] | None:
            owner = engine()
            if owner is None or not slot.param.requires_grad or owner.enter() is None:
                return None
            reason = "hook_after_node" if slot.is_reduced_outside() else "no_engine"
            with owner.lock:
                return (None,) if owner._receive(slot, gradients[0], reason, False) else None

        @runs_as_written
        def after(*gradients: Any) -> None:
            owner = engine()
            if owner is not None and slot in owner._collects:
                owner._collects.remove(slot)
                with owner.lock:
                    owner._stored(slot)

        self._nodes[slot] = node
        self._handles[slot] = [node.register_prehook(before), node.register_hook(after)]

    def detach(self, slot: Any) -> None:
        self._nodes.pop(slot, None)
        for handle in self._handles.pop(slot, ()):
            handle.remove()

    def collect_after_node(self, slot: Any) -> None:
        self._collects.add(slot)

    def current_backward(self) -> Any:
        return self._backwards.get(current_graph_task())

    def enter(self) -> Any:
        with self.lock:
            identity = current_graph_task()
            backward: Any = self._backwards.get(identity)
            if backward is None and identity != -1:
                backward = self._begin()
                if backward is not None:
                    backward.identity = identity
                    self._backwards[identity] = backward
                    self.call_back(backward)
            return backward

    def backwards(self) -> list[Any]:
        return list(self._backwards.values())

    def has_failed(self, backward: Any) -> bool:
        return self._callbacks[backward]() is None

    def call_back(self, backward: Any) -> None:
        callback = functools.partial(_finish, weakref.ref(self), backward)
        self._callbacks[backward] = weakref.ref(callback)
        queue_callback(callback)

    def end_backward(self, backward: Any) -> None:
        """End a backward pass, unless it was dropped."""
        if self._backwards.get(backward.identity) is backward:
            thread = threading.get_ident()
            with self.lock:
                self.has_threads |= self._last_thread not in (None, thread)
                self._last_thread = thread
            self._finish(backward)

    def drop(self, backward: Any) -> bool:
        if self._backwards.get(backward.identity) is not backward:
            return False
        del self._backwards[backward.identity]
        del self._callbacks[backward]
        return True

    def set_slots(self, slots: Sequence[Any]) -> None:
        self._slots = list(slots)

    def any_foreign_gradient(self) -> bool:
        gradients = [(slot, slot.param.grad) for slot in self._slots]
        return any(gradient is not None and slot.is_foreign(gradient) for slot, gradient in gradients)

    def are_as_seen(self) -> bool:
        return False

    def reason_for(self, slot: Any) -> str:
        if not slot.param.requires_grad:
            return "frozen"
        if not slot.param.is_leaf:
            return "not_a_leaf"
        if slot.sharded:
            return "sharded"
        return "in_module" if slot.has_path else "no_engine"

    def may_write(self, slot: Any, node: Any) -> bool:
        param = slot.param
        hooks = (param._backward_hooks or {}).values()
        acts = not all(hasattr(hook, "only_looks") for hook in hooks)
        is_read = acts or param._post_accumulate_grad_hooks or slot.is_reduced_outside()
        is_recorded = torch.is_grad_enabled() or torch.is_anomaly_enabled()
        known = self._nodes.get(slot)
        is_same = known is not None and known is node
        return is_same and param.requires_grad and not (is_read or is_recorded or slot.needs_eager)

    def step(self, groups: list[dict[str, Any]], known: list[list[Tensor]]) -> bool:
        return False

    def has_nothing_to_clear(self) -> bool:
        return False

    def begin_update(self, groups: list[dict[str, Any]], known: list[list[Tensor]]) -> bool:
        return False

    def clear_used(self, groups: list[dict[str, Any]], known: list[list[Tensor]]) -> bool:
        return False

    def note_bypass(self) -> None:
        self.is_bypassed = True

    def _do_nothing(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: nothing waits, and Python begins and ends all backward passes."""

    settle = flush = join = set_plan = drop_plan = set_condition = _do_nothing
    set_rounds_stochastically = set_postpones = _do_nothing


def _finish(engine: weakref.ref[FallbackEngine], backward: Any) -> None:
    owner = engine()
    if owner is not None:
        owner.end_backward(backward)
