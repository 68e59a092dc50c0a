"""Lightning: a callback that lets the Trainer count updates, and flushes, for an accumulating optimizer.

`configure_optimizers` returns an `AccumulatingOptimizer` with `gradient_accumulation_steps=k`. Use
`Trainer(callbacks=[AccumulationCallback()])` and leave `accumulate_grad_batches` at 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from ..amp import GradScaler
from ..optimizer import AccumulatingOptimizer
from . import attach, release, remember

__all__ = ["AccumulationCallback"]


class AccumulationCallback(Callback):
    """Makes a Trainer treat a micro-batch without an update as one that it accumulates itself.

    Then `trainer.global_step`, `max_steps`, checkpoints every n steps, logging and schedulers with
    `interval="step"` count updates. `on_before_optimizer_step` is called for updates only,
    `on_before_zero_grad` and `optimizer_zero_grad` once per window. The last batch of an epoch updates from a
    partly filled window, before schedulers and validation; with `carry_over=True` only that of the last epoch
    does. In manual optimization the module calls `step()` on every micro-batch; `global_step` and the flush
    work the same.

    With `strategy="ddp"` the optimizers reduce the gradients over the processes, once per window.

    Args:
        weight: a function from a batch (on its device) to its weight, tokens or samples, for reduction
            "weighted" or "normalized": a number or a 0-dim tensor.
        carry_over: whether a window that an epoch leaves partly filled continues in the next epoch. The end
            of training still updates from a partly filled window: in the last batch of the last of
            `max_epochs`, or, if training is stopped, when its epoch or the training ends. An exception does
            not update.

    Raises (from `Trainer.fit`, before any training):
        TypeError: an optimizer is no `AccumulatingOptimizer`.
        ValueError: none of them counts, or the Trainer accumulates or clips too, scales losses by torch's
            GradScaler, or has several processes with another strategy than "ddp" or with manual optimization.
    """

    def __init__(
        self, weight: Callable[[Any], float | Tensor] | None = None, *, carry_over: bool = False
    ) -> None:
        self._weight = weight
        self._carry_over = carry_over
        self._optimizers: list[AccumulatingOptimizer] = []
        self._updates_before = 0
        self._completed_before = 0
        #: Number of updates when gradients were last cleared.
        self._cleared_after: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            # Left over from a fit that raised, or from the Tuner, which removes callbacks.
            remember(trainer.optimizers)
            release(pl_module.parameters())
            self._updates_before = 0
            self._cleared_after = None

    def state_dict(self) -> dict[str, Any]:
        return {"updates_before": self._updates_before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates_before = state_dict["updates_before"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        remember(trainer.optimizers)
        _check(trainer)
        self._optimizers = list(trainer.optimizers)
        if trainer.world_size != 1:
            for optimizer in self._optimizers:
                attach(optimizer, [trainer.strategy.model])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization:
            loop = trainer.fit_loop.epoch_loop
            loop._should_accumulate = partial(self._accumulates, loop)
            automatic = loop.automatic_optimization
            automatic._make_zero_grad_fn = partial(self._clearing, automatic)

    def _accumulates(self, loop: Any) -> bool:
        """Return whether this batch does not update. Lightning asks before its step, and again after it."""
        batches = loop.batch_progress.current
        if batches.processed == batches.ready:
            return self._updates == self._updates_before
        ends_epoch = loop._num_ready_batches_reached() and not self._carries(loop.trainer)
        return not (self._optimizers[0].will_update or ends_epoch)

    def _carries(self, trainer: Trainer) -> bool:
        """Whether a window that the current epoch leaves partly filled continues in the next epoch."""
        is_last_epoch = trainer.max_epochs != -1 and trainer.current_epoch + 1 >= trainer.max_epochs
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        return self._carry_over and not (is_last_epoch or stops)

    def _clearing(self, automatic: Any, batch_idx: int, optimizer: Any) -> Callable[[], None] | None:
        """Return what Lightning calls before the batch's backward; gradients are cleared when a window
        begins."""
        if self._optimizers[0].has_partial_window or self._cleared_after == self._updates:
            return None
        clear = type(automatic)._make_zero_grad_fn(automatic, batch_idx, optimizer)

        def clear_once() -> None:
            self._cleared_after = self._updates  # a batch without a loss begins no window
            clear()

        return None if clear is None else clear_once

    @property
    def _updates(self) -> int:
        return sum(optimizer.num_updates for optimizer in self._optimizers)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        self._updates_before = self._updates
        self._completed_before = _steps(trainer).total.completed
        if self._weight is not None:
            for optimizer in self._optimizers:
                with optimizer.accumulate(weight=self._weight(batch)):
                    pass  # the weight stays with the micro-batch, which begins here

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():
            _end(trainer, self._optimizers[0], "step")  # Lightning calls no step() when it accumulates

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if pl_module.automatic_optimization and not optimizer.will_update:
            _end(trainer, optimizer, "flush")  # the last batch; Lightning's step() after it does nothing

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        ends_epoch = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        if ends_epoch and not (pl_module.automatic_optimization or self._carries(trainer)):
            self._flush(trainer)
        steps = _steps(trainer)
        steps.increment_by(
            self._updates - self._updates_before - steps.total.completed + self._completed_before
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._carries(trainer):
            self._flush_between_batches(trainer)  # if an epoch has ended early

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._flush_between_batches(trainer)  # if training was stopped after a window was carried over

    def _flush_between_batches(self, trainer: Trainer) -> None:
        """Flush, and count the update in the Trainer and in its schedulers, which no batch does."""
        before = self._updates
        self._flush(trainer)
        if self._updates > before:
            _steps(trainer).increment_by(self._updates - before)
            trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=False)

    def _flush(self, trainer: Trainer) -> None:
        for optimizer in self._optimizers:
            if optimizer.gradient_accumulation_steps is not None and optimizer.has_partial_window:
                _end(trainer, optimizer, "flush")
                optimizer.zero_grad()  # a module that clears after its step() misses this update

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        if trainer.world_size != 1 and any(wrapper.has_partial_window for wrapper in self._optimizers):
            warnings.warn(
                "a checkpoint in mid-window stores only the first process's sums; a resumed run would use "
                "them as those of all processes in its first update. Save after updates "
                "(every_n_train_steps counts them)",
                stacklevel=2,
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        _restore(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            _restore(trainer)
            for optimizer in self._optimizers:
                optimizer.close()


def _restore(trainer: Trainer) -> None:
    """Remove our replacements from Lightning's loops."""
    loop = trainer.fit_loop.epoch_loop
    loop.__dict__.pop("_should_accumulate", None)
    loop.automatic_optimization.__dict__.pop("_make_zero_grad_fn", None)


def _end(trainer: Trainer, optimizer: AccumulatingOptimizer, method: str) -> None:
    """Call `optimizer.step()` or `optimizer.flush()`, through the scaler if there is one."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None:
        getattr(optimizer, method)()
    else:
        getattr(scaler, method)(optimizer)
        scaler.update()


def _steps(trainer: Trainer) -> Any:
    """Return the progress that `trainer.global_step` counts."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        return loop.automatic_optimization.optim_progress.optimizer.step
    return loop.manual_optimization.optim_step_progress


def _check(trainer: Trainer) -> None:
    """Raise TypeError or ValueError if a counted wrapper cannot work under this trainer."""
    for optimizer in trainer.optimizers:
        if not isinstance(optimizer, AccumulatingOptimizer):
            raise TypeError(
                f"configure_optimizers returned a {type(optimizer).__name__}; AccumulationCallback needs "
                "every optimizer to be a fusedacc.AccumulatingOptimizer (gradient_accumulation_steps=1 where "
                "one does not accumulate)"
            )
    if all(optimizer.gradient_accumulation_steps is None for optimizer in trainer.optimizers):
        raise ValueError(
            "AccumulationCallback needs an AccumulatingOptimizer that counts; got "
            "gradient_accumulation_steps=None, allowed: an int or a callable"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) would accumulate on top of "
            "the optimizer's gradient_accumulation_steps=; allowed: 1"
        )
    for callback in trainer.callbacks:
        schedules = isinstance(callback, GradientAccumulationScheduler)
        if schedules and callback.going_to_accumulate_grad_batches():
            raise ValueError(
                f"GradientAccumulationScheduler(scheduling={callback.scheduling}) would accumulate on top of "
                "the optimizer; pass a callable as gradient_accumulation_steps= instead"
            )
    if trainer.gradient_clip_val:
        raise ValueError(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) would not clip the update of a "
            "partly filled window: pass max_grad_norm= to the AccumulatingOptimizer, which clips every "
            "update once; allowed: None"
        )
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ValueError(
            f"precision='16-mixed' scales losses by a {type(scaler).__module__} GradScaler, which would "
            "change its scale inside the window: pass plugins=MixedPrecision('16-mixed', device, "
            "scaler=fusedacc.amp.GradScaler(device))"
        )
    strategy = trainer.strategy
    several = trainer.world_size != 1
    if strategy.handles_gradient_accumulation or (several and not isinstance(strategy, DDPStrategy)):
        raise ValueError(
            f"strategy {type(strategy).__name__} with {trainer.world_size} processes is not supported by "
            "AccumulationCallback; allowed: one process, or strategy='ddp', and none that accumulates"
        )
    if several and not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            "manual optimization under strategy='ddp' readies DistributedDataParallel for every "
            "manual_backward(), which then reduces as well as the optimizer does; allowed: "
            "automatic_optimization=True, one process, or a loop of Fabric's"
        )
    loop = trainer.fit_loop.epoch_loop
    automatic = getattr(loop, "automatic_optimization", None)
    has_internals = hasattr(loop, "_should_accumulate") and hasattr(trainer.fit_loop, "_can_stop_early")
    if not (has_internals and hasattr(automatic, "_make_zero_grad_fn")):
        raise ValueError("this release of Lightning has other internals; tested with 2.6")
