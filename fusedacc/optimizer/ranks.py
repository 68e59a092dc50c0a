"""The wrapper's ranks: to whom it is attached, and what happens where some have fewer micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from ..accumulators import Accumulators, Slot
from ..autograd.capture import Capture
from ..distributed import DataParallel, check, parallel_in
from .accumulation import Accumulation
from .loss_scale import LossScaleLink, Scaling
from .master_weights import MasterWeights
from .parameters import ParameterSet
from .window import Window


class Ranks(Joinable):
    """What users say to the wrapper of its ranks."""

    _window: Window
    _accumulation: Accumulation
    _accumulators: Accumulators
    _capture: Capture
    _slots: list[Slot]
    _loop: Any
    _parameter_set: ParameterSet
    _loss_scale: LossScaleLink
    _reduce_dtype: torch.dtype | None = None
    _finishing: tuple[float | None, float, bool]
    _masters: MasterWeights | None
    _closed: bool
    _join_config: Any = _JoinConfig.construct_disabled_join_config()

    def attach(self, data_parallel: Any) -> None:
        """Reduce over these ranks from now on, as `data_parallel=` says it from the beginning.

        Nothing happens where the DistributedDataParallel is attached already; another one, or a process
        group, is given back as it was.

        Args:
            data_parallel: a DistributedDataParallel, a module of which it is a child (one that is compiled,
                or that Fabric has set up), or a process group.

        Raises:
            TypeError, ValueError: as `__init__`; nothing is changed then.
            RuntimeError: the window is part-filled, or the wrapper is closed.
        """
        window, accumulation, capture = self._window, self._accumulation, self._capture
        given, former = parallel_in(data_parallel) or data_parallel, accumulation.ranks.parallel
        if former is not None and former.serves(given):
            return
        if self._closed or not window.empty:
            state = "closed" if self._closed else f"in mid-window (micro_step is {window.micro_step})"
            raise RuntimeError(
                f"attach(data_parallel): the optimizer is {state}, and what it has added so far would not be "
                "reduced; allowed: between windows, or discard() first, and not after close()"
            )
        check(given, self._slots, self._reduce_dtype)
        if former is not None:
            former.close()
            accumulation.ranks.join(None)
        self._parameter_set.forget_casts()  # weights may come from another rank
        parts = self._slots, self._accumulators, self._reduce_dtype, capture.add_pending
        accumulation.ranks.join(DataParallel(given, *parts, self._shared_settings()))
        capture.registry.count_deliveries(accumulation.count_delivery)
        self._parameter_set.choose_again(self._accumulators.plans)

    def _shared_settings(self) -> dict[str, object]:
        """The arguments that all ranks must share: they decide when ranks reduce, and what an update does.

        A callable schedule is compared with ints only, since two callables may return the same numbers.
        """
        schedule, (max_grad_norm, norm_type, skip_nonfinite) = self._window.schedule, self._finishing
        return {
            "gradient_accumulation_steps": "a callable" if callable(schedule) else schedule,
            "reduction": self._window.reduction,
            "max_grad_norm": max_grad_norm,
            "norm_type": norm_type,
            "skip_nonfinite": skip_nonfinite,
            "master_weights": self._masters is not None,
        }

    def _attach_if_parallel(self, model: torch.nn.Module | None) -> None:
        """Attach the DistributedDataParallel that this module is or has, if any, and if a window begins."""
        if self._window.empty and not self._closed:
            parallel = parallel_in(model)
            if parallel is not None:
                self.attach(parallel)

    @property
    def _takes_part(self) -> bool:
        """Whether `flush()` takes part in windows of other ranks, also where this one's is empty."""
        return self._window.counted and self._accumulation.ranks.parallel is not None

    # torch.distributed.algorithms.Join

    def join_hook(self, after_update: Callable[[], Any] | None = None, **others: Any) -> JoinHook:
        """What a rank does in `Join([optimizer])` when it has no more micro-batches.

        It takes part in the windows of the ranks that have, with what its own window holds, and makes their
        updates. Outside counted loops nobody could tell it when there is one. What the last windows have left
        waits for a `flush()` on every rank, or for the next micro-batches.

        Args:
            after_update: called after each of them, as `Join([optimizer], after_update=scheduler.step)`: the
                ranks' learning rates must not part.
            others: of other objects in the same `Join`.

        Raises:
            RuntimeError: nobody has told the wrapper of its ranks, or the loop is manual.
        """
        parallel = self._accumulation.ranks.parallel
        if parallel is None:
            raise RuntimeError(
                "Join([optimizer]) needs to know the ranks: make the optimizer with data_parallel=, or call "
                "optimizer.attach(ddp) before"
            )
        if not self._window.counted:
            raise RuntimeError(
                "Join([optimizer]) needs a counted loop (gradient_accumulation_steps=k); in a manual one a "
                "rank without micro-batches cannot know when the others update"
            )
        parallel.reducer.announce = partial(Join.notify_join_context, self)
        self._loss_scale.check = self._check_unscaled
        return _TakingPart(self, after_update)

    def _check_unscaled(self) -> None:
        if self._join_config.enable:
            raise RuntimeError(
                "a GradScaler inside Join([optimizer]): a rank without micro-batches does not learn its "
                "scale; allowed: scaler.flush(optimizer) on every rank after its last micro-batch"
            )

    @property
    def join_device(self) -> torch.device:
        """Where `Join` counts the ranks."""
        return self._slots[0].param.device if self._slots else torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """Among whom `Join` counts."""
        parallel = self._accumulation.ranks.parallel
        return None if parallel is None else parallel.reducer.group


class _TakingPart(JoinHook):
    def __init__(self, optimizer: Any, after_update: Callable[[], Any] | None) -> None:
        self._optimizer, self._after_update = optimizer, after_update

    def _join(self) -> None:
        """This rank has joined: what it reduces from now on is for others."""
        parallel = self._optimizer._accumulation.ranks.parallel
        if parallel is not None:
            parallel.reducer.announce = None

    def main_hook(self) -> None:
        self._join()
        optimizer = self._optimizer
        optimizer._capture.drop_failed_backwards()
        optimizer._window.check_untainted()
        optimizer._window.begin_step()
        optimizer._loop.flush(Scaling(), {}, until_all=False)
        if optimizer.has_updated and self._after_update is not None:
            optimizer._opt_called = True  # torch's schedulers ask for it
            self._after_update()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._join()
        self._optimizer._join_config = Ranks._join_config
        self._optimizer._loss_scale.check = None
