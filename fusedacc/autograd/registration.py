"""Registers hooks on AccumulateGrad nodes, keeps them through moves and casts, and removes them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..accumulators import Accumulators, GradState, Slot
from ..accumulators.main_grad import leave
from ..accumulators.param import nothing
from ..kernels import torch_state
from ..kernels.closing import ClosesItself
from ..kernels.registry import NATIVE
from ..kernels.torch_private import current_raw_stream
from ..kernels.torch_state import process_group_up, raw_stream, weakly

#: The registry of each parameter, by the parameter's id. A live registry keeps its parameters alive. Weak
#: references to parameters would make `torch.utils.swap_tensors` fail.
_owners: dict[int, weakref.ref[HookRegistry]] = {}


def accumulate_grad_node(param: Tensor) -> Any:
    """Return the AccumulateGrad node of a leaf that requires a gradient, or create one."""
    with torch.inference_mode(False), torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(param).node


class HookRegistry(ClosesItself):
    """Hooks on the parameters of `slots`, a list that its owner shares and changes; it calls `refresh` after
    appending.

    policy: as of `Capture`. engine: the wrapper's. Raises ValueError if a parameter belongs to another live
    wrapper, or the reduction does not support FSDP2.
    """

    #: Whether there is nothing to release: before hooks are registered, and after `close()`.
    closed = True
    _on_delivery: Callable[[Slot], None] | None = None

    def __init__(
        self,
        slots: list[Slot],
        accumulators: Accumulators,
        policy: Any,
        engine: Any,
    ) -> None:
        self.slots = slots
        #: Handles the parameters that FSDP2 has sharded (`distributed.fsdp.Shards`).
        self._shards = policy.shards
        self._accumulators = accumulators
        self._policy = policy
        self._engine = engine
        #: The AccumulateGrad nodes, which are freed with their hooks unless they are referenced.
        self.nodes: dict[Slot, Any] = {}
        #: Weak references to the parameters' memory, which show when a parameter gets other memory.
        self._memory: dict[Slot, weakref.ref] = {}
        self._moved = weakly(self._react_to_move)
        #: Parameters whose shape has changed since the last update, with their former shapes.
        self.reshaped: dict[Slot, set[torch.Size]] = {}
        #: Whether the nodes were created during a CUDA graph capture.
        self._made_in_graph = False
        #: By GPU: the stream that was current when the nodes of its parameters were created.
        self._made_on: dict[torch.device, int] = {}
        self._counters: dict[Slot, RemovableHandle] = {}
        self.closed = False
        self.claim(slots)
        self.refresh()

    @property
    def on_delivery(self) -> Callable[[Slot], None] | None:
        """A function to call for each node that has run, with or without a gradient; None if not needed."""
        return self._on_delivery

    @on_delivery.setter
    def on_delivery(self, on_delivery: Callable[[Slot], None] | None) -> None:
        self._on_delivery = on_delivery
        self._engine.set_condition("deliveries are counted", on_delivery is not None)

    def check_graph(self) -> None:
        """Raise RuntimeError if a CUDA graph would capture nodes of another stream."""
        if torch_state.capturing() and not self._made_in_graph:
            raise RuntimeError(
                "this CUDA graph was begun without the optimizer's knowledge: call optimizer.zero_grad() "
                "inside the capture, before the first forward"
            )

    def claim(self, slots: Sequence[Slot]) -> None:
        """Register these parameters for this wrapper, or raise ValueError and register none."""
        for slot in slots:
            owner = _owners.get(id(slot.param), nothing)()
            if owner not in (None, self):
                raise ValueError(
                    f"parameter {slot.name!r} is already accumulated by another live AccumulatingOptimizer; "
                    "close() that one first, or give each wrapper its own parameters"
                )
        self._shards.check(slots)
        if self._accumulators.main_grads is not None:
            self._accumulators.main_grads.check(slots)
        for slot in slots:
            _owners[id(slot.param)] = weakref.ref(self)

    def refresh(self, slots: Sequence[Slot] | None = None) -> None:
        """Put hooks on the present nodes of `slots` (None: all). Call it after anything that may have given a
        parameter another node. Raises RuntimeError if a parameter has another shape than its sum in a partly
        filled window.
        """
        if self.closed:
            return
        if slots is None:
            slots = self.slots
            if torch_state.capturing() != self._made_in_graph:
                # A node keeps the stream it was created on, and a graph must not wait for that stream.
                self._made_in_graph = not self._made_in_graph
                for slot in slots:
                    self._disarm(slot)
            self._leave_former_streams()
            if self._engine.are_as_seen():
                return
        for slot in slots:
            param = slot.param
            # A change of device or layout also changes the memory.
            seen = param.data_ptr(), param.dtype, param.requires_grad, param.shape
            changed = slot.seen != seen
            has_node = slot in self.nodes and param.requires_grad
            has_former_node = has_node and accumulate_grad_node(param) is not self.nodes[slot]
            if slot.seen is not None and (changed or has_former_node):
                self._describe(slot)
            slot.seen = seen
            if self._accumulators.main_grads is not None and (changed or has_former_node):
                self._accumulators.main_grads.follow(slot)
            if not param.requires_grad:
                # The hook stays on its node, because no code of fusedacc runs when the user unfreezes it.
                self._engine.drop_plan()
                self._shards.disarm(slot)
            elif changed or has_former_node or not has_node:
                self._arm(slot)
            if slot in self.nodes or not param.requires_grad:
                slot.note_seen()

    def _leave_former_streams(self) -> None:
        """Between windows, drop the nodes of GPUs whose current stream has changed since they were created.

        A node keeps the stream it was created on. Its sums would be allocated and added there, not on the
        stream that trains. torch creates nodes in each forward pass, and so follows the current stream.
        """
        if not self._made_on or not self._policy.window.empty:
            return
        current = {device: current_raw_stream(device.index) for device in self._made_on}
        if current == self._made_on:
            return
        for slot in list(self.nodes):
            device = slot.lane[0]
            if slot.on_cuda and current.get(device) != self._made_on.get(device):
                self._disarm(slot)
        self._made_on = current

    def _describe(self, slot: Slot) -> None:
        """Update a slot after its parameter has changed."""
        former = slot.lane
        if slot in self.nodes and self.nodes[slot].variable is not slot.param:
            self._accumulators.grads.recognise_swapped(slot)
        if slot.shape != slot.param.shape:
            self._drop_former_shape(slot)
            self._check_shape(slot)
        slot.describe()
        self._accumulators.convert(slot)
        if self._accumulators.grads.holds_uncounted:
            is_moved = slot.lane != former
            self._accumulators.grads.check_uncounted(slot, moved=is_moved, hooked=self._is_hooked(slot))
        elif self._policy.window.empty:
            self._accumulators.grads.mark_added_gradient(slot)
        if slot.widened and slot.cleared_grad_dtype == former[1]:
            slot.cleared_grad_dtype = slot.param.dtype

    def _is_hooked(self, slot: Slot) -> bool:
        """Whether the parameter's present node has the hook."""
        hooked = self.nodes.get(slot)
        if hooked is None:
            return False
        is_frozen = not slot.param.requires_grad
        return is_frozen or hooked is accumulate_grad_node(slot.param)

    def _drop_former_shape(self, slot: Slot) -> None:
        """Drop the node after the parameter's shape has changed, because the node keeps the former shape."""
        self._disarm(slot)
        self.reshaped.setdefault(slot, set()).add(slot.shape)
        self._engine.set_condition("a parameter has another shape", True)
        if self._policy.window.empty:
            self._accumulators.drop_wrong_shape(slot)

    def forget_shapes(self) -> None:
        """Forget the former shapes of parameters, after an update."""
        self.reshaped.clear()
        self._engine.set_condition("a parameter has another shape", False)

    def _check_shape(self, slot: Slot) -> None:
        accumulator = self._accumulators.grads.current(slot)
        shape = slot.param.shape
        is_p_grad = self._accumulators.grads.always_exposed and slot.grad_state != GradState.AUTOGRAD_PENDING
        if accumulator is not None and accumulator.shape != shape and not is_p_grad:
            raise RuntimeError(
                f"parameter {slot.name!r} is of shape {tuple(shape)} now, but the window's sum has gradients "
                f"of shape {tuple(accumulator.shape)}: change shapes between an update and the next "
                "backward, or call discard() to drop the window"
            )

    def release(self, slots: Sequence[Slot]) -> None:
        """Remove the hooks of these parameters, and restore their `grad_dtype`. Sums are kept."""
        for slot in slots:
            self._disarm(slot)
            self.reshaped.pop(slot, None)
            slot.narrow()
            if slot.main_grad is not None:
                leave(slot)
            if _owners.get(id(slot.param), nothing)() in (None, self):
                _owners.pop(id(slot.param), None)

    def reregister(self, slots: Iterable[Slot]) -> None:
        """Hook the new nodes of parameters whose memory was swapped and restored."""
        for slot in slots:
            if not self.closed and slot.param.requires_grad:
                self._arm(slot)

    def _arm(self, slot: Slot) -> None:
        param = slot.param
        if not param.is_leaf:  # differentiable optimizer: autograd passes the gradient on and stores none
            self._disarm(slot)
            return
        slot.may_be_reduced_outside = self.on_delivery is None
        if slot.may_be_reduced_outside and process_group_up() and self._shards.arm(slot):
            return
        node = accumulate_grad_node(param)
        if not slot.is_reduced_outside():
            slot.widen()
        if slot in self.reshaped and torch.Size(node._input_metadata[0].shape) != param.shape:
            self._disarm(slot)  # a graph of the former shape holds the node
            return
        if self.nodes.get(slot) is not node:
            self._disarm(slot)
            self.nodes[slot] = node
            self._choose(slot)
            self._engine.attach(slot, node)
            if slot.on_cuda:
                self._made_on.setdefault(slot.lane[0], raw_stream(param))
            if self.on_delivery is not None:
                counter = functools.partial(weakly(self._report_delivery), slot)
                self._counters[slot] = node.register_hook(counter)
        self._watch(slot)

    def choose_again(self) -> None:
        """Leave gradients to Python in lanes whose backend has failed its self-test."""
        for slot in self.nodes:
            self._choose(slot)

    def _choose(self, slot: Slot) -> None:
        slot.is_native = self._accumulators.passes.select(slot.lane).backend.name in NATIVE

    def _watch(self, slot: Slot) -> None:
        """Detect that `p.data = other` gives the parameter another shape.

        Autograd creates a new node in the next forward pass, unless the old one is referenced. No code of
        fusedacc runs in between. But the parameter's former memory is freed, which a weak reference reports.
        """
        try:
            memory = slot.param.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, or a subclass without a storage
            return
        former = self._memory.get(slot)
        if former is None or former() is not memory:
            self._memory[slot] = weakref.ref(memory, functools.partial(self._moved, slot))

    def count_deliveries(self, on_delivery: Callable[[Slot], None] | None) -> None:
        """Call `on_delivery` for each node that runs from now on."""
        self.on_delivery = on_delivery
        for slot in list(self.nodes):
            self._disarm(slot)
        self.reregister(self.slots)

    def _report_delivery(self, slot: Slot, *gradients: Any) -> None:
        """Report that the slot's node has run."""
        if self.on_delivery is not None:
            self.on_delivery(slot)

    def _react_to_move(self, slot: Slot, memory: weakref.ref) -> None:
        """React to a parameter's former memory being freed."""
        if not self.closed and slot.param.shape != slot.shape:
            self._drop_former_shape(slot)

    def _disarm(self, slot: Slot) -> None:
        self._engine.drop_plan()
        slot.forget_seen()
        self._shards.disarm(slot)
        self._memory.pop(slot, None)
        counter = self._counters.pop(slot, None)
        if counter is not None:
            counter.remove()
        if self.nodes.pop(slot, None) is not None:
            self._engine.detach(slot)

    def close(self) -> None:
        """Remove all hooks for good."""
        if self.closed:
            return
        self.closed = True
        self._engine.set_condition("the wrapper is closed", True)
        self.release(self.slots)
