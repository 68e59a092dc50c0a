"""The drop-in wrapper, the class that users call. It builds the components and forwards calls to them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..accumulators import Accumulators
from ..autograd.capture import Capture
from ..distributed import DataParallel, RankPlace, check, parallel_in, pipelines
from ..kernels import registry, selftest, torch_state
from ..kernels.rounding import STOCHASTIC, checked_seed
from ..kernels.torch_private import JoinConfig, disable_dynamo
from ..nn import name_slots
from . import checkpoint
from .accumulation import Accumulation
from .explain import explain
from .loops import CountedLoop, ManualLoop
from .loss_scale import LossScaleLink
from .master_weights import MasterWeights
from .micro_batch import MicroBatch
from .parameters import ParameterSet
from .pipeline_steps import PipelineSteps
from .unsharded import UnshardedSums
from .update import Scaling, Update, UpdateSettings, warn_of_unwritten
from .window import Window
from .window_counts import Schedule

#: Modules that must not see `AccumulatingOptimizer.optimizer`. Lightning is installed under two names.
_UNWRAPS = frozenset(
    f"{package}.callbacks.lr_monitor" for package in ("lightning.pytorch", "pytorch_lightning")
)


class AccumulatingOptimizer(Optimizer, Joinable):
    """Wrap any torch optimizer, and accumulate gradients over micro-batches in fused passes.

    In a **counted loop** (`gradient_accumulation_steps=k`), write the training loop as without accumulation.
    Every k-th `step()` updates and the others return at once. Do not divide the loss by k.
    In a **manual loop** (None, the default), an existing accumulation loop runs unchanged: `step()` updates,
    `zero_grad()` clears, and `p.grad` is the accumulator.

    Args:
        optimizer: the inner optimizer. The wrapper shares its `param_groups`, `state` and `defaults`.
        gradient_accumulation_steps: micro-batches per update: an int >= 1, a callable that takes the number
            of updates so far and returns one, or None for the manual loop.
        reduction: "mean" (default when counted): the sum of the gradients divided by the number of
            micro-batches. "sum" (default when manual): their sum. "weighted": sum(w * g) / sum(w), for losses
            that are means over w tokens or samples. "normalized": sum(g) / sum(w), for losses that are sums
            over w.
        accumulate_dtype: dtype of the accumulators; None: float32 for 16-bit parameters, else their dtype.
        rounding: "nearest", or "stochastic" for bfloat16 accumulators (`accumulate_dtype=torch.bfloat16`),
            which take half the memory of float32. Stochastic rounding is right on average, while "nearest"
            loses every gradient below 1/256 of the accumulator. In a manual loop torch itself adds some
            gradients (create_graph=True, DDP that is not attached, FSDP2); these are rounded to nearest.
        seed: seed of stochastic rounding, 0 to 2**63 - 1; None: `torch.initial_seed()`, or 0 if a process
            group is initialised. Equal seeds give equal bits. `data_parallel` uses the first rank's seed; if
            other code averages gradients, give all ranks the same seed.
        max_grad_norm: clip the final gradient of each update to this norm; None: do not clip.
        norm_type: 2.0 or inf.
        skip_nonfinite: skip an update whose gradient contains inf or nan. This needs no synchronisation with
            the GPU if the inner optimizer is one of torch's with `fused=True`.
        master_weights: keep float32 copies of bfloat16 and float16 parameters. The inner optimizer updates
            the copies, with float32 state. Costs 4 bytes a parameter, and 4 more for each of its states.
        model: the model with these parameters. Its Linear and Embedding modules then add the gradients of
            their weights to the accumulators inside their backward, and write no gradient, unless sums are
            rounded stochastically. A copy of the model or of the optimizer does so only after it is wrapped
            itself.
        keep_casts: under autocast, the Linear modules and convolutions of `model` cast their weights once a
            window and keep the casts until its update. This moves 6 bytes a parameter once a window instead
            of once a micro-batch. Only a sample of elements is checked for writes through `param.data`.
        backend: "auto", "cuda", "triton", "cpu" or "eager". The environment variable FUSEDACC_BACKEND
            overrides "auto".
        data_parallel: the DistributedDataParallel of the model, or a process group. Accumulators are reduced
            over its ranks once a window, inside the last backward pass. "sum" is the mean over ranks of their
            sums; the other reductions are over the micro-batches of all ranks. With a process group, every
            rank gets the parameters of its first rank.
        reduce_dtype: dtype of the all-reduce; None: the accumulators' dtype, or float32 with stochastic
            rounding. bfloat16 sends half the bytes of float32, and adds in bfloat16, rounded to nearest.
        main_grad: whether each trained parameter gets an attribute `main_grad`, which is its accumulator.
            Modules of Megatron-Core, TransformerEngine and others then add their weight gradients to it
            inside their backward. The accumulators live as long as the wrapper, and hold zeros when a window
            begins. After `step()` in a counted loop, `p.grad` is None.

    Raises:
        TypeError: `optimizer` is not a `torch.optim.Optimizer`, or an argument has the wrong type.
        ValueError: an argument or FUSEDACC_SELFTEST has a value that is not allowed. A parameter is in
            another live wrapper, or has no shape yet (lazy modules before their first forward pass).
            `optimizer` is L-BFGS in a counted loop, which evaluates its closure many times per step, or
            updates inside the backward pass (optimi's `gradient_release`). With `main_grad=True`: the
            reduction is "weighted", rounding is "stochastic", or a parameter is a DTensor, has a
            `main_grad` already, or has `overwrite_main_grad` set.
        RuntimeError: the requested backend is unavailable or has failed its self-test.
    """

    __module__ = "fusedacc.optimizer"  # the module that pickles name
    #: torch's GradScaler passes its scale and `found_inf` to `step`, which applies both.
    _step_supports_amp_scaling = True
    _join_config: Any = JoinConfig.construct_disabled_join_config()

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
        data_parallel: DistributedDataParallel | torch.distributed.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
        main_grad: bool = False,
    ) -> None:
        _check_inner_optimizer(optimizer)
        window = Window(gradient_accumulation_steps, reduction, adds_unscaled=bool(main_grad))
        if window.counted and isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"gradient_accumulation_steps={gradient_accumulation_steps!r} cannot count micro-batches of "
                "L-BFGS, which evaluates its closure many times per step; allowed: None (the manual loop)"
            )
        registry.requested(backend)  # raises for an unknown name
        seed = _seed_of_rounding(rounding, seed, accumulate_dtype)
        selftest.is_off()  # raises for a wrong FUSEDACC_SELFTEST
        update_settings = UpdateSettings.checked(max_grad_norm, norm_type, bool(skip_nonfinite))
        _check_model(model, keep_casts)
        _check_main_grad(window, rounding)
        self._build(
            optimizer,
            window,
            accumulate_dtype,
            backend,
            update_settings,
            master_weights=bool(master_weights),
            model=model,
            seed=seed,
        )
        checkpoint.forget_stale(optimizer)
        if model is not None:
            self._accumulate_in_modules(model, backend, bool(keep_casts))
        self._reduce_dtype = reduce_dtype
        if data_parallel is not None:
            self._attach_or_close(data_parallel)

    def _build(
        self,
        optimizer: Optimizer,
        window: Window,
        accumulate_dtype: torch.dtype | None,
        backend: str,
        update_settings: UpdateSettings,
        *,
        master_weights: bool,
        model: torch.nn.Module | None = None,
        lenient: bool = False,
        seed: int | None = None,
    ) -> None:
        """Create the components, for `__init__` and for unpickling.

        lenient: whether a parameter may have been cast after it was first accepted. The other arguments are
        those of `__init__`, checked.
        """
        of_subclass = set(self.__dict__)
        self.optimizer = optimizer
        self._accumulate_dtype = accumulate_dtype
        self._main_grad = window.adds_unscaled
        self._window = window
        self._closed = False
        self._thread = threading.get_ident()

        # The parameters and their accumulators.
        self._parameter_set = ParameterSet(optimizer, accumulate_dtype, backend, model, lenient=lenient)
        self._slots = self._parameter_set.slots
        if model is not None:
            name_slots(model, self._slots)
        self._accumulators = Accumulators(
            self._slots, not window.counted, backend, seed, main_grad=window.adds_unscaled
        )
        self._masters = MasterWeights(self._slots, optimizer, backend) if master_weights else None
        if self._masters is None:  # else torch's kernel runs on float32
            warn_of_unwritten(optimizer, optimizer.param_groups, 4)

        # Backward passes: the window's rules, and the hooks that ask for them.
        self._accumulation = Accumulation(self._slots, window, self._accumulators)
        self._capture = Capture(self._slots, self._accumulators, self._accumulation)
        self._engine = self._capture.engine
        self._engine.set_slots(self._slots)
        self._parameter_set.offer_sinks(self._capture)

        self._accumulation.updates_plainly = self._masters is None and seed is None

        # Updates, and the loop that begins them.
        self._inner_update = Update(
            optimizer,
            self._accumulators,
            window,
            self._capture.registry,
            self._masters,
            update_settings,
        )
        self._pipeline_steps = PipelineSteps(self._accumulation, self._capture, self._inner_update)
        kind_of_loop: type[CountedLoop | ManualLoop] = CountedLoop if window.counted else ManualLoop
        self._loop = kind_of_loop(
            optimizer,
            self._parameter_set,
            self._capture,
            self._accumulation,
            self._inner_update,
            self._masters,
            self._pipeline_steps,
        )
        self._loss_scale = LossScaleLink(self._loop)

        #: What unpickling builds again, and a scheduler's patch of `step()`, which must not be copied.
        saved = {"optimizer", "_accumulate_dtype", "_main_grad", *of_subclass}
        self._rebuilt = {"_rebuilt", "step", *self.__dict__} - saved

    def _accumulate_in_modules(self, model: torch.nn.Module, backend: str, keep_casts: bool) -> None:
        """Replace the forwards of the model's modules, so that they add the gradients of their weights."""
        self._parameter_set.replace_in(model, self._capture, keep_casts)
        self._accumulation.updates_plainly = self._accumulation.updates_plainly and not keep_casts
        # FSDP2 has other parameters in a backward pass than the optimizer.
        window = weakref.ref(self._window)
        self._accumulation.shards.make_sums = partial(UnshardedSums, model, window, backend)

    def _attach_or_close(self, data_parallel: Any) -> None:
        """Attach the ranks. If that fails, restore PyTorch, because the caller gets no wrapper to close."""
        try:
            self.attach(data_parallel)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        steps = self._window.schedule
        loop = "manual" if steps is None else f"gradient_accumulation_steps={steps}"
        return f"{type(self).__name__}({loop}, reduction={self.reduction!r})\n{self.optimizer!r}"

    # The loop

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """End a micro-batch and update if it was the window's last (counted loop), or update (manual loop).

        A `step()` without a backward pass since the last one does not count.

        Args:
            closure: computes the loss, with gradients enabled. A counted loop calls it once; in a manual loop
                the inner optimizer calls it, possibly several times.
            arguments: arguments of the inner optimizer's `step`, such as SophiaH's `hessian`. Only calls that
                update pass them on; other calls drop them.

        Returns:
            The result of the closure; None without one.

        Raises:
            TypeError: the inner optimizer's `step` does not take this argument. Nothing is counted.
            RuntimeError: a weight is missing, or the inner optimizer's state has a parameter's old shape:
                nothing has changed, so correct it and call again. Or an exception has left partly updated
                accumulators, or a parameter's shape changed between micro-batches: see `discard`. Or a
                GradScaler has scaled the losses, and its own `step()` was not called.
        """
        if is_dynamo_compiling():
            return self._step_uncompiled(closure, arguments)
        plain = closure is None and not arguments and "grad_scale" not in self.__dict__
        # The engine runs a `step()` that only counts.
        if plain and self._engine.step(self._loop.inner.param_groups, self._parameter_set.seen):
            return None
        if torch_state.frame_compiler() is not None:
            return self._step_uncompiled(closure, arguments)
        if plain and not torch.is_inference_mode_enabled() and self._loop.end_plainly():
            return None
        return self._step(closure, arguments)

    def _step(self, closure: Callable[[], Any] | None, arguments: dict[str, Any]) -> Any:
        if self._closed:
            return self.optimizer.step(closure, **arguments)
        self._check_arguments(arguments)
        scaling = self._loss_scale.take("step", self.__dict__)
        with torch_state.outside_inference_mode():
            return self._loop.step(closure, scaling, arguments)

    _step_uncompiled = disable_dynamo(_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients (manual loop), or those of the last update (counted loop).

        In a counted loop it does nothing between the micro-batches of a window. Where it clears, it also
        calls the inner optimizer's `zero_grad` if its class overrides torch's.

        Args:
            set_to_none: False leaves zeros in `p.grad` where there was a gradient. As in torch, a parameter
                without a gradient in the next window is then updated with zeros.

        Raises:
            RuntimeError: counted loop: a backward pass was not followed by `step()`. Its gradients are in the
                accumulators and cannot be removed (see `ignore` and `discard`).
        """
        if is_dynamo_compiling():
            self._zero_grad_uncompiled(set_to_none)
        elif not (self._engine.has_nothing_to_clear() or (set_to_none and self._loop.clear_used())):
            run = self._zero_grad if torch_state.frame_compiler() is None else self._zero_grad_uncompiled
            run(set_to_none)

    def _zero_grad(self, set_to_none: bool) -> None:
        if self._closed:
            return self.optimizer.zero_grad(set_to_none)
        self._capture.drop_failed_backwards()
        self._accumulators.grads.bring_back()
        return self._loop.zero_grad(set_to_none)

    _zero_grad_uncompiled = disable_dynamo(_zero_grad)

    @contextlib.contextmanager
    def accumulate(
        self,
        model: torch.nn.Module | None = None,
        weight: float | Tensor | None = None,
        defer: str = "all",
    ) -> Iterator[MicroBatch]:
        """Context around one micro-batch: set its weight, and synchronise gradients only in the last one.

        Args:
            model: a DistributedDataParallel is attached as by `data_parallel=`, at the first use between two
                windows. A model of FSDP2, or any other with `no_sync()`, synchronises gradients only in the
                window's last micro-batch. It synchronises in every micro-batch in a manual loop. So does a
                model of FSDP1, and a model with `no_sync()`, but not one of FSDP2, if the reduction takes
                weights. With an attached pipeline schedule, pass any module: it applies to all stages.
            weight: tokens or samples in this micro-batch, for "weighted" and "normalized"; 0 adds nothing. A
                number or a 0-dim tensor; a tensor on a GPU causes no synchronisation. You can also set it
                later on the yielded object (see `MicroBatch.weight`).
            defer: which part of the model's synchronisation waits for the window's last micro-batch. "all":
                nothing is sent before it. "all_reduce", for FSDP2 on a mesh of two dimensions (replicas and
                shards) in a counted loop: gradients are reduce-scattered inside each replica in every
                micro-batch, and their sums are all-reduced over the replicas in the last one. These sums are
                of shards, in float32, or in FSDP2's `reduce_dtype` if that has more bits. "none": gradients
                are synchronised in every micro-batch. You may change it between micro-batches.

        Raises:
            ValueError: the reduction takes no weights, or the weight is negative or not finite, or 0 with
                `main_grad=True`. `defer` is none of these values. It is "all_reduce" without FSDP2 on a mesh
                of two dimensions, in a manual loop, or with a pipeline schedule. It is "none" with a
                DistributedDataParallel, or with a process group of `data_parallel=`. Nothing has changed.
            TypeError: the weight is not a number.
            RuntimeError: contexts are nested.
        """
        window = self._window
        self._loop.check_defer(defer, model)
        self._sync_param_groups(refresh=True)
        if self._parallel is None and window.empty and not self._closed:
            parallel = parallel_in(model)
            if parallel is not None:
                self.attach(parallel)
        micro = window.open(weight)
        micro.defer = "none" if model is None else defer
        try:
            with self._loop.around(model, micro):
                yield micro
        finally:
            self._capture.drop_failed_backwards()
            window.in_context = False

    @contextlib.contextmanager
    def ignore(self) -> Iterator[None]:
        """Context: leave backward passes inside to PyTorch, and do not count them.

        Use it for a generator's pass through a discriminator, for example. Inside, `p.grad` holds only the
        gradients of these passes. Afterwards it holds its former value again. If no `p.grad` held a gradient
        that counts, the new gradients stay readable until the next counted backward pass, an update or
        `zero_grad()`. Put the forward pass of a compiled model inside as well.
        """
        self._sync_param_groups(refresh=True)
        self._capture.drop_failed_backwards()
        self._capture.pause()
        try:
            with self._accumulation.ignored():
                yield
        finally:
            self._capture.drop_failed_backwards()
            # Else autograd adds to these gradients, or a reducer moves them and they look like the user's.
            if self._capture.bypassed or torch_state.traces_backward() or torch_state.process_group_up():
                self._accumulators.grads.clear_ignored()

    @disable_dynamo
    def flush(self, **arguments: Any) -> None:
        """Update from a partly filled window, or do nothing if it is empty.

        "mean" divides by the number of micro-batches in the window. A backward pass without a `step()` counts
        as a micro-batch. In a manual loop this is `step()` if there is a gradient since the last one;
        gradients inside `no_sync()` are reduced first.

        Args:
            arguments: arguments of the inner optimizer's `step`.

        Raises:
            TypeError, RuntimeError: as `step`.
        """
        self._check_arguments(arguments)
        scaling = self._loss_scale.take("flush", self.__dict__)
        self._capture.drop_failed_backwards()
        self._window.check_untainted()
        self._window.has_updated = False
        if isinstance(self._loop, CountedLoop):
            with torch_state.outside_inference_mode():
                self._loop.flush(scaling, arguments)
        elif not self._window.empty:
            self._accumulation.ranks.reduce_held_back()
            self.step(**arguments)

    @disable_dynamo
    def discard(self) -> None:
        """Discard the window: its accumulators, its counters and `p.grad`, and what an inner
        `zero_grad` that overrides torch's clears.
        """
        self._capture.forget()
        self._accumulators.grads.bring_back()
        if self._parallel is not None:
            self._parallel.abandon()
        self._parameter_set.sync_param_groups(self._capture, self._masters)
        self._parameter_set.forget_casts()
        self._loop.clear_inner(set_to_none=True)
        self._accumulators.clear()
        self._window.reset()
        self._loss_scale.set_scaled(False)
        self._capture.registry.refresh()

    def _sync_param_groups(self, refresh: bool = False) -> None:
        """Pick up the user's changes to parameter groups and parameters."""
        if not self._closed:
            self._loop.sync_param_groups()
        if refresh:
            self._capture.registry.refresh()

    def refresh_master_weights(self) -> None:
        """Copy the parameters into the float32 master weights.

        Call it after you load weights or write to `param.data`. Without this call, a write under
        `torch.no_grad()` changes only the elements of the master weight whose rounded value differs from the
        parameter. The other elements keep their low bits. Accumulators, counters and the inner optimizer's
        state are unchanged. Does nothing without `master_weights`, and after `close()`.
        """
        if self._masters is not None and not self._closed:
            self._capture.drop_failed_backwards()
            self._masters.refresh()

    def close(self) -> None:
        """Remove all hooks, and restore each module and each parameter's `grad_dtype`.

        `p.grad` keeps its gradient, in the parameter's `grad_dtype`. A partly filled window of a counted loop
        is dropped. The inner optimizer keeps working on its own. Closing twice does nothing.
        """
        if self._closed:
            return
        self._capture.drop_failed_backwards()
        self._accumulators.grads.bring_back()
        self._parameter_set.restore_modules()
        if self._accumulation.shards.sums is not None:
            self._accumulation.shards.sums.close()
        self._pipeline_steps.close()
        self._accumulation.close()
        with torch_state.outside_inference_mode():
            self._capture.close()
        if self._parallel is not None:
            self._parallel.close()
            self._accumulation.ranks.join(None)
        for slot in self._slots:
            self._accumulators.grads.forget(slot)
            slot.drop_buffer()
        self._closed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in torch. They join the current window.

        Raises:
            ValueError, TypeError: as in torch and `__init__`. Nothing is added.
        """
        self.optimizer.add_param_group(param_group)
        self._parameter_set.add_last_group(self._capture)
        if self._masters is None:
            warn_of_unwritten(self.optimizer, self.param_groups[-1:], 3)

    def explain(self) -> str:
        """Return a table of each parameter's path, backend, dtypes and bytes, the reasons, and the update.

        Another thread than the one that made the wrapper gets the state of the last `step()` or
        `zero_grad()`.
        """
        if threading.get_ident() == self._thread:
            self._sync_param_groups(refresh=True)
        update = self._inner_update.describe(self._masters is None)
        if self._masters is not None:
            update += "; on float32 masters, then rounded into the parameters in one pass"
        return explain(
            self._slots,
            self._window,
            self._accumulators,
            update,
            scheduled=self._pipeline_steps.hold_back,
            attached=self._accumulation.attached,
            why_schedule_leaves=self._pipeline_steps.why_left,
        )

    # The inner optimizer's attributes

    @property
    def optimizer(self) -> Optimizer:
        """Return the inner optimizer.

        The attribute is hidden from Lightning's LearningRateMonitor. That class takes any object with this
        attribute for a DeepSpeed wrapper and looks for the inner optimizer among the schedulers' optimizers.
        The schedulers refer to the wrapper, so it would log each rate twice.
        """
        if sys._getframe(1).f_globals.get("__name__") in _UNWRAPS or "optimizer" not in self.__dict__:
            raise AttributeError("optimizer")
        return self.__dict__["optimizer"]

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        self.__dict__["optimizer"] = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the inner optimizer's own `param_groups`, not a copy."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """Return the inner optimizer's own `state`, not a copy."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the inner optimizer's own `defaults`, not a copy."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def _check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise TypeError if the inner optimizer's `step` does not take these arguments."""
        if not arguments:
            return
        try:
            signature = inspect.signature(self.optimizer.step)
        except ValueError:  # a compiled function without a signature
            return
        try:
            signature.bind_partial(**arguments)
        except TypeError as error:
            raise TypeError(f"step() of the inner {type(self.optimizer).__name__}: {error}") from None

    def __getattr__(self, name: str) -> Any:
        # For example train() and eval() of schedule-free optimizers.
        if name == "optimizer" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    # Progress of the window and of updates: readable at any time and from any thread, without synchronising
    # with a GPU

    @property
    def gradient_accumulation_steps(self) -> Schedule:
        """Return the argument of `__init__`: an int, a callable, or None for the manual loop."""
        return self._window.schedule

    @property
    def reduction(self) -> str:
        """Return the reduction: "mean", "sum", "weighted" or "normalized"."""
        return self._window.reduction.name

    @property
    def has_partial_window(self) -> bool:
        """Whether a backward pass has run in this window, so that `flush()` would update."""
        return not self._window.empty

    @property
    def micro_step(self) -> int:
        """Return how many micro-batches of this window have ended (manual loop: inside `accumulate()`)."""
        return self._window.micro_step

    @property
    def num_updates(self) -> int:
        """Return how many updates were attempted so far."""
        return self._window.num_updates

    @property
    def num_skipped(self) -> int | Tensor:
        """Return how many of `num_updates` were skipped: all weights were 0, or a gradient was not finite.

        A 0-dim int64 tensor on the GPU, once updates may have been skipped there.
        """
        on_device = self._inner_update.skipped
        return self._window.num_skipped if on_device is None else on_device + self._window.num_skipped

    def _count_skipped(self) -> None:
        """Copy the number of updates that were skipped on a GPU to the host. Synchronises with the GPU."""
        on_device = self._inner_update.skipped
        self._inner_update.skipped = None
        if on_device is not None:
            self._window.num_skipped += int(on_device.item())

    @property
    def grad_norm(self) -> Tensor | None:
        """Return the norm of the last update's gradient before clipping: 0-dim, on the gradients' device.

        None before the first update, and if nothing needs the norm: `max_grad_norm`, `skip_nonfinite` or a
        `fusedacc.amp.GradScaler` without `unscale_`.
        """
        return self._inner_update.grad_norm

    @property
    def has_updated(self) -> bool:
        """Whether the last `step()` or `flush()` attempted an update. If so, step the scheduler."""
        return self._window.has_updated

    @property
    def will_update(self) -> bool:
        """Whether the next `step()` after a backward pass updates."""
        return self._window.will_update

    @property
    def accumulator_bytes(self) -> int:
        """Return the bytes of all accumulators, and of the buckets that `data_parallel=` reduces.

        An accumulator in `p.grad` counts until `zero_grad()`, the next window or `discard()`, also if you
        have removed it from `p.grad` before. Gradients that only autograd has added up in `p.grad` of a
        manual loop do not count.
        """
        return self._accumulators.nbytes

    # Ranks

    def attach(self, data_parallel: Any) -> None:
        """Reduce over these ranks from now on, as with `data_parallel=`, or attach to a pipeline schedule.

        Attaching the same DistributedDataParallel again does nothing. Another one replaces it, and the former
        one is restored.

        After `attach(schedule)`, one `schedule.step()` is one micro-batch. If the schedule has
        `scale_grads=True`, its gradient is divided by the number of the schedule's own micro-batches.
        Accumulators of 16-bit parameters are float32, and `model=` adds weight gradients in place. The norm,
        clipping and `skip_nonfinite` are over all stages. Call it on every rank of the schedule.

        Args:
            data_parallel: a DistributedDataParallel, a module that contains it (a compiled one, or Fabric's),
                a process group, or a schedule of torch.distributed.pipelining.

        Raises:
            TypeError, ValueError: as `__init__`; nothing is changed. For a schedule: none of the parameters
                is in its stages, a stage is a DistributedDataParallel that no optimizer was given as
                `data_parallel=`, or the ranks' optimizers have different arguments.
            RuntimeError: the window is partly filled, or the wrapper is closed or attached to a schedule.
        """
        window = self._window
        accumulation = self._accumulation
        capture = self._capture
        given = parallel_in(data_parallel) or data_parallel
        former = self._parallel
        if former is not None and former.serves(given):
            return
        if self._closed or not window.empty:
            state = "closed" if self._closed else f"in mid-window (micro_step is {window.micro_step})"
            raise RuntimeError(
                f"attach(): the optimizer is {state}, and gradients added so far would not be reduced; "
                "allowed: between windows, or discard() first, and not after close()"
            )
        if pipelines.is_schedule(given):
            if self._main_grad:
                raise ValueError(
                    "attach(): a pipeline schedule divides gradients as they are added, which modules that "
                    "add to main_grad do not do; allowed: main_grad=False"
                )
            self._sync_param_groups()
            self._pipeline_steps.attach(given, self._shared_settings())
            return
        check(given, self._slots, self._reduce_dtype)
        if former is not None:
            former.close()
            accumulation.ranks.join(None)
        self._parameter_set.forget_casts()  # weights may come from another rank
        parallel = DataParallel(
            given,
            self._slots,
            self._accumulators,
            self._reduce_dtype,
            capture.add_pending,
            self._shared_settings(),
        )
        accumulation.ranks.join(parallel)
        capture.registry.count_deliveries(accumulation.count_delivery)
        self._parameter_set.choose_again(self._capture)

    def _shared_settings(self) -> dict[str, object]:
        """Return the arguments that must be equal on all ranks: they decide when ranks reduce and update.

        Callables count as equal, because two different ones may return the same numbers.
        """
        schedule = self._window.schedule
        return {
            "gradient_accumulation_steps": "a callable" if callable(schedule) else schedule,
            "reduction": self.reduction,
            **dataclasses.asdict(self._inner_update.settings),
            "master_weights": self._masters is not None,
        }

    @property
    def _parallel(self) -> DataParallel | None:
        return self._accumulation.ranks.parallel

    @property
    def _takes_part(self) -> bool:
        """Whether `flush()` joins the other ranks' windows even if this rank's window is empty."""
        return self._window.counted and self._parallel is not None

    # torch.distributed.algorithms.Join

    def join_hook(self, after_update: Callable[[], Any] | None = None, **others: Any) -> JoinHook:
        """Return the hook with which a rank without more micro-batches takes part in `Join([optimizer])`.

        The rank joins the reductions and updates of the other ranks, and contributes its own partly filled
        window. This needs a counted loop. A window that is still partly filled at the end waits for a
        `flush()` on every rank, or for the next micro-batches.

        Args:
            after_update: called after each update. Use `Join([optimizer], after_update=scheduler.step)` to
                keep the ranks' learning rates equal.
            others: arguments for other objects in the same `Join`; ignored.

        Raises:
            RuntimeError: no ranks are attached, or the loop is manual.
        """
        parallel = self._parallel
        if parallel is None:
            raise RuntimeError(
                "Join([optimizer]) needs attached ranks: make the optimizer with data_parallel=, or call "
                "optimizer.attach(ddp) before"
            )
        if not self._window.counted:
            raise RuntimeError(
                "Join([optimizer]) needs a counted loop (gradient_accumulation_steps=k); in a manual one a "
                "rank without micro-batches cannot know when the others update"
            )
        parallel.reducer.announce = partial(Join.notify_join_context, self)
        self._loss_scale.check = self._check_unscaled
        return _JoinedRank(self, after_update)

    def _check_unscaled(self) -> None:
        if self._join_config.enable:
            raise RuntimeError(
                "a GradScaler inside Join([optimizer]): a rank without micro-batches does not know its "
                "scale; allowed: scaler.flush(optimizer) on every rank after its last micro-batch"
            )

    @property
    def join_device(self) -> torch.device:
        """Return the device of `Join`'s collectives."""
        return self._slots[0].param.device if self._slots else torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """Return the process group of `Join`'s collectives."""
        return None if self._parallel is None else self._parallel.reducer.group

    # Checkpoints, copies and pickles

    @disable_dynamo
    def state_dict(self, include_partial: bool = True) -> dict[str, Any]:
        """Return the inner optimizer's state, and the window's accumulators and counters.

        Without a partly filled window the result loads into the inner optimizer too. With `data_parallel`,
        the accumulators of a partly filled window are rows of DTensors, one for each rank. Save them on every
        rank, with torch.distributed.checkpoint or to one file a rank. With FSDP2 and reduction="normalized",
        call it on every rank between micro-batches, because it sums their weights.

        Args:
            include_partial: whether to save a partly filled window.

        Raises:
            RuntimeError: an exception has left partly updated accumulators (see `discard`), a parameter's
                shape changed between micro-batches, or `accumulate(model)` has left gradients unsynchronised.
        """
        self._capture.drop_failed_backwards()
        self._window.check_untainted()
        if include_partial:
            self._window.check_synchronised("state_dict(include_partial=True) would save one rank's part")
        self._sync_param_groups()
        self._count_skipped()
        return checkpoint.save(
            self.optimizer,
            self._window,
            self._accumulators,
            self._masters,
            self._place,
            include_partial=include_partial,
        )

    @disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, of a wrapper or of the inner optimizer alone.

        Raises:
            ValueError, TypeError: the checkpoint does not fit. Nothing is changed, except tensors that an
                inner optimizer with its own `load_state_dict` has written before it raised. The state of such
                an optimizer is not checked.
        """
        self._capture.drop_failed_backwards()
        self._capture.pause()  # the window may have another number of micro-batches afterwards
        self._sync_param_groups()
        self._count_skipped()
        try:
            with torch_state.outside_inference_mode():
                checkpoint.load(
                    self.optimizer,
                    self._window,
                    self._accumulators,
                    self._masters,
                    self._place,
                    state_dict,
                )
            if self._parallel is not None:
                self._parallel.abandon()
        finally:
            self._parameter_set.forget_casts()
            self._capture.registry.reregister(self._slots if self._masters is not None else ())
            self._capture.registry.refresh()

    @property
    def _place(self) -> RankPlace:
        return RankPlace() if self._parallel is None else self._parallel.place

    def __getstate__(self) -> dict[str, Any]:
        self._capture.drop_failed_backwards()
        if self._place.count > 1 and not self._window.empty:
            raise RuntimeError(
                "a copy or a pickle of the optimizer has no data_parallel, and this window's sums are only "
                "one rank's part; allowed: between windows, or state_dict()"
            )
        self._sync_param_groups()
        self._count_skipped()
        state = {name: value for name, value in self.__dict__.items() if name not in self._rebuilt}
        state["_update_settings"] = self._inner_update.settings
        state["_snapshot"] = checkpoint.Snapshot.take(self._window, self._accumulators, self._masters)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        attributes = dict(state)
        snapshot: checkpoint.Snapshot = attributes.pop("_snapshot")
        main_grad = attributes.pop("_main_grad")
        window = Window(snapshot.schedule, snapshot.reduction, adds_unscaled=main_grad)
        self._build(
            attributes.pop("optimizer"),
            window,
            attributes.pop("_accumulate_dtype"),
            snapshot.backend,
            attributes.pop("_update_settings"),
            master_weights=snapshot.masters is not None,
            lenient=True,
            seed=None if snapshot.noise is None else snapshot.noise["seed"],
        )
        self.__dict__.update(attributes)
        snapshot.restore(window, self._accumulators, self._masters)


class _JoinedRank(JoinHook):
    """A rank without more micro-batches, which takes part in the windows of the others."""

    def __init__(self, optimizer: Any, after_update: Callable[[], Any] | None) -> None:
        self._optimizer = optimizer
        self._after_update = after_update

    def _stop_announcing(self) -> None:
        """Stop announcing this rank's reductions, because the rank has no more micro-batches."""
        parallel = self._optimizer._parallel
        if parallel is not None:
            parallel.reducer.announce = None

    def main_hook(self) -> None:
        self._stop_announcing()
        optimizer = self._optimizer
        optimizer._capture.drop_failed_backwards()
        optimizer._window.check_untainted()
        optimizer._window.has_updated = False
        optimizer._loop.flush(Scaling(), {}, until_all=False)
        if optimizer.has_updated and self._after_update is not None:
            optimizer._opt_called = True  # torch's schedulers check it
            self._after_update()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._stop_announcing()
        self._optimizer._join_config = AccumulatingOptimizer._join_config
        self._optimizer._loss_scale.check = None


def _check_inner_optimizer(optimizer: Any) -> None:
    """Raise TypeError or ValueError unless gradients can accumulate for this optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, AccumulatingOptimizer):
        raise TypeError("optimizer is an AccumulatingOptimizer already; wrap the inner optimizer once")
    if optimizer.defaults.get("gradient_release"):  # optimi's
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}(gradient_release=True), which updates inside every "
            "backward, so gradients cannot accumulate; allowed: gradient_release=False"
        )


def _seed_of_rounding(rounding: Any, seed: Any, accumulate_dtype: Any) -> int | None:
    """Return the seed of stochastic rounding, or None for "nearest". Raises as `AccumulatingOptimizer`."""
    if seed is None and rounding == STOCHASTIC and torch_state.process_group_up():
        # Ranks with the same gradients must round alike, and torch's seed may differ between ranks.
        seed = 0
    checked = checked_seed(rounding, seed)
    if checked is not None and accumulate_dtype is not torch.bfloat16:
        raise ValueError(
            f"rounding={rounding!r} is for sums of torch.bfloat16, and accumulate_dtype is "
            f"{accumulate_dtype}; allowed: accumulate_dtype=torch.bfloat16, or rounding='nearest'"
        )
    return checked


def _check_main_grad(window: Window, rounding: str) -> None:
    """Raise ValueError if modules cannot add to the sums of this window by themselves."""
    if not window.adds_unscaled:
        return
    if window.reduction.scales_by_weight:
        raise ValueError(
            f"main_grad=True does not go with reduction={window.reduction.name!r}, whose weights multiply "
            "gradients as they are added, because modules add to main_grad without them; allowed: "
            "reduction='normalized' with losses that are sums, 'mean' or 'sum'"
        )
    if rounding == STOCHASTIC:
        raise ValueError(
            f"main_grad=True does not go with rounding={rounding!r}, because modules round to nearest when "
            "they add to main_grad; allowed: rounding='nearest'"
        )


def _check_model(model: Any, keep_casts: bool) -> None:
    """Raise TypeError unless `model` is a module or None, and ValueError if `keep_casts` lacks one."""
    if not isinstance(model, torch.nn.Module | None):
        raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
    if keep_casts and model is None:
        raise ValueError(
            "keep_casts=True needs model=, because the model's modules keep the casts of their weights; "
            "allowed: keep_casts=False, or model=model"
        )
