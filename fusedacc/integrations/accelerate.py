"""Accelerate: a counted optimizer behind `Accelerator.prepare`, instead of `Accelerator.accumulate`.

optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(...), gradient_accumulation_steps=8)
model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)
for x, y in loader:
    accelerator.backward(criterion(model(x), y))
    optimizer.step()        # every 8th call updates, and the loader's last
    scheduler.step()        # only after an update
    optimizer.zero_grad()
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor

from ..amp import GradScaler
from ..optimizer import AccumulatingOptimizer
from ..optimizer.micro_batch import MicroBatch
from . import attach

__all__ = ["CountedOptimizer", "prepare"]

_OTHER_WAYS = (
    DistributedType.DEEPSPEED,
    DistributedType.MEGATRON_LM,
    DistributedType.FSDP,
    DistributedType.XLA,
)


def prepare(accelerator: Accelerator, *objects: Any, device_placement: list[bool] | None = None) -> Any:
    """Call `accelerator.prepare(*objects)`; counted `AccumulatingOptimizer`s become `CountedOptimizer`s.

    With several processes, each `AccumulatingOptimizer` reduces the gradients of its DistributedDataParallel
    once per window.

    With mixed_precision="fp16" the accelerator's loss scaler is replaced by a `fusedacc.amp.GradScaler` with
    the same settings, whose scale changes only at the end of a window.

    Args:
        accelerator: its `gradient_accumulation_steps` must be 1.
        *objects: as for `Accelerator.prepare`.
        device_placement: as for `Accelerator.prepare`.

    Returns:
        What `Accelerator.prepare` returns.

    Raises:
        RuntimeError: `accelerator.gradient_accumulation_steps` is not 1, its loss scaler is not torch's, or
            it is set up for DeepSpeed, Megatron-LM, FSDP or XLA, which step optimizers differently, or for
            FSDP on a CPU, which Accelerate ignores.
        ValueError: a DistributedDataParallel does not reduce as plain DDP does (a communication hook).
    """
    wrappers = [item for item in objects if isinstance(item, AccumulatingOptimizer)]
    asks_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"  # an fsdp_plugin sets it too
    if wrappers and asks_fsdp and accelerator.distributed_type == DistributedType.MULTI_CPU:
        raise RuntimeError(
            "an fsdp_plugin or ACCELERATE_USE_FSDP asks for FSDP, which Accelerate does not run on a CPU: "
            "every process would hold the whole model, in a DistributedDataParallel. Allowed on a CPU: "
            "neither of them, or torch's fully_shard(model) without Accelerate"
        )
    if any(map(_is_counted, objects)):
        _check_steps(accelerator.gradient_accumulation_steps)
        if accelerator.distributed_type in _OTHER_WAYS:
            raise RuntimeError(
                f"the Accelerator's distributed_type is {accelerator.distributed_type}, which steps "
                "optimizers differently; allowed: one process, or DistributedDataParallel"
            )
        _replace_scaler(accelerator)
        # All accelerators share it; another one's accumulate() may have left False.
        accelerator.sync_gradients = True
        places = device_placement or [accelerator.device_placement] * len(objects)
        objects = tuple(
            CountedOptimizer(item, place, accelerator.scaler) if _is_counted(item) else item
            for item, place in zip(objects, places, strict=True)
        )
    prepared = accelerator.prepare(*objects, device_placement=device_placement)
    if accelerator.num_processes > 1:
        models = prepared if isinstance(prepared, tuple) else [prepared]
        for accelerated in accelerator._optimizers:  # also one prepared before its model
            if isinstance(accelerated.optimizer, AccumulatingOptimizer):
                attach(accelerated.optimizer, models)
        for optimizer in wrappers:
            accelerator.register_save_state_pre_hook(partial(_check_between_windows, weakref.ref(optimizer)))
    return prepared


class CountedOptimizer(AcceleratedOptimizer):
    """A prepared counted `AccumulatingOptimizer`; it has the attributes of `optimizer`.

    `step_was_skipped` is true after calls that do not update, so that a prepared scheduler and
    `accelerator.optimizer_step_was_skipped` count updates.

    Args:
        optimizer: the counted wrapper.
        device_placement: whether its state is moved to the accelerator's device.
        scaler: the accelerator's, if it has one.
    """

    #: `Accelerator.prepare` registers prepared objects and returns them unchanged.
    _is_accelerate_prepared = True
    optimizer: AccumulatingOptimizer
    scaler: GradScaler | None

    def __init__(
        self,
        optimizer: AccumulatingOptimizer,
        device_placement: bool = True,
        scaler: GradScaler | None = None,
    ) -> None:
        super().__init__(optimizer, device_placement)
        self.scaler = scaler

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """End a micro-batch; update after a full window, and at the loader's end.

        With a loader that was not prepared, or `GradientAccumulationPlugin(sync_with_dataloader=False)`, call
        `flush()` at the end.

        Raises:
            RuntimeError: the accelerator accumulates as well; otherwise as `AccumulatingOptimizer.step`.
        """
        self._end("step", *filter(None, [closure]))
        if self._ends_loader() and self.optimizer.micro_step:
            self.flush()

    def flush(self) -> None:
        """`AccumulatingOptimizer.flush` with the loss scale. `scheduler.step()` may follow."""
        self._end("flush")

    def _ends_loader(self) -> bool:
        """Return whether this batch is the last of a prepared loader, which also ends a window."""
        return self.gradient_state.end_of_dataloader and self.gradient_state.sync_with_dataloader

    def _end(self, method: str, *arguments: Any) -> None:
        """Call `optimizer.step()` or `optimizer.flush()`, through the scaler if there is one."""
        _check_steps(self.gradient_state.num_steps)
        if self.scaler is None:
            getattr(self.optimizer, method)(*arguments)
            return
        before = self.optimizer.num_skipped
        getattr(self.scaler, method)(self.optimizer, *arguments)
        if self.optimizer.has_updated:  # waits for the device, as torch's scaler does
            self._is_overflow = bool(self.optimizer.num_skipped > before)
        self.scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step()` or `flush()` made no update, between updates or after an overflow."""
        return not self.optimizer.has_updated or self._is_overflow

    def join_hook(self, **arguments: Any) -> Any:
        """Refuse `Join`: prepared schedulers of ranks without batches would fall behind.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "Join([optimizer]) and join_uneven_inputs([optimizer]) do not go with a prepared optimizer; "
            "allowed: even_batches=True (the default), by which every process has as many batches"
        )

    def accumulate(
        self,
        model: torch.nn.Module | None = None,
        weight: float | Tensor | None = None,
        defer: str = "all",
    ) -> contextlib.AbstractContextManager[MicroBatch]:
        """`AccumulatingOptimizer.accumulate`, instead of `Accelerator.accumulate`.

        Raises:
            RuntimeError: the accelerator accumulates as well.
        """
        _check_steps(self.gradient_state.num_steps)
        # Without the model it synchronizes gradients, and those that were waiting.
        is_last = self._ends_loader() and defer == "all"
        return self.optimizer.accumulate(None if is_last else model, weight, defer)


def _is_counted(item: Any) -> bool:
    return isinstance(item, AccumulatingOptimizer) and item.gradient_accumulation_steps is not None


def _check_steps(steps: int) -> None:
    if steps != 1:
        raise RuntimeError(
            f"the Accelerator has gradient_accumulation_steps={steps}, and the optimizer counts as well: "
            "losses would be divided twice. Allowed: 1; if one has been divided already, discard()"
        )


def _check_between_windows(reference: weakref.ref[AccumulatingOptimizer], *_: Any) -> None:
    """Runs before `save_state` of several processes, which writes the first one's optimizers."""
    optimizer = reference()
    if optimizer is not None and optimizer.has_partial_window:
        raise RuntimeError(
            f"save_state() in mid-window (micro_step is {optimizer.micro_step}) would keep the sums of the "
            "first process and lose the others'; allowed: after an update (has_partial_window is False), or "
            "flush() on every process before"
        )


def _replace_scaler(accelerator: Accelerator) -> None:
    scaler = accelerator.scaler
    if scaler is None or isinstance(scaler, GradScaler):
        return
    if type(scaler) not in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
        raise RuntimeError(
            f"the Accelerator's loss scaler is a {type(scaler).__name__}; allowed: torch.amp.GradScaler, none"
        )
    accelerator.scaler = GradScaler(
        accelerator.device.type,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )
