"""A DistributedDataParallel whose reducer is put away: the wrapper reduces its gradients.

The reducer's buckets are as large as all gradients, 4 bytes a float32 parameter. The module is unarmed as
well, so that no forward asks for a reducer (torch/nn/parallel/distributed.py, `require_backward_grad_sync`).
Buffers are broadcast with each reduction, where all ranks take part.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

#: What keeps the reducer quiet: its forward does not ready it, and no node of a static graph queues its own
#: reduction (an attribute that only a static graph has).
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
    """The DistributedDataParallel that this is, or that is a child of this module (compiled, or Fabric's)."""
    if isinstance(module, DistributedDataParallel) or not isinstance(module, torch.nn.Module):
        return module if isinstance(module, DistributedDataParallel) else None
    found = [child for child in module.children() if isinstance(child, DistributedDataParallel)]
    return found[0] if len(found) == 1 else None


def check(parallel: DistributedDataParallel) -> None:
    """Raise ValueError where this DistributedDataParallel reduces in a way that the wrapper would not."""
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
                f"data_parallel is a DistributedDataParallel with {name}, which the wrapper would not "
                "honour; allowed: one without (reduce_dtype= sets the dtype on the wire), or "
                "data_parallel=None"
            )


class UnarmedDDP:
    """One DistributedDataParallel as long as wrappers reduce for it; made by `unarm`."""

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self.parallel = parallel
        #: Whether the last forward with gradients wants them synchronised.
        self.synchronises = True
        #: Who reduces its gradients; it is given back when there is nobody.
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        named, ignored = parallel.module.named_parameters(), parallel.parameters_to_ignore
        #: The parameters whose gradients the module's own reducer would reduce, by name.
        self._parameters = {name: p for name, p in named if name not in ignored}
        #: How many parameters each of `reducing` has, and those of this module that none has, by name.
        self._counts: list[int] = []
        self._left_over: dict[str, torch.Tensor] = {}
        self._deferring = 0
        self._former = {name: parallel.__dict__.get(name) for name in _UNARMED}
        idle = IdleReducer()
        parallel.__dict__.update(_UNARMED, reducer=idle, logger=idle)
        own = weakref.ref(self)

        @contextlib.contextmanager
        def no_sync() -> Iterator[None]:
            """While inside, forwards say that their gradients are not the window's last."""
            link = own() or SimpleNamespace(_deferring=0)
            link._deferring += 1
            try:
                yield
            finally:
                link._deferring -= 1

        def note_forward(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            link = own()
            if link is not None and torch.is_grad_enabled():
                link.synchronises = not link._deferring

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

    def check_reduced(self, optimizer: Optimizer, evaluates: bool) -> None:
        """Raise RuntimeError where this optimizer would update parameters whose gradients nothing reduces.

        The module's own reducer is put away for all of its parameters, and wrappers reduce those that they
        have. A parameter that no optimizer updates may be left over.
        """
        counts = [len(each.slots) for each in reducing]
        if counts != self._counts:
            reduced = {id(slot.param) for each in reducing for slot in each.slots}
            self._counts = counts
            self._left_over = {name: p for name, p in self._parameters.items() if id(p) not in reduced}
        if not self._left_over or dist.get_world_size(self.parallel.process_group) == 1:
            return
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = [
            name
            for name, p in self._left_over.items()
            if id(p) in updated and (p.grad is not None or (evaluates and p.requires_grad))
        ]
        if found:
            names = ", ".join([*map(repr, found[:3]), *([f"{len(found) - 3} more"] if found[3:] else [])])
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() would update parameters {names} with gradients of this "
                "rank alone: they are in a DistributedDataParallel that another optimizer was given as "
                "data_parallel=ddp, which reduces only the gradients of its parameters. Allowed: wrap "
                "this optimizer too, with data_parallel=ddp, or give it to neither of them"
            )

    def broadcast_buffers(self) -> None:
        """Give every rank the buffers of the first, as the next forward of an armed one would.

        Not in that forward: where windows are of unequal length not every rank has one.
        """
        if self.parallel.broadcast_buffers and self.parallel.modules_buffers:
            self.parallel._sync_buffers()

    def leave(self, user: Any) -> None:
        """This one reduces no more; the module is given back when nobody does."""
        self.users.discard(user)
        if not self.users:
            self.close()

    def close(self) -> None:
        _links.pop(id(self.parallel), None)
        if not _links and _hooks:
            _hooks.pop().remove()
        for handle in self._handles:
            handle.remove()
        for name in ("no_sync", "join"):
            self.parallel.__dict__.pop(name, None)
        for name, value in self._former.items():
            if value is None:
                self.parallel.__dict__.pop(name, None)
            else:
                self.parallel.__dict__[name] = value
        if self._former:
            bring_back(self.parallel)
        self._former = {}

    def __del__(self) -> None:
        if self._former and not sys.is_finalizing():  # or nobody would reduce
            self.close()


#: By the module's id.
_links: weakref.WeakValueDictionary[int, UnarmedDDP] = weakref.WeakValueDictionary()
#: What reduces gradients over ranks; each has `slots`.
reducing: weakref.WeakSet[Any] = weakref.WeakSet()
#: The hook on every optimizer's `step()`, while there are links.
_hooks: list[RemovableHandle] = []


@_disable_dynamo
def _check_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for link in list(_links.values()):
        link.check_reduced(optimizer, evaluates=any(map(callable, (*args[1:], *kwargs.values()))))


def unarm(parallel: DistributedDataParallel, user: Any) -> UnarmedDDP:
    """Keep the module's reducer quiet as long as this user, or another, lives and has not left."""
    link = _links.get(id(parallel))
    if link is None:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_check_step))
        link = _links[id(parallel)] = UnarmedDDP(parallel)
    link.users.add(user)
    return link


def _check_unarmed(parallel: DistributedDataParallel, inputs: Any) -> None:
    """Raise RuntimeError where somebody else has readied the module for reductions of its own."""
    if parallel._join_config.enable:
        raise RuntimeError(f"a forward of a DistributedDataParallel inside Join([ddp]): {_JOIN}")
    if parallel.require_backward_grad_sync:
        raise RuntimeError(
            "somebody has set require_backward_grad_sync of a DistributedDataParallel whose gradients the "
            "optimizer reduces (Lightning's manual optimization and Accelerate's trigger_sync_in_backward() "
            "do): both would reduce. Allowed: no_sync(), or an optimizer that is not attached to it"
        )


class IdleReducer:
    """Takes the place of a DistributedDataParallel's reducer, and of its logger, which refers to it."""

    def _rebuild_buckets(self) -> bool:
        return False

    def get_backward_stats(self) -> list[int]:
        return []

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        return SimpleNamespace(strs_map={}, ints_map={})

    def _set_uneven_input_join(self) -> None:
        """Called by `Join`, before the forward that raises."""

    def set_error_and_log(self, error: str) -> None:
        """Called with an error that is raised next."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: this DistributedDataParallel has no reducer as long as an AccumulatingOptimizer "
            "reduces its gradients; optimizer.close() gives it back"
        )


def bring_back(parallel: DistributedDataParallel) -> None:
    """Make a reducer as the one that `IdleReducer` has replaced, unless the process group is gone.

    As torch does when a DistributedDataParallel is unpickled (nn/parallel/distributed.py, `__setstate__`).
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
