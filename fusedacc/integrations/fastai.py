"""fastai: an `opt_func` for any torch optimizer, and a callback that accumulates by samples and flushes.

Learner(dls, model, opt_func=OptFunc(torch.optim.AdamW), cbs=AccumulationCallback(n_acc=64))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from fastai.callback.core import Callback as FastaiCallback
from fastai.callback.core import CancelBatchException
from fastai.callback.fp16 import AMPMode, MixedPrecision, NonNativeMixedPrecision
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import OptimWrapper
from fastai.torch_core import find_bs, num_distrib

from ..accumulators.reduction import WEIGHING
from ..optimizer import AccumulatingOptimizer
from . import release, remember

__all__ = ["AccumulationCallback", "OptFunc"]


class OptFunc:
    """`opt_func` of a Learner: a torch optimizer in an `AccumulatingOptimizer` in an `OptimWrapper`.

    When a Learner creates a new optimizer (`reset_opt=True`, `export`), the former one is closed.

    Args:
        opt: creates the inner optimizer from parameter groups and `lr`: `torch.optim.AdamW`, or a partial of
            it.
        options: of `AccumulatingOptimizer`. `reduction` is "weighted" unless it or
            `gradient_accumulation_steps` is given.
    """

    def __init__(self, opt: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        if options.get("gradient_accumulation_steps") is None:
            options.setdefault("reduction", "weighted")
        self._opt = opt
        self._options = options

    def __call__(self, params: Any, **hypers: Any) -> OptimWrapper:
        return OptimWrapper(params, opt=self._make, **hypers)

    def _make(self, groups: Any, **hypers: Any) -> AccumulatingOptimizer:
        inner = self._opt(groups, **hypers)
        release(p for group in inner.param_groups for p in group["params"])
        optimizer = AccumulatingOptimizer(inner, **self._options)
        remember([optimizer])
        return optimizer


class AccumulationCallback(FastaiCallback):
    """Updates after `n_acc` samples, as `GradientAccumulation` does, and at the end of an epoch.

    Each update is the mean over the samples in its window, whatever the batch sizes. Hyper-parameters change
    only between windows: a window has those of its first batch, so `fit_one_cycle` and other schedules act as
    in a training whose batches are the windows. A partly filled window is discarded when a fit or an epoch is
    cancelled; after an exception in a backward pass, when the next fit begins.

    Args:
        n_acc: samples per update, with `gradient_accumulation_steps=None` (the default of `OptFunc`); None if
            the optimizer itself counts micro-batches.
        weight: a function from a batch's `xb, yb` to what `n_acc` counts instead, such as tokens if the loss
            is a mean over tokens.

    Raises (from `Learner.fit`, before any training):
        TypeError: the Learner's optimizer is no AccumulatingOptimizer.
        ValueError: it does not fit `n_acc`, or a callback accumulates, clips, or scales losses too, or there
            are several processes.
    """

    order = GradientAccumulation.order
    run_valid = False

    def __init__(
        self, n_acc: int | None = None, weight: Callable[[tuple, tuple], float] | None = None
    ) -> None:
        super().__init__()
        if n_acc is not None and (isinstance(n_acc, bool) or not isinstance(n_acc, int) or n_acc < 1):
            raise ValueError(f"n_acc must be an int of at least 1, or None, got {n_acc!r}")
        self.n_acc = n_acc
        self._weight = weight or _samples
        #: Is closed after the backward pass.
        self._micro_batch = contextlib.ExitStack()
        #: The hyper-parameters of each group in this window.
        self._hypers: list[dict[str, Any]] = []

    @property
    def _optimizer(self) -> AccumulatingOptimizer:
        return self.learn.opt.opt

    def before_fit(self) -> None:
        _check(self.learn, self.n_acc)
        self._micro_batch.close()  # open after a backward that raised
        self._optimizer._capture.drop_failed_backwards()
        if self._optimizer._window.tainted is not None:
            self._optimizer.discard()
        self._hypers = []

    def before_backward(self) -> None:
        optimizer = self._optimizer
        if not optimizer.has_partial_window or not self._hypers:
            self._hypers = [
                {name: value for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ]
        for group, hypers in zip(optimizer.param_groups, self._hypers, strict=True):
            group.update(hypers)
        if optimizer.reduction in WEIGHING:
            weight = self._weight(self.learn.xb, self.learn.yb)
            self._micro_batch.enter_context(optimizer.accumulate(weight=weight))

    def after_backward(self) -> None:
        self._micro_batch.close()

    def before_step(self) -> None:
        if self.n_acc is not None and self._optimizer._window.weight_total < self.n_acc:
            raise CancelBatchException  # no step, no zero_grad

    def after_train(self) -> None:
        self._optimizer.flush()
        self._optimizer.zero_grad()

    def after_cancel_epoch(self) -> None:
        self._optimizer.discard()

    def after_cancel_fit(self) -> None:
        self._optimizer.discard()


def _samples(xb: tuple, yb: tuple) -> int:
    return find_bs(yb)


def _check(learn: Any, n_acc: int | None) -> None:
    """Raise TypeError or ValueError if the Learner's optimizer cannot work with these settings."""
    optimizer = getattr(learn.opt, "opt", learn.opt)
    if not isinstance(optimizer, AccumulatingOptimizer):
        raise TypeError(
            f"the Learner's optimizer is a {type(optimizer).__name__}; AccumulationCallback needs a "
            "fusedacc.AccumulatingOptimizer in an OptimWrapper: opt_func=OptFunc(torch.optim.AdamW)"
        )
    steps = optimizer.gradient_accumulation_steps
    reduction = optimizer.reduction
    if n_acc is not None and (steps is not None or reduction not in WEIGHING):
        raise ValueError(
            f"n_acc={n_acc} does not go with gradient_accumulation_steps={steps!r} and "
            f"reduction={reduction!r}; allowed: None and 'weighted', or 'normalized' for losses that "
            "are sums; or n_acc=None with gradient_accumulation_steps=k"
        )
    if n_acc is None and steps is None:
        raise ValueError(
            "n_acc=None needs gradient_accumulation_steps=k; else give n_acc, samples per update"
        )
    if num_distrib() > 1:
        raise ValueError(f"WORLD_SIZE={num_distrib()} is not supported by AccumulationCallback; allowed: 1")
    for callback in learn.cbs:
        if isinstance(callback, GradientAccumulation):
            raise ValueError(
                f"the callback GradientAccumulation(n_acc={callback.n_acc}) would accumulate on top of the "
                "optimizer; pass n_acc= to AccumulationCallback instead"
            )
        if isinstance(callback, GradientClip):
            raise ValueError(
                f"the callback GradientClip(max_norm={callback.max_norm}) would clip sums, or nothing; pass "
                "max_grad_norm= to OptFunc instead, which clips every update once"
            )
        scales = isinstance(callback, MixedPrecision) and callback.amp_mode == AMPMode.FP16
        if scales or isinstance(callback, NonNativeMixedPrecision):
            raise ValueError(
                f"the callback {type(callback).__name__} scales losses, and may change the scale inside a "
                "window; allowed: to_bf16()"
            )
