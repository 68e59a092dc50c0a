"""FSDP2 (`torch.distributed.fsdp.fully_shard`): takes the gradients of shards from FSDP2, not from autograd.

FSDP2 reduces the unsharded gradients over all ranks. On each rank it stores the shard of the result in the
sharded parameter's p.grad, or adds it to the gradient there. Then it calls the parameter's
post-accumulate-grad hooks, and the hook of this module takes the gradient. Before that, p.grad must be
cleared. A hook on the outputs of FSDP2's modules reports when a backward pass begins, including passes
whose gradients FSDP2 keeps (`set_requires_gradient_sync(False)`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..accumulators import Slot
from ..accumulators.param import nothing
from ..accumulators.reduction import Reduction
from ..kernels.local_parts import is_distributed, local, placed_as
from ..kernels.torch_private import (
    composable_states,
    current_graph_task,
    disable_dynamo,
    missing,
    runs_as_written,
    tree_leaves,
)
from . import hybrid
from .fsdp_objects import fsdp_states, groups_of, sums_apart


class _GradDtype(NamedTuple):
    """The dtype that FSDP2 gives a sharded parameter's gradients, since torch 2.15."""

    #: A weak reference to FSDP2's `FSDPParam`.
    sharded: weakref.ref[Any]
    dtype: torch.dtype | None
    is_override: bool


class Shards:
    """The parameters of a wrapper that FSDP2 has sharded."""

    def __init__(self, reduction: Reduction) -> None:
        #: A weak reference to the `Capture`, which handles the events of a backward pass.
        self.receiver: Callable[[], Any] = nothing
        #: `UnshardedSums`, which adds up the gradients that FSDP2 keeps. `make_sums` creates it when needed.
        self.sums: Any = None
        self.make_sums: Callable[[], Any] | None = None
        self._reduction = reduction
        self._in_schedule = False
        #: Whether FSDP2 synchronises outside a backward pass.
        self._synchronises = False
        #: The slots whose parameters are hooked, by the parameter's id.
        self._slots: dict[int, Slot] = {}
        self._handles: dict[int, RemovableHandle] = {}
        #: FSDP2's parameter groups by the parameter's id, and the hooks on the modules of these groups.
        self._groups: dict[int, weakref.ref[Any]] = {}
        #: The results of `_grad_dtypes` before `grad_dtype` was changed, by the parameter's id.
        self._former_dtypes: dict[int, list[_GradDtype]] = {}
        #: The ids of DTensors that are left to FSDP2, because this version of torch lacks a name.
        self._left: set[int] = set()
        self._modules: weakref.WeakKeyDictionary[torch.nn.Module, list[RemovableHandle]] = (
            weakref.WeakKeyDictionary()
        )

    # Finding and hooking parameters

    def check(self, slots: Iterable[Slot]) -> None:
        """Find the slots that FSDP2 has sharded. Raise ValueError if the reduction does not support one."""
        distributed = {id(slot.param): slot for slot in slots if is_distributed(slot.param)}
        self._left -= distributed.keys()
        why = _missing() if distributed else ""
        if why and self._reduction.weighs:
            raise ValueError(
                f"reduction={self._reduction.name!r} does not support DTensors here: {why}, so weights of "
                "the ranks cannot be added; allowed: 'mean' and 'sum'"
            )
        if why:
            self._left |= distributed.keys()
            for slot in distributed.values():
                slot.left_to = f"{why}: FSDP2 synchronises every micro-batch, and step() collects p.grad"
            return
        states = [state for _, state in fsdp_states()] if distributed else []
        groups = {
            id(sharded.sharded_param): group
            for state in states
            for group in groups_of(state)
            for sharded in group.fsdp_params
            if id(sharded.sharded_param) in distributed
        }
        divisors = set()
        for key, group in groups.items():
            if self._reduction.scales_by_weight:
                raise ValueError(
                    f"reduction={self._reduction.name!r} does not support parameter "
                    f"{distributed[key].name!r}: FSDP2 has sharded it, and averages gradients over the ranks "
                    "before weights can be applied; allowed: 'mean', 'sum', and 'normalized' for losses that "
                    "are sums"
                )
            divisors.add(_divisor(group))
        if len(divisors) > 1 and self._reduction.weighs:
            raise ValueError(
                f"reduction={self._reduction.name!r} needs the same number of ranks for all parameters, but "
                f"FSDP2 averages over {sorted(divisors)} ranks; allowed: 'mean' and 'sum'"
            )
        for key in distributed:
            self._groups.pop(key, None)  # an earlier parameter may have had the same id
        self._groups.update((key, weakref.ref(group)) for key, group in groups.items())

    def arm(self, slot: Slot) -> bool:
        """Hook the slot's parameter if `check` has found that FSDP2 sharded it. Return whether it did."""
        param = slot.param
        key = id(param)
        if key in self._left:
            slot.needs_eager = True
        if key in self._slots or key in self._left:
            return True
        group = self._groups.get(key, nothing)()
        if group is None:
            return False
        slot.sharded = True
        self._former_dtypes[key] = _grad_dtypes(group, param)
        slot.widen()
        self._slots[key] = slot
        # Use weak references, because the parameter holds its hooks.
        hook = functools.partial(_arrived, weakref.ref(self), key)
        self._handles[key] = param.register_post_accumulate_grad_hook(hook)
        for module in group.modules:
            if module not in self._modules:
                called = functools.partial(_called, weakref.ref(self), weakref.ref(group))
                returned = functools.partial(_returned, weakref.ref(self))
                self._modules[module] = [
                    module.register_forward_pre_hook(called),  # after FSDP2's hook, which gathers parameters
                    module.register_forward_hook(returned),
                ]
        return True

    def disarm(self, slot: Slot) -> None:
        """Remove the hook from the slot's parameter. After the last slot, remove the modules' hooks too."""
        self._left.discard(id(slot.param))
        handle = self._handles.pop(id(slot.param), None)
        if handle is None:
            return
        handle.remove()
        del self._slots[id(slot.param)]
        slot.sharded = False
        for former in self._former_dtypes.pop(id(slot.param)):
            sharded = former.sharded()
            if sharded is not None:
                sharded.sharded_grad_dtype = former.dtype
                sharded._has_sharded_grad_dtype_override = former.is_override
        if not self._slots:
            for module_handle in itertools.chain(*self._modules.values()):
                module_handle.remove()
            self._modules.clear()
            for group in filter(None, [reference() for reference in self._groups.values()]):
                hybrid.restore_post_backward(group)

    def __bool__(self) -> bool:
        return bool(self._slots)

    @property
    def must_synchronise(self) -> bool:
        """Whether every micro-batch has to synchronise, because the gradients are left to FSDP2."""
        return bool(self._left)

    def _live_groups(self) -> list[Any]:
        groups = [self._groups[key]() for key in self._slots]
        return list({id(group): group for group in groups if group is not None}.values())

    # During forward and backward passes

    @contextlib.contextmanager
    def in_schedule(self) -> Iterator[None]:
        """Context for a pipeline schedule's `step()`: FSDP2 synchronises in the last backward pass only."""
        former = self._in_schedule
        self._in_schedule = True
        try:
            yield
        finally:
            self._in_schedule = former

    def begin_forward(self, group: Any) -> None:
        """Prepare for the forward of an FSDP2 module, whose parameters FSDP2 has gathered."""
        if self.make_sums is not None and (self._in_schedule or not group.reduce_grads):
            if self.sums is None:
                self.sums = self.make_sums()
            self.sums.prepare(group, lambda param: self._slots.get(id(param)))
        if hybrid.waits(group):
            hybrid.replace_post_backward(group)

    def begin_backward(self, receiver: Any) -> None:
        """Report to the receiver that a backward pass runs, and whether FSDP2 keeps any of its gradients."""
        groups = self._live_groups()
        withholds = [
            not group.reduce_grads
            or (group.mesh_info.replicate_mesh_dim is not None and not group.all_reduce_grads)
            for group in groups
        ]
        # If every group keeps its gradients, FSDP2 stores nothing in p.grad.
        slots = [] if all(withholds) else list(self._slots.values())
        receiver.prepare_for_fsdp(slots, withheld=any(withholds))

    def synchronise(self) -> None:
        """Have FSDP2 store the gradients that it keeps in p.grad. All ranks call it, outside a backward."""
        groups = self._live_groups()
        if not all(map(hybrid.is_known, groups)):
            raise RuntimeError(
                "set_requires_all_reduce(False) was called after a forward pass of this window, and has left "
                "sums that only FSDP2 can complete, in a backward pass: call it before the forward pass, or "
                "call set_requires_all_reduce(True) before the last micro-batch of the window"
            )
        former_flags = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups]
        states = [state for module, state in fsdp_states() if module in self._modules]
        contexts = {id(state._state_ctx): state for state in states}
        self._synchronises = True
        try:
            for group in groups:
                group.reduce_grads = True
                group.all_reduce_grads = True
            for state in contexts.values():
                _end_backward(state)
        finally:
            self._synchronises = False
            for group, reduce_grads, all_reduce_grads in former_flags:
                group.reduce_grads = reduce_grads
                group.all_reduce_grads = all_reduce_grads

    def drop_withheld(self) -> None:
        """Discard the gradients that FSDP2 keeps and has not synchronised."""
        if self.sums is not None:
            self.sums.drop()
        for group in self._live_groups():
            group._partial_reduce_output = None
            for sharded in group.fsdp_params:
                if id(sharded.sharded_param) not in self._slots:
                    continue
                if sums_apart(sharded):
                    sharded.unsharded_accumulated_grad = None
                unsharded = getattr(sharded, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None
        self._reset_after_failure()

    def _reset_after_failure(self) -> None:
        """Reset FSDP2 after a backward pass that has raised. Without this, it reduces in no later one."""
        if current_graph_task() != -1:
            return
        contexts = {id(state._state_ctx) for module, state in fsdp_states() if module in self._modules}
        for module, state in fsdp_states():
            failed = id(state._state_ctx) in contexts and state._state_ctx.post_backward_final_callback_queued
            if failed and state._is_root:
                reset: Any = getattr(module, "reset_iter_state", None)
                if reset is None:
                    _end_backward(state, reduces=False)
                else:
                    reset()

    # Collectives over the ranks

    def factor(self, weight: float) -> float | None:
        """Return the factor that turns sums of gradients into their weighted mean over all ranks.

        All ranks call it with their weights of the window, nan if invalid. The result is None if the total is
        zero or not finite.
        """
        (total,) = self.summed([weight])
        return self.divisor / total if 0 < total < math.inf else None

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Sum these numbers over the ranks whose gradients FSDP2 averages. All ranks call it."""
        values = torch.tensor(numbers, dtype=torch.float64)
        return self._reduced(self._widest_group(), values, dist.ReduceOp.SUM).tolist()

    @property
    def divisor(self) -> float:
        """The number by which FSDP2 divides sums, the same for all groups if the reduction has weights."""
        return _divisor(self._widest_group())

    @property
    def ranks(self) -> int:
        """The largest number of ranks over which FSDP2 averages a gradient."""
        return _ranks(self._widest_group())

    def _widest_group(self) -> Any:
        """Return the group whose gradients FSDP2 averages over the most ranks.

        The ranks of the other groups must be among its ranks. A group may have fewer, for example that of
        experts that are split over ranks too: a rank's gradients are then of the tokens of several ranks, and
        `set_gradient_divide_factor` makes up for it.
        """
        return max(self._live_groups(), key=_ranks)

    def check_even(self, micro_batches: int) -> None:
        """Raise RuntimeError on all ranks if their numbers of micro-batches differ. All ranks call it."""
        if not self._live_groups():  # the model is gone
            return
        counts = torch.tensor([micro_batches, -micro_batches], dtype=torch.float64)
        most, negative_least = self._reduced(self._widest_group(), counts, dist.ReduceOp.MAX).tolist()
        if most != -negative_least:
            raise RuntimeError(
                f"flush() with {micro_batches} micro-batches on this rank, but {-negative_least:g} to "
                f"{most:g} on all: FSDP2 has averaged each micro-batch over the ranks, so that all must have "
                "as many. Give every rank as many batches (DistributedSampler with drop_last=True), or "
                "discard() the window on all of them"
            )

    def _reduced(self, group: Any, values: Tensor, op: Any) -> Tensor:
        info = group.mesh_info
        values = values.to(info.mesh.device_type)
        for process_group in _process_groups(info):
            dist.all_reduce(values, op, group=process_group)
        return values

    def describe(self) -> str:
        """Describe for `explain()` what FSDP2 keeps in memory, and the alternative."""
        elements = 0
        nbytes = 0
        shard_bytes = 0
        groups = self._live_groups()
        for group in groups:
            for sharded in group.fsdp_params:
                count = math.prod(sharded._orig_size)
                dtype = sharded.mp_policy.reduce_dtype or sharded.mp_policy.param_dtype
                elements += count
                size = (dtype or sharded.sharded_param.dtype).itemsize
                size_of_sums = max(size, torch.float32.itemsize)
                nbytes += count * (size if self.make_sums is None else size_of_sums)
                shard_bytes += local(sharded.sharded_param).numel() * size_of_sums
        said = (
            f"FSDP2: {elements:,} parameters; synchronised in every micro-batch, each keeps the sum of its "
            "shard only. With set_requires_gradient_sync(False) before the last, or `with "
            "optimizer.accumulate(model):`, gradients go over the wire once a window, and their unsharded "
            f"sums are kept until then: up to {nbytes:,} bytes on each rank"
        )
        if not all(map(hybrid.is_hybrid, groups)):
            return said
        return (
            f"{said}. With `accumulate(model, defer='all_reduce')`, only the all-reduce over replicas waits "
            f"until the end of a window, and sums of shards are kept: {shard_bytes:,} bytes on this rank"
        )


@contextlib.contextmanager
def synchronising(model: Any, *, reduces: bool, all_reduces: bool) -> Iterator[None]:
    """Context for one micro-batch of an FSDP2 module.

    reduces: whether gradients are reduced. all_reduces: whether they are also reduced over replicas.
    """
    model.set_requires_gradient_sync(reduces)
    model.set_requires_all_reduce(all_reduces)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def is_fsdp(model: Any) -> bool:
    """Whether `fully_shard` was applied to the module."""
    return hasattr(model, "set_requires_gradient_sync")


def check_hybrid(model: Any) -> None:
    """Raise ValueError unless all parameters of the module are sharded on meshes of two dimensions."""
    allowed = (
        "allowed: a module to which fully_shard(module, mesh=mesh) was applied with a mesh of two "
        "dimensions, replicas and shards (hybrid sharding), or defer='all' or 'none'"
    )
    if not (isinstance(model, torch.nn.Module) and is_fsdp(model)):
        raise ValueError(f"defer='all_reduce' does not support model={type(model).__name__}; {allowed}")
    why = _missing()
    if why:
        raise ValueError(f"defer='all_reduce' does not work here: {why}; allowed: 'all' and 'none'")
    inside = set(model.modules())
    for group in (group for module, state in fsdp_states() if module in inside for group in groups_of(state)):
        if not hybrid.is_hybrid(group):
            name = next((n for n, m in model.named_modules() if m in group.modules), "")
            raise ValueError(
                f"defer='all_reduce' does not support module {name!r} of the model: its mesh has one "
                f"dimension, of {_ranks(group)} ranks; {allowed}"
            )
        why = hybrid.why_not(group)
        if why:
            raise ValueError(f"defer='all_reduce' does not work here: {why}; allowed: 'all' and 'none'")


def _missing() -> str:
    """Return which private name this version of torch lacks, in words; empty if it has all of them."""
    why = missing("FSDP2 registry", composable_states())
    if why:
        return why
    for _, state in fsdp_states():
        why = missing("FSDP2 state", state) or missing("FSDP2 context", state._state_ctx)
        if why:
            return why
        for group in groups_of(state):
            why = missing("FSDP2 group", group) or missing("FSDP2 mesh", group.mesh_info)
            if why:
                return why
            for sharded in group.fsdp_params:
                why = missing("FSDP2 parameter", sharded)
                if why:
                    return why
    return ""


def _end_backward(state: Any, *, reduces: bool = True) -> None:
    """Have FSDP2 do what it does at the end of a backward pass.

    Args:
        state: the state of a root module.
        reduces: whether FSDP2 reduces gradients. If not, it also reshards parameters that it would keep, as
            `reset_iter_state()` does, which torch 2.10 does not have.
    """
    context = state._state_ctx
    groups = [] if reduces else [group for other in context.all_states for group in groups_of(other)]
    former_flags = [(group, group.reduce_grads, group.reshard_after_backward) for group in groups]
    is_last = context.is_last_backward
    context.is_last_backward = True
    if hasattr(context, "manual_backward_finalization_active"):  # torch 2.15: a backward pass sets it
        context.manual_backward_finalization_active = False
    try:
        for group in groups:
            group.reduce_grads = False
            group.reshard_after_backward = True
        state._root_post_backward_final_callback()
        if not reduces:
            context.iter_forward_root = None
    finally:
        context.is_last_backward = is_last
        for group, reduce_grads, reshard_after_backward in former_flags:
            group.reduce_grads = reduce_grads
            group.reshard_after_backward = reshard_after_backward


def _grad_dtypes(group: Any, param: Tensor) -> list[_GradDtype]:
    """Return the dtype that FSDP2 gives the gradients of this parameter; nothing before torch 2.15.

    Since that version FSDP2 copies the `grad_dtype` of sharded parameters at the first forward pass.
    """
    return [
        _GradDtype(weakref.ref(sharded), sharded.sharded_grad_dtype, sharded._has_sharded_grad_dtype_override)
        for sharded in group.fsdp_params
        if sharded.sharded_param is param and hasattr(sharded, "sharded_grad_dtype")
    ]


def _process_groups(info: Any) -> list[Any]:
    """Return the process groups over which FSDP2 averages gradients: the shards', and the replicas'."""
    dims = (info.shard_mesh_dim, info.replicate_mesh_dim)
    return [info.mesh.get_group(dim) for dim in dims if dim is not None]


def _divisor(group: Any) -> float:
    """Return the number by which FSDP2 divides the sum of the ranks' gradients."""
    return float(group.gradient_divide_factor or _ranks(group))


def _ranks(group: Any) -> int:
    """Return the number of ranks whose gradients FSDP2 averages."""
    return math.prod(ranks.size() for ranks in _process_groups(group.mesh_info))


@runs_as_written
def _arrived(shards: weakref.ref[Shards], key: int, _param: Tensor) -> None:
    """Post-accumulate-grad hook: FSDP2 has stored a gradient in the p.grad of the parameter with this id."""
    owner = shards()
    if owner is None:
        return
    receiver = owner.receiver()
    slot = owner._slots.get(key)
    # If the user has hooked the parameter too, that hook expects the gradient in p.grad.
    if receiver is None or slot is None or len(slot.param._post_accumulate_grad_hooks) != 1:
        return
    gradient = slot.param.grad
    if gradient is not None and gradient.dtype != slot.param.dtype:
        # FSDP2 was told to cast to float32 (`UnshardedSums`), and gives its DTensors the parameter's dtype.
        slot.param.grad = placed_as(gradient, local(gradient))
    if not owner._synchronises:
        receiver.take_stored(slot)


def takes_float32(shard: Tensor) -> bool:
    """Whether a wrapper takes a shard's gradient from p.grad, where FSDP2 may store it in float32."""
    hooks: list[Any] = list((shard._post_accumulate_grad_hooks or {}).values())
    is_ours = len(hooks) == 1 and getattr(hooks[0], "func", None) is _arrived
    return is_ours and shard.grad_dtype in (None, torch.float32)


@runs_as_written
def _begins(shards: weakref.ref[Shards], _gradient: Tensor) -> None:
    """Tensor hook on an FSDP2 module's output: a backward pass has reached it."""
    owner = shards()
    receiver = None if owner is None else owner.receiver()
    if owner is not None and receiver is not None and not receiver.is_prepared_for_fsdp():
        owner.begin_backward(receiver)


@disable_dynamo
def _called(
    shards: weakref.ref[Shards], group: weakref.ref[Any], _module: torch.nn.Module, _args: Any
) -> None:
    """Forward pre-hook of an FSDP2 module."""
    owner = shards()
    parameters = group()
    if owner is not None and parameters is not None and torch.is_grad_enabled():
        owner.begin_forward(parameters)


@disable_dynamo
def _returned(shards: weakref.ref[Shards], _module: torch.nn.Module, _args: Any, output: Any) -> None:
    """Forward hook of an FSDP2 module: hook its outputs, which the backward pass reaches first."""
    if not torch.is_grad_enabled():
        return
    for value in tree_leaves(output):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(functools.partial(_begins, shards))
