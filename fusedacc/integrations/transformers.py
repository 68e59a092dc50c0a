"""Transformers: the manual loop in `Trainer`, whose `gradient_accumulation_steps` is the only count.

trainer = Trainer(
    model=model,
    args=TrainingArguments(gradient_accumulation_steps=8, ...),
    optimizers=(fusedacc.AccumulatingOptimizer(torch.optim.AdamW(model.parameters())), None),
    callbacks=[AccumulationCallback()],
)
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import GreedyLR, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_callback import DefaultFlowCallback

from ..optimizer import AccumulatingOptimizer
from . import attach
from .fused_head import FusedHead, fuse_head

__all__ = ["AccumulationCallback", "FusedHead", "fuse_head"]


class AccumulationCallback(TrainerCallback):
    """Checks that only the Trainer counts micro-batches. Updates from partly filled windows that it leaves.

    The Trainer knows the end of a window from the length of its loader. With a loader that has no length, or
    ends early, it carries the last gradients into the next epoch at their full weight. Here they make a
    separate update at the end of the epoch, which `global_step` and the scheduler count.

    A window is dropped if training or the epoch is stopped before its last micro-batch.

    Args:
        fuse_head: whether the model computes its training loss without logits, as by `fuse_head`.
    """

    def __init__(self, fuse_head: bool = False) -> None:
        self._fuses = fuse_head
        self._fused: FusedHead | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check an optimizer that the Trainer was given; raises as `on_train_begin`."""
        if kwargs["optimizer"] is not None:
            _check(kwargs["optimizer"], args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the optimizer; warn if the Trainer will miscount the model's tokens.

        With several processes, the optimizer reduces the gradients of the Trainer's DistributedDataParallel.

        Raises:
            TypeError: it is no `AccumulatingOptimizer`.
            ValueError: it counts micro-batches itself, its reduction is not "sum", or the
                DistributedDataParallel does not reduce as plain DDP does.
        """
        optimizer = kwargs["optimizer"].optimizer
        _check(optimizer, args)
        if args.world_size > 1:
            attach(optimizer, [_trainer_of(state).model_wrapped])
        if self._fuses:
            self._fused = fuse_head(kwargs["model"])
        name = type(kwargs["model"]).__name__
        loss_type = getattr(kwargs["model"], "loss_type", None)
        if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and loss_type not in LOSS_MAPPING:
            warnings.warn(
                f"{name}.loss_type is {loss_type!r}, from which the Trainer cannot tell that the loss shifts "
                "labels: num_items_in_batch counts one token too many in each row, and gradients come out "
                "too small. Set model.loss_type = 'ForCausalLM' before the Trainer is made",
                stacklevel=2,
            )

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Restore the model's logits."""
        if self._fused is not None:
            self._fused.remove()
            self._fused = None

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Update from a window that the loader has left partly filled."""
        accelerated = kwargs["optimizer"]
        scheduler = kwargs["lr_scheduler"]
        optimizer = accelerated.optimizer
        if control.should_training_stop or control.should_epoch_stop:
            optimizer.zero_grad()
        if not optimizer.has_partial_window:
            return control
        # As the Trainer at the end of a window.
        if accelerated.scaler is not None:
            accelerated.scaler.unscale_(optimizer)
        if args.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(kwargs["model"].parameters(), args.max_grad_norm)
        accelerated.gradient_state._set_sync_gradients(True)
        accelerated.step()
        if not accelerated.step_was_skipped and not isinstance(scheduler, ReduceLROnPlateau | GreedyLR):
            scheduler.step()
        optimizer.zero_grad()
        state.global_step += 1
        return DefaultFlowCallback().on_step_end(args, state, control)


def _trainer_of(state: TrainerState) -> Trainer:
    """Return the Trainer of a state. Callbacks have no reference to it, so search all objects."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Trainer) and candidate.__dict__.get("state") is state:
            return candidate
    raise RuntimeError(
        "AccumulationCallback finds no Trainer of the state that on_train_begin() was called with; allowed: "
        "a transformers.Trainer, whose `state` it is"
    )


def _check(optimizer: Any, args: TrainingArguments) -> None:
    if not isinstance(optimizer, AccumulatingOptimizer):
        raise TypeError(
            f"the Trainer's optimizer is a {type(optimizer).__name__}; allowed: a "
            "fusedacc.AccumulatingOptimizer, given as Trainer(optimizers=(optimizer, None)) or made in "
            "Trainer.create_optimizer"
        )
    steps = optimizer.gradient_accumulation_steps
    if steps is not None:
        raise ValueError(
            f"the optimizer has gradient_accumulation_steps={steps} and TrainingArguments have "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: both would count, and "
            "global_step, max_steps and the schedule would not be in updates. Allowed: None for the "
            "optimizer (AccumulatingOptimizer(optimizer)), and the number in TrainingArguments"
        )
    if optimizer.reduction != "sum":
        raise ValueError(
            f"the optimizer has reduction={optimizer.reduction!r}, and the Trainer scales losses itself, by "
            "num_items_in_batch or gradient_accumulation_steps; allowed: 'sum', the default"
        )
