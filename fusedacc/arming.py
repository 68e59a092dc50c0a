"""Which nodes of autograd carry our hooks: put there, kept there through moves and casts, taken off again."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from .arena import Arena
from .hooks import Task, accumulate_grad_node, capturing, make_hook, process_group_up
from .slot import Slot
from .taking import Taking
from .window import Window

#: Which arming holds a parameter, by the parameter's id: a live one keeps its parameters alive, and weak
#: references to parameters would stand in the way of `torch.utils.swap_tensors`.
_owners: dict[int, weakref.ref[Arming]] = {}


class Arming:
    """Hooks on the parameters of `slots`.

    Args:
        slots: the parameters; a list shared with its owner, who calls `refresh` after appending.
        window: asked whether it is empty.
        arena: told what a parameter has become.

    Raises:
        ValueError: a parameter is in another live wrapper.
    """

    def __init__(self, slots: list[Slot], window: Window, arena: Arena) -> None:
        self.slots = slots
        self.window = window
        self.arena = arena
        self.closed = False
        self._tasks: dict[int, Task] = {}
        #: The nodes, which die with their hooks when nobody refers to them, and the hooks' handles. They are
        #: not in the slots: a node holds its hook, the hook its slot, and the ring would never be freed.
        self._nodes: dict[Slot, tuple[Any, RemovableHandle]] = {}
        self._taking = Taking(arena)
        #: Whether a CUDA graph was being captured when the nodes were made.
        self._armed_in_graph = False
        self.claim(slots)
        self.refresh()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit the parameters may be half gone already
            self.release()

    def claim(self, slots: Sequence[Slot]) -> None:
        """Make these parameters ours, or raise ValueError and claim none."""
        for slot in slots:
            owner = _owners.get(id(slot.param), _nobody)()
            if owner not in (None, self):
                raise ValueError(
                    f"parameter {slot.name!r} is already accumulated by another live AccumulatingOptimizer; "
                    "close() that one first, or give each wrapper its own parameters"
                )
        for slot in slots:
            _owners[id(slot.param)] = weakref.ref(self)

    def refresh(self) -> None:
        """Hook what can be hooked; called again after whatever may have changed a parameter's node."""
        if self.closed:
            return
        if capturing() != self._armed_in_graph:
            # A node keeps the stream that it was made on, which a graph must not wait for.
            self._armed_in_graph = not self._armed_in_graph
            for slot in self.slots:
                self._disarm(slot)
        for slot in self.slots:
            changed = slot.signature != slot.current_signature()
            if changed:
                former = slot.lane[1]
                slot.describe()
                self.arena.convert(slot)
                if self.window.empty:
                    self.arena.disown_added(slot)
                if slot.widened and slot.former_grad_dtype == former:
                    slot.former_grad_dtype = slot.param.dtype
            if not slot.param.requires_grad:
                self._disarm(slot)
            elif changed or slot not in self._nodes:
                self._arm(slot)

    def rearm(self, slots: Iterable[Slot]) -> None:
        """Hook the new nodes of parameters whose memory was another's for a while."""
        for slot in slots:
            if not self.closed and slot.param.requires_grad:
                self._arm(slot)

    def _arm(self, slot: Slot) -> None:
        param = slot.param
        if not param.is_leaf:  # of a differentiable optimizer: autograd hands its gradient on and stores none
            return self._disarm(slot)
        if slot.accumulate_dtype != param.dtype and not slot.widened and not process_group_up():
            slot.former_grad_dtype, slot.widened = param.grad_dtype, True
            param.grad_dtype = None
        node = accumulate_grad_node(param)
        if slot not in self._nodes or self._nodes[slot][0] is not node:
            self._disarm(slot)
            hook = make_hook(weakref.ref(self), self._taking.lane(slot), self._tasks, slot)
            self._nodes[slot] = node, node.register_prehook(hook)
            self._taking.attach(slot, node)

    def _disarm(self, slot: Slot) -> None:
        _, handle = self._nodes.pop(slot, (None, None))
        if handle is not None:
            handle.remove()
            self._taking.detach(slot)

    def close(self) -> None:
        """Release for good."""
        self.closed = True
        self.release()

    def release(self) -> None:
        """Take the hooks off and give back what was changed on the parameters. Sums are left alone."""
        for slot in self.slots:
            self._disarm(slot)
            if slot.widened:
                param, slot.widened = slot.param, False
                gradient, param.grad = param.grad, None
                param.grad_dtype = slot.former_grad_dtype
                if gradient is not None:
                    param.grad = gradient.to(slot.former_grad_dtype or gradient.dtype)
            if _owners.get(id(slot.param), _nobody)() in (None, self):
                _owners.pop(id(slot.param), None)
        self.forget()

    def forget(self) -> None:
        """Drop what is pending."""
        raise NotImplementedError


def _nobody() -> None:
    """A weak reference to nothing."""
