"""Accumulate the gradients of FSDP2's unsharded parameters in place while FSDP2 postpones their reduction.

After `set_requires_gradient_sync(False)`, FSDP2 lets autograd add each micro-batch's gradient to p.grad of
the unsharded parameter, in the parameter's dtype. Or it casts the gradient to `reduce_dtype` and adds it to
another tensor. With `model=`, unsharded parameters are accumulated as in a manual loop: modules add to
accumulators in p.grad, in float32 or the parameter's dtype if that has more bits. In the backward pass that
synchronises, FSDP2 reduces these accumulators, in the dtype that it uses without the wrapper.

This file replaces the private `post_backward` of each group. If its parameters lack an attribute of
`torch_private.ATTRIBUTES`, the group is left to FSDP2, and `explain()` names the attribute.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..accumulators import Accumulators, Slot
from ..autograd.capture import Capture
from ..distributed import hybrid
from ..distributed.fsdp import takes_float32
from ..distributed.fsdp_objects import sums_apart, wire_dtype
from ..kernels.local_parts import is_distributed
from ..kernels.torch_private import missing, runs_as_written
from .accumulation import Accumulation, Plan
from .parameters import ParameterSet
from .window import Window


class UnshardedSums:
    """The accumulators of one wrapper's unsharded parameters, to which modules of `model` add. window: a weak
    reference to the wrapper's window, which refers to this object through its `shards`.
    """

    def __init__(
        self,
        model: nn.Module,
        window: weakref.ref[Window],
        backend: str,
    ) -> None:
        self._window = window
        #: The slots of each group's unsharded parameters.
        self._slots: weakref.WeakKeyDictionary[Any, list[Slot]] = weakref.WeakKeyDictionary()
        #: The groups with accumulators in p.grad that FSDP2 has not reduced yet.
        self._summing: weakref.WeakSet[Any] = weakref.WeakSet()
        #: The unsharded slot of each of the wrapper's slots, for `explain()`.
        self._slot_of_shard: dict[Slot, Slot] = {}
        #: For each group left to FSDP2, the reason.
        self._why_left: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._inner = SimpleNamespace(param_groups=[])
        self._parameters = ParameterSet(self._inner, None, backend, model)  # type: ignore[arg-type]  # only its param_groups are read
        slots = self._parameters.slots
        self.accumulators = Accumulators(slots, True, backend)
        accumulation = _Deferred(slots, Window(None, "sum"), self.accumulators)
        accumulation.owner = weakref.ref(self)
        self.capture = Capture(slots, self.accumulators, accumulation)
        self._parameters.offer_sinks(self.capture)
        self._parameters.replace_in(model, self.capture, keep_casts=False, warns=False)

    def prepare(self, group: Any, of_shard: Callable[[Any], Slot | None]) -> None:
        """Hook the unsharded parameters of a group that FSDP2 has gathered and will not reduce in this
        backward pass. of_shard: returns the wrapper's slot of a sharded parameter.
        """
        if group in self._why_left:
            return
        slots = self._slots.get(group)
        if slots is None:
            why = _why_left(group)
            if why:
                self._why_left[group] = why
                return
            slots = self._add_group(group, of_shard)
        registry = self.capture.registry
        unfrozen = [slot for slot in slots if slot.param.requires_grad and slot not in registry.nodes]
        if unfrozen:
            registry.refresh(unfrozen)

    def _add_group(self, group: Any, of_shard: Callable[[Any], Slot | None]) -> list[Slot]:
        """Create slots for the unsharded parameters of a group, and replace its `post_backward`."""
        shards = [of_shard(fsdp_param.sharded_param) for fsdp_param in group.fsdp_params]
        params = [fsdp_param._unsharded_param for fsdp_param in group.fsdp_params]
        names = [str(index) if shard is None else shard.name for index, shard in enumerate(shards)]
        self._inner.param_groups.append({"params": params, "param_names": names})
        num_known = len(self._parameters.slots)
        self._parameters.add_last_group(self.capture)
        slots = self._parameters.slots[num_known:]
        self._slots[group] = slots
        for shard, slot in zip(shards, slots, strict=True):
            if shard is not None:
                self._slot_of_shard[shard] = slot
        group.post_backward = functools.partial(_post_backward, weakref.ref(self), weakref.ref(group))
        return slots

    def begin_backward(self) -> bool:
        """Return whether the backward pass that begins adds its gradients to these accumulators."""
        window = self._window()
        if window is None or window.ignoring:
            return False
        groups = list(self._slots)
        if not self._summing and all(group.reduce_grads for group in groups):
            return False
        self._summing.update(groups)
        return True

    def post_backward(self, group: Any, run: Callable[[], None]) -> None:
        """Run FSDP2's own `post_backward` (`run`), and hide the accumulators from it or pass them to it."""
        is_summing = group in self._summing
        if not group.reduce_grads:
            hidden = []
            if is_summing:
                hidden = _take_grads(param for param in group.fsdp_params if _would_cast(param))
            run()
            for fsdp_param, total in hidden:
                fsdp_param._unsharded_param.grad = total
            return None
        if is_summing:
            self._hand_over(group)
        # Also without sums: a rank may have none where others have some, and all must reduce alike.
        keeps_float32 = wire_dtype(group) == torch.float32 and _takes_float32(group)
        if not keeps_float32:
            return run()
        former = group._orig_dtype  # the dtype to which FSDP2 casts what it has reduced
        group._orig_dtype = torch.float32
        try:
            return run()
        finally:
            group._orig_dtype = former

    def _hand_over(self, group: Any) -> None:
        """Give the accumulators of a group to FSDP2, which reduces them."""
        slots = self._slots[group]
        with torch.no_grad():
            self.capture.add_pending(slots)
        sums = dict(_take_grads(group.fsdp_params))
        self._summing.discard(group)
        self.accumulators.drop(slots)
        sums_are_apart = sums_apart(group.fsdp_params[0])
        with torch.no_grad():
            for fsdp_param in group.fsdp_params:
                total = sums.pop(fsdp_param, None)
                if sums_are_apart:
                    # FSDP2's sum of the micro-batches before the first one that was accumulated here.
                    former = fsdp_param.unsharded_accumulated_grad
                    if former is not None:
                        total = former if total is None else total.add_(former)
                if total is None:
                    continue
                total = total.to(wire_dtype(group))
                if sums_are_apart:
                    fsdp_param.unsharded_accumulated_grad = total
                else:
                    fsdp_param._unsharded_param.grad = total

    def drop(self) -> None:
        """Clear the accumulators."""
        self.capture.forget()
        self.accumulators.clear()
        self._summing.clear()

    def close(self) -> None:
        """Give the groups back to FSDP2. Gradients stay in p.grad, in the parameters' dtype."""
        self._parameters.restore_modules()
        for group in list(self._slots):
            group.__dict__.pop("post_backward", None)
        self.capture.close()
        self.accumulators.drop(self._parameters.slots)
        self._slots.clear()
        self._summing.clear()

    def slot_of(self, shard: Slot) -> Slot | None:
        """Return the unsharded slot for a slot of the wrapper, or None before a forward pass has found it."""
        return self._slot_of_shard.get(shard)

    def why_left(self, shard: Slot) -> str:
        """Return why a slot of the wrapper has no unsharded slot."""
        why = "no deferred forward has reached it"
        for group, reason in self._why_left.items():
            if any(fsdp_param.sharded_param is shard.param for fsdp_param in group.fsdp_params):
                why = reason
        return f"model= leaves it to FSDP2: {why}"


class _Deferred(Accumulation):
    """`Accumulation` of unsharded gradients, for backward passes that the owner adds up."""

    owner: Callable[[], UnshardedSums | None]

    def _begin_counting(self, schedule: bool) -> Any:
        backward = super()._begin_counting(schedule)
        owner = self.owner()
        backward.captures = backward.captures and owner is not None and owner.begin_backward()
        return backward

    def plan(self) -> Plan | None:
        """Return None, because every backward pass has to ask FSDP2 whether it synchronises."""
        return None

    def forget_backward(self, backward: Any, failed: bool) -> None:
        """Do nothing. An exception taints the wrapper's window, and not this one."""

    def note_interruption(self) -> None:
        owner = self.owner()
        window = None if owner is None else owner._window()
        if window is not None:
            window.note_interruption()


def _why_left(group: Any) -> str:
    """Return why a group is left to FSDP2; empty if it is accumulated here."""
    for fsdp_param in group.fsdp_params:
        why = missing("unsharded FSDP2 parameter", fsdp_param)
        if why:
            return why
    if len(group.modules) > 1:
        return "fully_shard was given several modules together"
    if getattr(group, "reduce_scatter_unused_params", False):
        return "FSDP2 reduces zeros of the parameters' dtype for parameters without a gradient"
    values = [fsdp_param._unsharded_param.data for fsdp_param in group.fsdp_params]
    if not all(type(value) is Tensor or is_distributed(value) for value in values):
        return "the unsharded parameters are of a subclass (float8)"
    return ""


def _takes_float32(group: Any) -> bool:
    """Whether a wrapper takes the gradients of all trained shards of a group, in float32."""
    shards = [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
    return not missing("reduced FSDP2 group", group) and all(
        takes_float32(shard) for shard in shards if shard.requires_grad
    )


def _would_cast(sharded: Any) -> bool:
    """Whether FSDP2 would take the accumulator out of p.grad in a backward pass that does not reduce."""
    total = sharded._unsharded_param.grad
    if total is None or not sums_apart(sharded):
        return False
    return sharded.unsharded_accumulated_grad is not None or sharded.reduce_dtype not in (None, total.dtype)


def _take_grads(params: Iterable[Any]) -> list[tuple[Any, Tensor]]:
    """Clear p.grad of the unsharded parameters, and return each `FSDPParam` that had one, with its p.grad."""
    taken: list[tuple[Any, Tensor]] = []
    for fsdp_param in params:
        gradient = fsdp_param._unsharded_param.grad
        if gradient is not None:
            taken.append((fsdp_param, gradient))
            fsdp_param._unsharded_param.grad = None
    return taken


@runs_as_written
def _post_backward(
    sums_reference: weakref.ref[UnshardedSums], group_reference: weakref.ref[Any], *arguments: Any
) -> None:
    sums = sums_reference()
    group = group_reference()
    if group is None:
        return
    run = functools.partial(hybrid.post_backward, group, *arguments)
    if sums is None:
        run()
    else:
        sums.post_backward(group, run)
