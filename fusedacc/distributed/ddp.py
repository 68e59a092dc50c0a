"""A DistributedDataParallel whose reducer stays unarmed: the wrapper reduces its gradients.

An unarmed reducer ignores its hooks (torch/nn/parallel/distributed.py, `require_backward_grad_sync`). Buffers
are broadcast with each reduction, where all ranks take part.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

#: What keeps the reducer quiet: its forward does not ready it, and no node of a static graph queues its own
#: reduction (an attribute that only a static graph has).
_UNARMED = {
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
}


def check(parallel: DistributedDataParallel) -> None:
    """Raise ValueError where this DistributedDataParallel reduces in a way that the wrapper would not."""
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
    """One DistributedDataParallel as long as the wrapper reduces for it.

    Args:
        parallel: the module; `check` has passed it.
    """

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self.parallel = parallel
        #: Whether the last forward with gradients wants them synchronised.
        self.synchronises = True
        self._deferring = 0
        self._former = {name: parallel.__dict__.get(name) for name in _UNARMED}
        parallel.__dict__.update(_UNARMED)
        own = weakref.ref(self)

        @contextlib.contextmanager
        def no_sync() -> Iterator[None]:
            with _deferred(own()):
                yield

        parallel.no_sync = no_sync  # type: ignore[method-assign]
        self._handle = parallel.register_forward_hook(_noting(own))

    @property
    def may_change(self) -> bool:
        """Whether the user has said that a forward may use other parameters than the last."""
        return self.parallel.find_unused_parameters and not self.parallel.static_graph

    def note_forward(self) -> None:
        """A forward has run: whether it synchronises."""
        if torch.is_grad_enabled():
            self.synchronises = not self._deferring

    def broadcast_buffers(self) -> None:
        """Give every rank the buffers of the first, as the next forward of an armed one would.

        Not in that forward: where windows are of unequal length not every rank has one.
        """
        if self.parallel.broadcast_buffers and self.parallel.modules_buffers:
            self.parallel._sync_buffers()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """While inside, forwards say that their gradients are not the window's last."""
        self._deferring += 1
        try:
            yield
        finally:
            self._deferring -= 1

    def close(self) -> None:
        """Give the module back as it was."""
        self._handle.remove()
        self.parallel.__dict__.pop("no_sync", None)
        for name, value in self._former.items():
            if value is None:
                self.parallel.__dict__.pop(name, None)
            else:
                self.parallel.__dict__[name] = value
        self._former = {}

    def __del__(self) -> None:
        if self._former and not sys.is_finalizing():  # or nobody would reduce
            self.close()


def _deferred(link: UnarmedDDP | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if link is None else link.deferred()


def _noting(own: weakref.ref[UnarmedDDP]) -> Callable[..., Any]:
    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        link = own()
        if link is not None:
            link.note_forward()

    return hook
