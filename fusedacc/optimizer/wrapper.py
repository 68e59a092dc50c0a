"""The drop-in wrapper: what users call. It builds the parts and forwards calls; no arithmetic."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..accumulators import Accumulators
from ..autograd.capture import Capture
from ..distributed import DataParallel, RankPlace, check, parallel_in, pipelines
from ..kernels import registry, selftest, torch_state, tuning
from ..kernels.rounding import STOCHASTIC, checked_seed
from ..nn import name_slots
from . import checkpoint, small_layers
from .accumulation import Accumulation
from .explain import explain
from .loops import CountedLoop, ManualLoop
from .loss_scale import LossScaleLink
from .master_weights import MasterWeights
from .parameters import ParameterSet
from .pipeline_steps import PipelineSteps
from .unsharded import UnshardedSums
from .update import Scaling, Update, UpdateSettings, warn_of_unwritten
from .window import MicroBatch, Schedule, Window

#: Modules that must not find the inner optimizer: Lightning has two names.
_UNWRAPS = frozenset(
    f"{package}.callbacks.lr_monitor" for package in ("lightning.pytorch", "pytorch_lightning")
)


class AccumulatingOptimizer(Optimizer, Joinable):
    """Any torch optimizer, with gradients accumulated over micro-batches in fused passes.

    In a **counted loop** (`gradient_accumulation_steps=k`) the training loop looks as if there were no
    accumulation: every k-th `step()` updates, the others return at once, and the loss is not divided by k.
    In a **manual loop** (None, the default) an existing accumulation loop runs unchanged: `step()` updates,
    `zero_grad()` clears, and `p.grad` is the accumulator.

    Args:
        optimizer: the inner optimizer. `param_groups`, `state` and `defaults` are its own.
        gradient_accumulation_steps: micro-batches per update: an int >= 1, a callable of the number of
            updates so far that returns one, or None for the manual loop.
        reduction: "mean": the sum of the gradients divided by the number of micro-batches (default when
            counted); "sum" (default when manual); "weighted": sum(w * g) / sum(w), for losses that are means
            over w tokens or samples; "normalized": sum(g) / sum(w), for losses that are sums over w.
        accumulate_dtype: dtype of the sums; None for float32 for bfloat16 and float16 parameters, else the
            parameter's dtype.
        rounding: "nearest", or "stochastic" for sums of bfloat16 (`accumulate_dtype=torch.bfloat16`): up or
            down by chance, so that they are right on average where nearest would lose every gradient below
            1/256 of the sum. Half the memory of float32 sums. What torch itself adds to p.grad in a manual
            loop (create_graph=True, a DistributedDataParallel that is not attached, FSDP2) goes to nearest.
        seed: of the random bits, 0 to 2**63 - 1; None: `torch.initial_seed()`, or 0 where a process group is
            up. One seed, equal bits; with `data_parallel` the first rank's is taken, and where others average
            gradients all ranks need the same.
        max_grad_norm: clip the final gradient of each update to this norm; None: do not.
        norm_type: 2.0 or inf.
        skip_nonfinite: drop an update whose gradient holds inf or nan; without waiting for the device where
            the inner optimizer is one of torch's with `fused=True`.
        master_weights: keep float32 copies of bfloat16 and float16 parameters, on which the inner optimizer
            runs; its state is float32 then. 4 bytes a parameter more, and 4 more for each of its states.
        model: the model whose parameters these are: its Linear and Embedding modules add the gradients of
            their weights to the sums inside their backward, and write no gradient. A copy of the model, or
            of the optimizer, does so only once it is wrapped itself.
        keep_casts: under autocast the Linear modules and convolutions of `model` cast their weights once a
            window and keep the casts until its update: 6 bytes a parameter moved in a window, not in every
            micro-batch. What is written past autograd (`param.data`) is looked for in a sample of elements
            only.
        backend: "auto", "cuda", "triton", "cpu" or "eager". The environment variable FUSEDACC_BACKEND
            overrides "auto".
        private_gradients: counted loop: `p.grad` stays None until `step()`, so that nobody can write to the
            final gradient, and the window's last additions leave its norm: clipping then reads nothing (4
            bytes a parameter less). Clip by `max_grad_norm` only: `clip_grad_norm_` would find no gradient.
        data_parallel: the DistributedDataParallel of the model, or a process group: sums are reduced over its
            ranks once a window, inside the backward of its last micro-batch. "sum" is the mean over ranks of
            their sums; the other reductions are over the micro-batches of all ranks. With a process group
            every rank gets the parameters of its first.
        reduce_dtype: dtype on the wire; None: that of the sums, or float32 where they are rounded
            stochastically. bfloat16 halves the bytes of float32; the collective adds in it, to nearest.

    Raises:
        TypeError: `optimizer` is no `torch.optim.Optimizer`, or an argument is of the wrong kind.
        ValueError: an argument, FUSEDACC_TUNE or FUSEDACC_SELFTEST has a value that is not allowed, a
            parameter is in another live wrapper or has no shape yet (a lazy module's, before its first
            forward pass), an L-BFGS is to be counted (it evaluates its closure many times per step), or
            `optimizer` updates inside the backward (optimi's `gradient_release`).
        RuntimeError: the backend asked for cannot run here, or has failed its self-test.
    """

    __module__ = "fusedacc.optimizer"  # where pickles look for it
    #: torch's GradScaler hands over its scale and what it has found, and `step` honours both.
    _step_supports_amp_scaling = True
    _reduce_dtype: torch.dtype | None = None  # pickles of former releases have none
    _join_config: Any = _JoinConfig.construct_disabled_join_config()

    def __init__(
        self,
        optimizer: Optimizer,
        gradient_accumulation_steps: Schedule = None,
        *,
        reduction: str | None = None,
        accumulate_dtype: torch.dtype | None = None,
        rounding: str = "nearest",
        seed: int | None = None,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        skip_nonfinite: bool = False,
        master_weights: bool = False,
        model: torch.nn.Module | None = None,
        keep_casts: bool = False,
        backend: str = "auto",
        private_gradients: bool = False,
        data_parallel: DistributedDataParallel | torch.distributed.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, AccumulatingOptimizer):
            raise TypeError("optimizer is an AccumulatingOptimizer already; wrap the inner optimizer once")
        if optimizer.defaults.get("gradient_release"):  # optimi's
            raise ValueError(
                f"optimizer is {type(optimizer).__name__}(gradient_release=True), which updates inside every "
                "backward, so that nothing could accumulate; allowed: gradient_release=False"
            )
        window = Window(gradient_accumulation_steps, reduction, bool(private_gradients))
        if window.counted and isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"gradient_accumulation_steps={gradient_accumulation_steps!r} cannot count micro-batches of "
                "L-BFGS, which evaluates its closure many times per step; allowed: None (the manual loop)"
            )
        registry.requested(backend)
        # Ranks that are given the same gradients must round alike, and torch's own seed may be each its own.
        shared = seed is None and rounding == STOCHASTIC and torch_state.process_group_up()
        seed = checked_seed(rounding, 0 if shared else seed)
        if seed is not None and accumulate_dtype is not torch.bfloat16:
            raise ValueError(
                f"rounding={rounding!r} is for sums of torch.bfloat16, and accumulate_dtype is "
                f"{accumulate_dtype}; allowed: accumulate_dtype=torch.bfloat16, or rounding='nearest'"
            )
        tuning.trials_disabled_by()
        selftest.is_off()
        update_settings = UpdateSettings.checked(max_grad_norm, norm_type, bool(skip_nonfinite))
        if not isinstance(model, torch.nn.Module | None):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        if keep_casts and model is None:
            raise ValueError(
                "keep_casts=True needs model=, whose modules are to keep the casts of their weights; "
                "allowed: keep_casts=False, or model=model"
            )
        masters = bool(master_weights)
        self._build(optimizer, window, accumulate_dtype, backend, update_settings, masters, model, seed=seed)
        checkpoint.forget_stale(optimizer)
        if model is not None:
            why_left = partial(small_layers.why_left, AccumulatingOptimizer)
            self._parameter_set.replace_in(model, self._capture, why_left, bool(keep_casts))
            self._accumulation.shards.make_sums = partial(
                UnshardedSums, model, weakref.ref(window), backend, why_left
            )
        if reduce_dtype is not None:
            self._reduce_dtype = reduce_dtype
        if data_parallel is not None:
            try:
                self.attach(data_parallel)
            except BaseException:
                self.close()
                raise

    def _build(
        self,
        optimizer: Optimizer,
        window: Window,
        accumulate_dtype: torch.dtype | None,
        backend: str,
        update_settings: UpdateSettings,
        master_weights: bool,
        model: torch.nn.Module | None = None,
        lenient: bool = False,
        seed: int | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._accumulate_dtype, self._update_settings = accumulate_dtype, update_settings
        self._window = window
        self._parameter_set = parameters = ParameterSet(optimizer, accumulate_dtype, backend, model, lenient)
        self._slots = slots = parameters.slots
        if model is not None:
            name_slots(model, slots)
        self._accumulators = Accumulators(slots, not window.counted, backend, seed)
        self._masters = MasterWeights(slots, optimizer, backend) if master_weights else None
        self._warn_of_unwritten(optimizer.param_groups, 4)
        self._accumulation = accumulation = Accumulation(slots, window, self._accumulators)
        self._capture = capture = Capture(slots, self._accumulators, accumulation)
        parts = self._accumulators, window, capture.registry, self._masters
        self._inner_update = update = Update(optimizer, *parts, update_settings)
        self._pipeline_steps = steps = PipelineSteps(accumulation, capture, update)
        loop = CountedLoop if window.counted else ManualLoop
        self._loop = loop(optimizer, parameters, capture, accumulation, update, self._masters, steps)
        self._loss_scale = LossScaleLink(self._loop, self._inner_update, self._accumulators.norms, window)
        self._closed = False
        assumptions = accumulation.assumptions()
        assumptions.is_false.extend(self._loss_scale.is_false_in_middle())
        capture.deal_with_middle(optimizer, parameters, assumptions)
        self._middle = capture.hooks.middle

    def __repr__(self) -> str:
        steps = self._window.schedule
        loop = "manual" if steps is None else f"gradient_accumulation_steps={steps}"
        return f"{type(self).__name__}({loop}, reduction={self.reduction!r})\n{self.optimizer!r}"

    # The loop

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """End a micro-batch and, if it was the window's last, update (counted); update (manual).

        A `step()` with no backward since the last does not count. `closure` is run with gradients enabled:
        once in a counted loop; in a manual loop the inner optimizer runs it, as often as it likes.
        `arguments` are the inner optimizer's own, as SophiaH's `hessian`: those of a call that updates are
        handed on, and those of the others are not kept.

        Returns:
            What the closure returned; None without one.

        Raises:
            TypeError: the inner optimizer's `step` takes no such argument; nothing is counted then.
            RuntimeError: a weight is missing, or the inner optimizer's state has the shape that a parameter
                had before (nothing is changed: mend it and call again); an exception has left sums that are
                neither old nor new, or a parameter's shape has changed in mid-window (see `discard`).
        """
        if torch.compiler.is_compiling():
            return self._step_uncompiled(closure, arguments)
        plain = closure is None and not arguments and "grad_scale" not in self.__dict__
        if plain and self._middle.step():
            return None
        run = self._step if torch_state.frame_compiler() is None else self._step_uncompiled
        return run(closure, arguments)

    def _step(self, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
        if self._closed:
            return self.optimizer.step(closure, **arguments)
        if arguments:
            self._check_arguments(arguments)
        scaling = self._loss_scale.take("step", self.__dict__, self._window.counted)
        return self._loop.step(closure, scaling, arguments)

    _step_uncompiled = _disable_dynamo(_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: of the last update (counted; nothing in mid-window), or all (manual).

        With `set_to_none=False` zeros stay visible in `p.grad` where there was a gradient, and parameters
        without one in the next window are updated with zeros, as in stock.

        Raises:
            RuntimeError: counted loop: a backward has not been ended by `step()`; its gradients are in the
                sums and cannot be taken back (see `ignore` and `discard`).
        """
        if torch.compiler.is_compiling():
            self._zero_grad_uncompiled(set_to_none)
        elif not self._middle.zero_grad():
            run = self._zero_grad if torch_state.frame_compiler() is None else self._zero_grad_uncompiled
            run(set_to_none)

    def _zero_grad(self, set_to_none: bool) -> None:
        if self._closed:
            return self.optimizer.zero_grad(set_to_none)
        self._capture.drop_failed_backwards()
        self._accumulation.bring_back()
        return self._loop.zero_grad(set_to_none)

    _zero_grad_uncompiled = _disable_dynamo(_zero_grad)

    @contextlib.contextmanager
    def accumulate(
        self, model: torch.nn.Module | None = None, weight: float | Tensor | None = None
    ) -> Iterator[MicroBatch]:
        """Context around one micro-batch: its weight, and no gradient synchronisation before the last.

        Args:
            model: a DistributedDataParallel is as if it had been given as `data_parallel`, from the first use
                between two windows on. FSDP2's, or what else has `no_sync()`, is told not to synchronise
                gradients before the window's last micro-batch; with reduction "weighted", and in a manual
                loop, where the last is not known, it synchronises every time. With an attached pipeline
                schedule, any module stands for all stages.
            weight: tokens or samples in this micro-batch, for "weighted" and "normalized"; 0 adds nothing. A
                number, or a 0-dim tensor, which is not waited for where it is on a device. It may also be set
                later on the object that is yielded (see `MicroBatch.weight`).

        Raises:
            ValueError: a weight where the reduction takes none, or a negative or infinite one.
            TypeError: a weight that is no number.
            RuntimeError: contexts are nested.
        """
        window = self._window
        self._sync_param_groups()
        self._capture.registry.refresh()
        if self._accumulation.ranks.parallel is None:
            self._attach_if_parallel(model)
        micro = window.open(weight)
        micro.in_model_context = model is not None
        try:
            with self._loop.around(model, micro):
                yield micro
        finally:
            self._capture.drop_failed_backwards()
            window.in_context = False

    @contextlib.contextmanager
    def ignore(self) -> Iterator[None]:
        """Context: backward passes inside are left to PyTorch and do not count.

        For a generator's pass through a discriminator. Inside, `p.grad` holds the gradients of these passes
        alone; afterwards it holds again what it held before. If no parameter's `p.grad` held a gradient that
        counts, those of the passes inside stay there to be read, until the next backward pass that counts,
        an update, or `zero_grad()`, in mid-window too. A forward of a compiled model belongs inside as well.
        """
        self._sync_param_groups()
        self._capture.registry.refresh()
        self._capture.drop_failed_backwards()
        self._capture.hooks.stop_adding()
        try:
            with self._accumulation.ignored():
                yield
        finally:
            self._capture.drop_failed_backwards()
            # What is left would be added to, or be moved by a reducer and look like the user's.
            if self._capture.bypassed or torch_state.traces_backward() or torch_state.process_group_up():
                self._accumulators.grads.clear_ignored()

    @_disable_dynamo
    def flush(self, **arguments: Any) -> None:
        """Update from a part-filled window; a no-op if it is empty.

        "mean" divides by the micro-batches that the window holds. A backward that no `step()` has ended
        counts as a micro-batch. In a manual loop this is `step()` if any gradient has come since the last:
        what `no_sync()` has held back is reduced before. `arguments` are the inner `step`'s.

        Raises:
            TypeError, RuntimeError: as `step`.
        """
        if arguments:
            self._check_arguments(arguments)
        scaling = self._loss_scale.take("flush", self.__dict__, self._window.counted)
        self._capture.drop_failed_backwards()
        self._window.check_untainted()
        self._window.begin_step()
        if isinstance(self._loop, CountedLoop):
            self._loop.flush(scaling, arguments)
        elif not self._window.empty:
            self._accumulation.ranks.reduce_held_back()
            self.step(**arguments)

    @_disable_dynamo
    def discard(self) -> None:
        """Throw the window away: its sums, its count, and what is in `p.grad`."""
        self._capture.forget()
        self._accumulation.bring_back()
        if self._accumulation.ranks.parallel is not None:
            self._accumulation.ranks.parallel.abandon()
        self._parameter_set.sync_param_groups(self._capture, self._masters)
        self._parameter_set.forget_casts()
        self._accumulators.clear()
        self._window.reset()
        self._loss_scale.set_scaled(False)
        self._capture.registry.refresh()

    def _sync_param_groups(self) -> None:
        """Be in step with what users have done to groups and parameters."""
        if not self._closed:
            self._loop.sync_param_groups()

    def refresh_master_weights(self) -> None:
        """With `master_weights`: make every float32 master the value of its parameter, low bits and all.

        For weights that were loaded, or written where autograd does not see it (`param.data`). Without this
        call, a parameter that was written under `torch.no_grad()` gives its master the elements that differ
        from the master, rounded; the others keep what rounding has cut off. Sums, counters and the inner
        optimizer's state stay. Does nothing without `master_weights`, and after `close()`.
        """
        if self._masters is not None and not self._closed:
            self._capture.drop_failed_backwards()
            self._masters.refresh()

    def close(self) -> None:
        """Restore stock completely: no hooks, each module and each parameter's `grad_dtype` as it was.

        What is in `p.grad` stays there, in the parameter's dtype; a part-filled counted window is dropped.
        The inner optimizer goes on alone. Closing twice does nothing.
        """
        if self._closed:
            return
        self._capture.drop_failed_backwards()
        self._accumulation.bring_back()
        self._parameter_set.restore_modules()
        if self._accumulation.shards.sums is not None:
            self._accumulation.shards.sums.close()
        self._pipeline_steps.close()
        self._capture.close()
        if self._accumulation.ranks.parallel is not None:
            self._accumulation.ranks.parallel.close()
            self._accumulation.ranks.join(None)
        for slot in self._slots:
            self._accumulators.grads.forget(slot)
            slot.drop_buffer()
        self._closed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does; they join the window at hand.

        Raises:
            ValueError, TypeError: as torch and `__init__`; nothing is added then.
        """
        self.optimizer.add_param_group(param_group)
        self._parameter_set.add_last_group(self._capture)
        self._warn_of_unwritten(self.param_groups[-1:], 3)

    def _warn_of_unwritten(self, groups: list[dict[str, Any]], stacklevel: int) -> None:
        if self._masters is None:  # else torch's kernel runs on float32
            warn_of_unwritten(self.optimizer, groups, stacklevel)

    def explain(self) -> str:
        """A table: each parameter's path, backend, dtypes, bytes per micro-batch, and why; and the update."""
        self._sync_param_groups()
        self._capture.registry.refresh()
        update = self._inner_update.describe(self._masters is None, self._window.private)
        if self._masters is not None:
            update += "; on float32 masters, which one pass then rounds into the parameters"
        scheduled = self._pipeline_steps.hold_back
        attached = self._accumulation.attached
        return explain(self._slots, self._window, self._accumulators, update, scheduled, attached)

    # The inner optimizer: groups, state, defaults and whatever else the wrapper lacks are its own

    @property
    def optimizer(self) -> Optimizer:
        """The inner optimizer.

        Lightning's LearningRateMonitor takes whatever has this attribute for a pair of DeepSpeed's and looks
        the inner one up among the schedulers' optimizers, where only the outer one is: it would log each rate
        twice. It does not see the attribute.
        """
        if sys._getframe(1).f_globals.get("__name__") in _UNWRAPS or "optimizer" not in self.__dict__:
            raise AttributeError("optimizer")
        return self.__dict__["optimizer"]

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        self.__dict__["optimizer"] = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's, live."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's, live."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's, live."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def _check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise TypeError for what the inner optimizer's `step` does not take."""
        if not arguments:
            return
        try:
            signature = inspect.signature(self.optimizer.step)
        except ValueError:  # compiled, without one
            return
        try:
            signature.bind_partial(**arguments)
        except TypeError as error:
            raise TypeError(f"step() of the inner {type(self.optimizer).__name__}: {error}") from None

    def __getattr__(self, name: str) -> Any:
        # Hooks registered here, train() and eval() of schedule-free optimizers, and the like.
        if name == "optimizer" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    # How far the wrapper is, and what has become of its updates: readable at any time, without waiting

    @property
    def gradient_accumulation_steps(self) -> Schedule:
        """As it was given: an int, a callable of the number of updates, or None for the manual loop."""
        return self._window.schedule

    @property
    def reduction(self) -> str:
        """How a window's gradients become one: "mean", "sum", "weighted" or "normalized"."""
        return self._window.reduction.name

    @property
    def has_partial_window(self) -> bool:
        """Whether a backward has come since the window began: `flush()` would update."""
        return not self._window.empty

    @property
    def micro_step(self) -> int:
        """Micro-batches that have ended in this window (manual loop: those inside `accumulate()`)."""
        return self._window.micro_step

    @property
    def num_updates(self) -> int:
        """Updates attempted so far."""
        return self._window.num_updates

    @property
    def num_skipped(self) -> int | Tensor:
        """Updates among `num_updates` that were dropped: all weights were 0, or the gradient was not finite.

        A 0-dim int64 tensor on the device, once updates may have been dropped there.
        """
        dropped = self._inner_update.skipped
        return self._window.num_skipped if dropped is None else dropped + self._window.num_skipped

    def _count_skipped(self) -> None:
        """Bring the count of updates that the device has dropped to the host; waits for the device."""
        dropped, self._inner_update.skipped = self._inner_update.skipped, None
        if dropped is not None:
            self._window.count_skipped(int(dropped.item()))

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the last update's gradient before it was clipped: 0-dim, on the device.

        None before the first update, and where nothing (`max_grad_norm`, `skip_nonfinite`, a
        `fusedacc.amp.GradScaler` without `unscale_`) needed it.
        """
        return self._inner_update.grad_norm

    @property
    def has_updated(self) -> bool:
        """Whether the last `step()` or `flush()` attempted an update: when to step a scheduler."""
        return self._window.has_updated

    @property
    def will_update(self) -> bool:
        """Whether the next `step()` after a backward updates."""
        return self._window.will_update

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of memory that the sums take now, buffers kept for the next window included."""
        return self._accumulators.nbytes

    # Ranks: to which the wrapper is attached, and those that have fewer micro-batches

    def attach(self, data_parallel: Any) -> None:
        """Reduce over these ranks from now on, as `data_parallel=` says it; or follow a pipeline schedule.

        Nothing happens where the DistributedDataParallel is attached already; another one, or a process
        group, is given back as it was.

        After `attach(schedule)` one `schedule.step()` is one micro-batch. Its gradient is divided by the
        number of the schedule's own micro-batches if the schedule has `scale_grads=True`, and added once.
        Sums of 16-bit parameters are float32, and with `model=` weight gradients are added in place. The
        norm, clipping and `skip_nonfinite` are over all stages. Call it on every rank of the schedule.

        Args:
            data_parallel: a DistributedDataParallel, a module of which it is a child (one that is compiled,
                or that Fabric has set up), a process group, or a schedule of torch.distributed.pipelining.

        Raises:
            TypeError, ValueError: as `__init__`; nothing is changed then. For a schedule: none of the
                parameters is in its stages, a stage is a DistributedDataParallel, or the ranks' optimizers
                have different arguments.
            RuntimeError: the window is part-filled, the wrapper is closed, or attached to a schedule already.
        """
        window, accumulation, capture = self._window, self._accumulation, self._capture
        given, former = parallel_in(data_parallel) or data_parallel, accumulation.ranks.parallel
        if former is not None and former.serves(given):
            return
        if self._closed or not window.empty:
            state = "closed" if self._closed else f"in mid-window (micro_step is {window.micro_step})"
            raise RuntimeError(
                f"attach(): the optimizer is {state}, and what it has added so far would not be "
                "reduced; allowed: between windows, or discard() first, and not after close()"
            )
        if pipelines.is_schedule(given):
            self._sync_param_groups()
            self._pipeline_steps.attach(given, self._shared_settings())
            return
        check(given, self._slots, self._reduce_dtype)
        if former is not None:
            former.close()
            accumulation.ranks.join(None)
        self._parameter_set.forget_casts()  # weights may come from another rank
        parts = self._slots, self._accumulators, self._reduce_dtype, capture.add_pending
        accumulation.ranks.join(DataParallel(given, *parts, self._shared_settings()))
        capture.registry.count_deliveries(accumulation.count_delivery)
        self._parameter_set.choose_again(self._accumulators.passes)

    def _shared_settings(self) -> dict[str, object]:
        """The arguments that all ranks must share: they decide when ranks reduce, and what an update does.

        A callable schedule is compared with ints only, since two callables may return the same numbers.
        """
        schedule, settings = self._window.schedule, self._update_settings
        return {
            "gradient_accumulation_steps": "a callable" if callable(schedule) else schedule,
            "reduction": self._window.reduction.name,
            "max_grad_norm": settings.max_grad_norm,
            "norm_type": settings.norm_type,
            "skip_nonfinite": settings.skip_nonfinite,
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
        updates. Only in a counted loop does it know when there is one. What the last windows have left
        waits for a `flush()` on every rank, or for the next micro-batches.

        Args:
            after_update: called after each of them, as `Join([optimizer], after_update=scheduler.step)`: the
                ranks' learning rates must not part.
            others: of other objects in the same `Join`.

        Raises:
            RuntimeError: the wrapper is attached to no ranks, or the loop is manual.
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

    # Checkpoints, copies and pickles

    @_disable_dynamo
    def state_dict(self, include_partial: bool = True) -> dict[str, Any]:
        """The inner optimizer's state, and with `include_partial` a part-filled window's sums and counters.

        Without a part-filled window the result loads into the bare inner optimizer too. With `data_parallel`
        a part-filled window's sums are each rank's own row of DTensors: save on every rank, by
        torch.distributed.checkpoint or to a file for each. With FSDP2 and reduction="normalized" every rank
        calls this at once in mid-window: their weights are summed.

        Raises:
            RuntimeError: the window's sums are neither old nor new after an exception (see `discard`), a
                parameter's shape has changed in mid-window, or gradients that `accumulate(model)` has left
                unsynchronised.
        """
        self._capture.drop_failed_backwards()
        self._window.check_untainted()
        if include_partial:
            self._window.check_synchronised("state_dict(include_partial=True) would save one rank's part")
        self._sync_param_groups()
        self._count_skipped()
        parts = self._window, self._accumulators, self._masters
        return checkpoint.save(self.optimizer, *parts, include_partial, self._place)

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, from here or from the bare inner optimizer.

        Raises:
            ValueError, TypeError: the checkpoint does not fit; everything is left as it was, but for tensors
                that an inner optimizer's own `load_state_dict` has written in place before it raised. The
                state of such an optimizer is not checked.
        """
        self._capture.drop_failed_backwards()
        self._sync_param_groups()
        self._count_skipped()
        try:
            parts = self._window, self._accumulators, self._masters
            checkpoint.load(self.optimizer, *parts, state_dict, self._place)
            if self._accumulation.ranks.parallel is not None:
                self._accumulation.ranks.parallel.abandon()
        finally:
            self._parameter_set.forget_choices()
            self._parameter_set.forget_casts()
            self._capture.registry.reregister(self._slots if self._masters is not None else ())
            self._capture.registry.refresh()

    @property
    def _place(self) -> RankPlace:
        parallel = self._accumulation.ranks.parallel
        return RankPlace() if parallel is None else parallel.place

    def __getstate__(self) -> dict[str, Any]:
        self._capture.drop_failed_backwards()
        if self._place.count > 1 and not self._window.empty:
            raise RuntimeError(
                "a copy or a pickle of the optimizer has no data_parallel, and this window holds one rank's "
                "part of the sums; allowed: between windows, or state_dict()"
            )
        self._sync_param_groups()
        self._count_skipped()
        own = {name: value for name, value in self.__dict__.items() if name not in _REBUILT}
        own["_finishing"] = dataclasses.astuple(self._update_settings)  # so pickles have it
        return own | checkpoint.snapshot(self._window, self._accumulators, self._masters)

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = dict(state)
        kept = {name: own.pop(name, None) for name in checkpoint.SNAPSHOT}  # an older pickle lacks some
        window = Window(kept["schedule"], kept["reduction"], bool(kept["private"]))
        settings = own.pop("_accumulate_dtype"), kept["backend"], UpdateSettings(*own.pop("_finishing"))
        seed, masters = (kept["noise"] or {}).get("seed"), kept["masters"] is not None
        self._build(own.pop("optimizer"), window, *settings, masters, lenient=True, seed=seed)
        self.__dict__.update(own)
        checkpoint.restore_snapshot(kept, window, self._accumulators, self._masters)


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
        self._optimizer._join_config = AccumulatingOptimizer._join_config
        self._optimizer._loss_scale.check = None


#: What unpickling makes again. A scheduler's patch of step() belongs to the optimizer that it was made on.
_REBUILT = (
    "_window",
    "_parameter_set",
    "_slots",
    "_accumulators",
    "_inner_update",
    "_masters",
    "_accumulation",
    "_capture",
    "_pipeline_steps",
    "_update_settings",
    "_loop",
    "_middle",
    "_loss_scale",
    "_closed",
    "step",
)
