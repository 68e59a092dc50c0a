"""Reduces a wrapper's accumulators over data-parallel ranks, once in a window.

While a wrapper reduces the gradients of a DistributedDataParallel, an `IdleReducer` replaces the module's own
reducer. This saves the reducer's buckets, which are as large as all gradients (4 bytes a float32 parameter).
The wrapper also sets flags of the module so that no forward pass uses a reducer (`require_backward_grad_sync`
in torch/nn/parallel/distributed.py). Buffers are broadcast with each reduction, in which all ranks take part.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..accumulators import Accumulators, Slot
from ..kernels.closing import ClosesItself
from ..kernels.dtypes import SUM_DTYPES
from ..kernels.local_parts import is_distributed
from ..kernels.torch_private import disable_dynamo
from .agreement import (
    agree_on_backends,
    agree_on_parameters,
    agree_on_settings,
    compare_parameters,
    compares_parameters,
)
from .reducer import Deliveries, RankNumbers, Reducer, Totals
from .rows import RankPlace

#: Flags that disable the reducer: the forward pass does not prepare it, and a static graph does not queue a
#: reduction (only a static graph has the last flag).
_UNARMED = {
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
}

_JOIN = (
    "ranks that have no input left would wait for reductions that the wrapper makes at other times; allowed: "
    "torch.distributed.algorithms.Join([optimizer]) with a new DistributedDataParallel, or flush() on every "
    "rank after its last micro-batch"
)


def parallel_in(module: Any) -> DistributedDataParallel | None:
    """Return the module if it is a DistributedDataParallel, or its only such child (compiled or Fabric's)."""
    if isinstance(module, DistributedDataParallel):
        return module
    children = module.children() if isinstance(module, torch.nn.Module) else ()
    parallels = [child for child in children if isinstance(child, DistributedDataParallel)]
    return parallels[0] if len(parallels) == 1 else None


class UnarmedDDP(ClosesItself):
    """A DistributedDataParallel without its reducer, until each of its `users` is freed or leaves."""

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self.parallel = parallel
        #: Whether the last forward pass with gradients was outside `no_sync()`.
        self.synchronises = True
        #: The `DataParallel`s that reduce its gradients. Without any, the module is restored.
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        #: The parameters whose gradients the module's own reducer would reduce, by name.
        self._parameters = {
            name: param
            for name, param in parallel.module.named_parameters()
            if name not in parallel.parameters_to_ignore
        }
        #: The number of parameters of each of `reducing`, and this module's parameters that none has.
        self._counts: list[int] = []
        self._left_over: dict[str, torch.Tensor] = {}
        #: How many `no_sync()` are entered.
        self.deferring = 0
        self._former = {name: parallel.__dict__[name] for name in _UNARMED if name in parallel.__dict__}
        idle = IdleReducer()
        parallel.__dict__.update(_UNARMED, reducer=idle, logger=idle)
        reference = weakref.ref(self)

        @contextlib.contextmanager
        def no_sync() -> Iterator[None]:
            """Mark forward passes inside as not the window's last."""
            link = reference() or SimpleNamespace(deferring=0)
            link.deferring += 1
            try:
                yield
            finally:
                link.deferring -= 1

        def note_forward(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            link = reference()
            if link is not None and torch.is_grad_enabled():
                link.synchronises = not link.deferring

        def join(
            divide_by_initial_world_size: bool = True, enable: bool = True, *others: Any, **named: Any
        ) -> contextlib.AbstractContextManager[Any]:
            if enable:
                raise RuntimeError(f"ddp.join() of one whose gradients the optimizer reduces: {_JOIN}")
            return contextlib.nullcontext()

        parallel.__dict__.update(no_sync=no_sync, join=join)
        self._handles = [
            parallel.register_forward_pre_hook(_check_unarmed, prepend=True),
            parallel.register_forward_hook(note_forward),
        ]
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_check_step))
        _links[id(parallel)] = self

    def check_reduced(self, optimizer: Optimizer, *, evaluates: bool) -> None:
        """Raise RuntimeError if this optimizer would update parameters whose gradients are not reduced.
        evaluates: whether its `step()` runs a closure, which computes gradients.

        Each wrapper reduces only the gradients of its own parameters. PyTorch's reducer reduced all of
        them. Parameters without an optimizer need no reduction.
        """
        counts = [len(parallel.slots) for parallel in reducing]
        if counts != self._counts:
            reduced = {id(slot.param) for parallel in reducing for slot in parallel.slots}
            self._counts = counts
            self._left_over = {name: p for name, p in self._parameters.items() if id(p) not in reduced}
        if not self._left_over or dist.get_world_size(self.parallel.process_group) == 1:
            return
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        unreduced = [
            name
            for name, p in self._left_over.items()
            if id(p) in updated and (p.grad is not None or (evaluates and p.requires_grad))
        ]
        if unreduced:
            names = ", ".join(map(repr, unreduced[:3]))
            if len(unreduced) > 3:
                names += f", {len(unreduced) - 3} more"
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() would update parameters {names} with gradients of this "
                "rank alone: they are in a DistributedDataParallel that another optimizer was given as "
                "data_parallel=ddp, which reduces only the gradients of its parameters. Allowed: wrap "
                "this optimizer too, with data_parallel=ddp, or give it to neither of them"
            )

    def leave(self, user: Any) -> None:
        """Remove a wrapper, and restore the module after the last one."""
        self.users.discard(user)
        if not self.users:
            self.close()

    def close(self) -> None:
        """Give the module its reducer again, so that its gradients are reduced."""
        if not self._former:
            return
        _links.pop(id(self.parallel), None)
        if not _links and _hooks:
            _hooks.pop().remove()
        for handle in self._handles:
            handle.remove()
        for name in (*_UNARMED, "no_sync", "join"):
            self.parallel.__dict__.pop(name, None)
        self.parallel.__dict__.update(self._former)
        _bring_back(self.parallel)
        self._former = {}


#: By the module's id.
_links: weakref.WeakValueDictionary[int, UnarmedDDP] = weakref.WeakValueDictionary()
#: All objects that reduce gradients over ranks; each has `slots`.
reducing: weakref.WeakSet[Any] = weakref.WeakSet()
#: The hook on every optimizer's `step()`, while there are links.
_hooks: list[RemovableHandle] = []


@disable_dynamo
def _check_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-hook of every optimizer's `step()`, whose first positional argument is the optimizer."""
    has_closure = any(map(callable, (*args[1:], *kwargs.values())))
    for link in list(_links.values()):
        link.check_reduced(optimizer, evaluates=has_closure)


def _check_unarmed(parallel: DistributedDataParallel, inputs: Any) -> None:
    """Raise RuntimeError if other code has enabled the module's own reduction."""
    if parallel._join_config.enable:
        raise RuntimeError(f"a forward of a DistributedDataParallel inside Join([ddp]): {_JOIN}")
    if parallel.require_backward_grad_sync:
        raise RuntimeError(
            "require_backward_grad_sync was set on a DistributedDataParallel whose gradients the optimizer "
            "reduces (Lightning's manual optimization and Accelerate's trigger_sync_in_backward() do so): "
            "both would reduce. Allowed: no_sync(), or an optimizer that is not attached to it"
        )


class IdleReducer:
    """Replaces a DistributedDataParallel's reducer, and its logger, which refers to the reducer."""

    def _rebuild_buckets(self) -> bool:
        return False

    def get_backward_stats(self) -> list[int]:
        return []

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        return SimpleNamespace(strs_map={}, ints_map={})

    def _do_nothing(self, *arguments: object) -> None:
        """Do nothing."""

    _set_uneven_input_join = _do_nothing  # `Join` calls it before the forward pass that raises
    prepare_for_backward = _do_nothing  # of a pipeline's stage; the wrapper reduces when `step()` ends
    set_error_and_log = _do_nothing  # torch raises the error next

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: this DistributedDataParallel has no reducer while an AccumulatingOptimizer reduces its "
            "gradients; optimizer.close() restores it"
        )


def _bring_back(parallel: DistributedDataParallel) -> None:
    """Create a new reducer in place of `IdleReducer`, unless the process group is destroyed.

    It is done as torch does it for an unpickled module (nn/parallel/distributed.py, `__setstate__`).
    """
    if not (isinstance(parallel.reducer, IdleReducer) and dist.is_initialized()):
        return
    parameters, expects_sparse = parallel._build_params_for_reducer()
    names = parallel._build_debug_param_to_name_mapping(parameters)
    parallel._ddp_init_helper(parameters, expects_sparse, names, parallel.static_graph)
    parallel._has_rebuilt_buckets = False
    if parallel.static_graph:
        parallel.reducer._set_static_graph()
        parallel.__dict__["logger"]._set_static_graph()


def check(given: Any, slots: list[Slot], dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError if `data_parallel=` or `reduce_dtype=` do not fit these slots."""
    if isinstance(given, DistributedDataParallel):
        _check_options(given)
        ignored = given.parameters_to_ignore
        reduced = {id(p) for name, p in given.module.named_parameters() if name not in ignored}
        for slot in slots:
            if id(slot.param) not in reduced:
                raise ValueError(
                    f"data_parallel is a DistributedDataParallel without parameter {slot.name!r}, whose "
                    "gradient would not be reduced; allowed: one that holds all parameters, or a process "
                    "group"
                )
    elif not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            "data_parallel must be a DistributedDataParallel, a process group or None, got "
            f"{type(given).__name__}"
        )
    if dtype is not None and dtype not in SUM_DTYPES:
        raise TypeError(
            f"reduce_dtype must be None or one of {', '.join(map(str, SUM_DTYPES))}, got {dtype!r}"
        )
    for slot in slots:
        param: Any = slot.param
        if is_distributed(param):
            raise ValueError(
                f"data_parallel cannot reduce the gradients of parameter {slot.name!r}, a DTensor with "
                f"placements {param.placements}; allowed: plain tensors, or data_parallel=None for tensor "
                "parallelism alone, and for fully_shard() over the data-parallel ranks"
            )


class DataParallel:
    """The data-parallel ranks of a wrapper.

    given: the `data_parallel=` argument, which `check` has accepted. dtype: on the wire, as in `Reducer`.
    finish: adds the pending gradients of slots. settings: the wrapper's arguments that must be equal on all
    ranks, by name.
    """

    def __init__(
        self,
        given: Any,
        slots: list[Slot],
        accumulators: Accumulators,
        dtype: torch.dtype | None,
        finish: Callable[[list[Slot]], None],
        settings: Mapping[str, object],
    ) -> None:
        self.link: UnarmedDDP | None = None
        self.slots = slots
        self._compares = compares_parameters()
        #: The parameters that required gradients when a reduction was last prepared.
        self._trained = [slot for slot in slots if slot.param.requires_grad]
        is_ddp = isinstance(given, DistributedDataParallel)
        group = given.process_group if is_ddp else given
        self._noise = accumulators.noise
        if not is_ddp:
            agree_on_parameters(slots, group)
        seed, failed = agree_on_settings(slots, group, dtype, self._noise.seed, settings)
        if failed:
            agree_on_backends(slots, group, accumulators.backend)
        if not is_ddp:
            source = dist.get_global_rank(group, 0)
            for slot in slots:
                dist.broadcast(slot.param.detach(), source, group=group)
        self.reducer = Reducer(slots, accumulators, group, dtype)
        self.world_size = self.reducer.world_size
        self.place = RankPlace.within(group)
        self._noise.be_rank(self.place.rank, seed)
        self.deliveries = Deliveries(finish)
        reducing.add(self)
        if is_ddp:
            self.link = _links.get(id(given)) or UnarmedDDP(given)
            self.link.users.add(self)

    @property
    def synchronises(self) -> bool:
        """Manual loop: whether this backward pass is the window's last."""
        return self.link is None or self.link.synchronises

    def note_schedule(self) -> None:
        """After a pipeline schedule's `step()`, which runs all forward passes inside its own `no_sync()`."""
        if self.link is not None:
            self.link.synchronises = not self.link.deferring

    def serves(self, model: Any) -> bool:
        """Whether `model` is the DistributedDataParallel that was given."""
        return self.link is not None and self.link.parallel is model

    def overlap(self, of_rank: RankNumbers, divisor: int) -> None:
        """Prepare to send final buckets during the backward pass that begins now; `reduce` must follow it.

        Nothing is sent early if a parameter may be unused in some micro-batches: only a
        DistributedDataParallel without `find_unused_parameters` excludes that. Nothing is sent early either
        after a parameter was frozen, unfrozen or added, because an unfrozen parameter gets its hook in the
        next micro-batch.
        """
        trained = [slot for slot in self.slots if slot.param.requires_grad]
        if trained != self._trained:
            self._trained = trained
            self.deliveries.forget()
        elif self.deliveries.steady and self.link is not None:
            parallel = self.link.parallel
            if parallel.find_unused_parameters and not parallel.static_graph:
                return
            self.reducer.rebuild_buckets()
            buckets = self.reducer.buckets()
            self.deliveries.arm(buckets, functools.partial(self.reducer.send_next, of_rank, divisor))

    def reduce(self, of_rank: RankNumbers, divisor: int = 1) -> Totals:
        """Reduce, see `Reducer.reduce`, and broadcast the first rank's buffers.

        DDP does the latter in a forward pass, but with windows of unequal length some ranks have none.
        """
        self.deliveries.disarm()
        totals = self.reducer.reduce(of_rank, divisor)
        parallel = None if self.link is None else self.link.parallel
        if parallel is not None and parallel.broadcast_buffers and parallel.modules_buffers:
            parallel._sync_buffers()
        return totals

    def check_update(self) -> None:
        """After an update, compare the ranks' parameters if FUSEDACC_CHECK_RANKS=1."""
        if self._compares:
            compare_parameters(self.slots, self.reducer.group)

    def abandon(self) -> None:
        """Drop a window, including buckets that were already sent."""
        self.deliveries.forget()
        self.reducer.abandon()

    def close(self) -> None:
        """Restore the DistributedDataParallel."""
        reducing.discard(self)
        if self.link is not None:
            self.link.leave(self)
        self._noise.be_rank(0)
        self.reducer.close()


def _check_options(parallel: DistributedDataParallel) -> None:
    """Raise ValueError if this DistributedDataParallel has an option that the wrapper does not support."""
    if parallel._join_config.enable:
        raise ValueError(f"data_parallel is a DistributedDataParallel inside its own join(): {_JOIN}")
    for name, is_set in (
        ("mixed_precision", parallel.mixed_precision is not None),
        ("delay_all_reduce_named_params", bool(parallel._delay_all_reduce_params)),
        ("a communication hook", bool(parallel._comm_hooks)),
        ("the Python reducer", parallel._use_python_reducer),
    ):
        if is_set:
            raise ValueError(
                f"data_parallel is a DistributedDataParallel with {name}, which the wrapper does not "
                "support; allowed: one without (reduce_dtype= sets the dtype on the wire), or "
                "data_parallel=None"
            )
