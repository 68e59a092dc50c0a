"""The step that is planned: windows of micro-batches, by the wrapper or by the stock loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..accumulators.reduction import reduction_of
from ..optimizer import AccumulatingOptimizer
from .allocations import ACCUMULATORS, ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, TEMPORARIES
from .copies import Copy

#: The loss of a batch, a 0-dim tensor.
LossFunction = Callable[[nn.Module, Any], Tensor]
#: Called with the name of what begins: "forward", "backward" or "update".
Phase = Callable[[str], contextlib.AbstractContextManager[None]]
#: Micro-batches of a window that need be run: a first and a last one. Those between are as the last.
MICRO_BATCHES = 2
#: What new memory is for, by phase.
KIND_IN = {"forward": ACTIVATIONS, "backward": TEMPORARIES, "update": TEMPORARIES}


def windows_of(steps: int) -> tuple[int, ...]:
    """The windows that show what one of `steps` micro-batches needs: one before, which makes the state."""
    return 1, min(steps, MICRO_BATCHES)


def models_own_loss(model: nn.Module, batch: Any) -> Tensor:
    """`model(**batch).loss`, as Transformers' models have it."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"loss_fn=None calls model(**sample_batch).loss, and sample_batch is a {type(batch).__name__}; "
            "allowed: a dict, or a loss_fn(model, batch) that returns the loss"
        )
    return model(**batch).loss


def train(
    copy: Copy,
    draw: Callable[[], Any],
    loss_fn: LossFunction,
    windows: Sequence[int],
    phase: Phase,
    look: Callable[[], None],
) -> None:
    """Run whole windows, each of so many micro-batches and an update.

    windows: micro-batches of each, which the wrapper's schedule must have where it counts them. draw: makes a
    micro-batch. look: called when the step has come to a rest: memory may have got a new use.
    """
    model, optimizer = copy
    wrapper = optimizer if isinstance(optimizer, AccumulatingOptimizer) else None
    counted = wrapper is not None and wrapper.gradient_accumulation_steps is not None
    weighted = wrapper is not None and reduction_of(wrapper.reduction).weighs
    look()
    for steps in windows:
        for step in range(steps):
            around: Any = wrapper.accumulate(weight=1.0) if wrapper and weighted else contextlib.nullcontext()
            with around:
                with phase("forward"):
                    loss = checked_loss(loss_fn(model, draw()))
                    if not counted and steps > 1:
                        loss = loss / steps
                with phase("backward"):
                    loss.backward()
                    del loss
                look()
                if counted or step == steps - 1:
                    with phase("update"):
                        optimizer.step()
            look()
            if counted or step == steps - 1:
                optimizer.zero_grad()


def checked_loss(loss: Any) -> Tensor:
    """The loss, if it is one."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn must return the loss, a 0-dim tensor; got {found}")
    return loss


def held(copy: Copy) -> dict[str, list[Tensor]]:
    """The tensors that outlive a micro-batch, by kind."""
    model, optimizer = copy
    wrapper = optimizer if isinstance(optimizer, AccumulatingOptimizer) else None
    sums: list[Tensor] = []
    state = list(_tensors(value for own in copy.inner.state.values() for value in own.values()))
    if wrapper is not None:
        grads = wrapper._accumulators.grads
        sums = list(_tensors(grads.current(slot) for slot in wrapper._slots))
        if wrapper._masters is not None:
            state += wrapper._masters.tensors()
    present = [p.grad for p in model.parameters() if p.grad is not None]
    return {
        GRADIENTS: present,
        ACCUMULATORS: sums,
        OPTIMIZER: state,
        PARAMETERS: [*model.parameters(), *model.buffers()],
    }


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    return (value for value in values if isinstance(value, Tensor))
