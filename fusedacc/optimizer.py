"""The drop-in wrapper: what users call. It commands the window and the capture, and does no arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from . import backends, checkpoint, observers
from .arena import Arena
from .capture import Capture
from .checks import PAIRS, allowed_pairs
from .explain import explain
from .masters import Masters
from .slot import Slot, default_accumulate_dtype
from .update import Scaling, Update, check_settings
from .window import MicroBatch, Schedule, Window, fresh_window


class AccumulatingOptimizer(Optimizer):
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
        max_grad_norm: clip the final gradient of each update to this norm; None: do not.
        norm_type: 2.0 or inf.
        skip_nonfinite: drop an update whose gradient holds inf or nan; without waiting for the device where
            the inner optimizer is one of torch's with `fused=True`.
        master_weights: keep float32 copies of bfloat16 and float16 parameters, on which the inner optimizer
            runs; its state is float32 then. 4 bytes a parameter more, and 4 more for each of its states.
        backend: "auto", "cuda", "triton", "cpu" or "eager". The environment variable FUSEDACC_BACKEND
            overrides "auto".

    Raises:
        TypeError: `optimizer` is no `torch.optim.Optimizer`, or an argument is of the wrong kind.
        ValueError: an argument has a value that is not allowed, a parameter is in another live wrapper, or an
            L-BFGS is to be counted (it evaluates its closure many times per step).
        RuntimeError: the backend asked for cannot run here.
    """

    #: torch's GradScaler hands over its scale and what it has found, and `step` honours both.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        gradient_accumulation_steps: Schedule = None,
        *,
        reduction: str | None = None,
        accumulate_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        skip_nonfinite: bool = False,
        master_weights: bool = False,
        backend: str = "auto",
    ) -> None:
        # Optimizer.__init__ is not called: it would wrap step() so that hooks fire on every call.
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, AccumulatingOptimizer):
            raise TypeError("optimizer is an AccumulatingOptimizer already; wrap the inner optimizer once")
        window = Window(gradient_accumulation_steps, reduction)
        if window.counted and isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"gradient_accumulation_steps={gradient_accumulation_steps!r} cannot count micro-batches of "
                "L-BFGS, which evaluates its closure many times per step; allowed: None (the manual loop)"
            )
        backends.requested(backend)
        clipping = check_settings(max_grad_norm, norm_type)
        finishing = (*clipping, bool(skip_nonfinite))
        self._build(optimizer, window, accumulate_dtype, backend, finishing, bool(master_weights))

    def _build(
        self,
        optimizer: Optimizer,
        window: Window,
        accumulate_dtype: torch.dtype | None,
        backend: str,
        finishing: tuple[float | None, float, bool],
        master_weights: bool,
        lenient: bool = False,
    ) -> None:
        self._accumulate_dtype = accumulate_dtype
        slots = [
            slot
            for index, group in enumerate(optimizer.param_groups)
            for slot in self._slots_of(group, index, backend, lenient)
        ]
        self.optimizer = optimizer
        self._window = window
        self._slots = slots
        self._arena = Arena(slots, not window.counted, backend)
        self._finishing = finishing
        self._inner_update = Update(optimizer, self._arena, *finishing)
        self._masters = Masters(slots, optimizer, backend) if master_weights else None
        #: What a GradScaler of ours says of the update at hand, and which has scaled the losses, if any.
        self._scaling: Scaling | None = None
        self._scaled_by: Callable[[], Any] = _nobody
        self._capture = Capture(slots, window, self._arena)
        self._closed = False

    def _slots_of(self, group: dict[str, Any], index: int, backend: str, lenient: bool = False) -> list[Slot]:
        """New slots; a parameter that was cast since it was accepted is let in if `lenient`."""
        dtype = self._accumulate_dtype
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"accumulate_dtype must be a torch.dtype or None, got {dtype!r}")
        names = group.get("param_names") or [f"{index}.{i}" for i in range(len(group["params"]))]
        slots = []
        known = {id(slot.param) for slot in self.__dict__.get("_slots", ())}
        for param, name in zip(group["params"], names, strict=True):
            if id(param) in known:
                continue
            known.add(id(param))
            wanted = dtype or default_accumulate_dtype(param)
            fits = dtype is None or (param.dtype, dtype) in PAIRS or not param.is_floating_point()
            if not fits and not lenient:
                raise ValueError(
                    f"accumulate_dtype={dtype} does not go with parameter {name!r} of {param.dtype}; allowed "
                    f"(gradient into sum): {allowed_pairs()}"
                )
            if (param.dtype, wanted) in PAIRS and param.device.type != "meta":
                backends.select(param.device, wanted, param.dtype, backend)
            slots.append(Slot(param, index, name, dtype))
        return slots

    # What an Optimizer is

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

    def __getattr__(self, name: str) -> Any:
        # Hooks registered here, train() and eval() of schedule-free optimizers, and the like.
        if name == "optimizer" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        window = self._window
        loop = "manual" if window.schedule is None else f"gradient_accumulation_steps={window.schedule}"
        return f"{type(self).__name__}({loop}, reduction={window.reduction!r})\n{self.optimizer!r}"

    # State

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

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the last update's gradient before it was clipped: 0-dim, on the device.

        None before the first update, and where nothing (`max_grad_norm`, `skip_nonfinite`,
        `fusedacc.amp.GradScaler`) needs it.
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
        return self._arena.nbytes

    # The loop

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End a micro-batch and, if it was the window's last, update (counted); update (manual).

        A `step()` with no backward since the last does not count. `closure` is run with gradients enabled:
        once in a counted loop; in a manual loop the inner optimizer runs it, as often as it likes.

        Returns:
            What the closure returned; None without one.

        Raises:
            RuntimeError: a weight is missing (nothing is changed: set it and call again), or an exception has
                left sums that are neither old nor new (see `discard`).
        """
        window = self._window
        if self._closed:
            return self.optimizer.step(closure)
        self._check_scaler("step")
        if not window.counted:
            return self._step_manually(closure)
        if "grad_scale" in self.__dict__:
            del self.grad_scale, self.found_inf
            raise RuntimeError(
                "torch.amp.GradScaler cannot scale a counted loop: it would change its scale inside the "
                "window. Use fusedacc.amp.GradScaler, in the same places"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._capture.settle()
        window.check_untainted()
        window.has_updated = False
        if self._is_initialising():
            self._initialise()
            self._arena.ignore_present()
            return loss
        if window.empty:
            self._capture.refresh()
            self._arena.disown()
        waiting = window.unsynchronised and not window.micro.ran  # for a backward that synchronises
        if not (window.micro.deferred or waiting):
            self._capture.collect(self._slots)
        if window.micro.ran:
            window.unsynchronised = window.micro.deferred
            window.end_micro_batch()
        if window.full:
            self._update(partial=False)
        return loss

    def _is_initialising(self) -> bool:
        """Whether this is distributed checkpoint's way of making an empty optimizer's state appear.

        It assigns zero gradients by hand, sets every lr to 0 and calls step() once
        (torch.distributed.checkpoint.state_dict, `_init_optim_state`).
        """
        if self.optimizer.state or any(group.get("lr", 1.0) != 0.0 for group in self.param_groups):
            return False
        given = [
            None if slot.param.grad is slot.shown() else slot.param.grad
            for slot in self._slots
            if slot.param.requires_grad
        ]
        # Reading the zeros waits for the device, but only while there is no state yet and every lr is 0.
        return bool(given) and all(g is not None and g.grad_fn is None and not g.any() for g in given)

    def _initialise(self) -> None:
        """Let the inner optimizer make its state from the zeros in p.grad."""
        slots = [slot for slot in self._slots if slot.param.grad is not None]
        with self._on_masters(slots):
            for slot in slots if self._masters is not None else ():
                gradient, slot.param.grad = slot.param.grad, None
                slot.param.grad = gradient.to(slot.param.dtype)  # type: ignore[union-attr]
            self.optimizer.step()

    def _step_manually(self, closure: Callable[[], Any] | None) -> Any:
        self._capture.settle()
        window = self._window
        window.has_updated = False
        if closure is None and self._is_initialising():
            return self._initialise()
        if window.in_context and window.micro.ran:
            self._capture.reclaim()
            window.end_micro_batch()

        if closure is not None:
            loss, skipped = self._step_with(closure), False
        else:
            window.check_untainted()
            reduces = window.reduction != "sum" and window.micro_step > 0
            ratio = self._capture.conclude() if reduces else 1.0
            loss, skipped = self._run_update(ratio)
        self._arena.withdraw()
        window.end_update(skipped)
        self._follow_groups()
        return loss

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        """The inner optimizer evaluates the closure as often as it likes; gradients are readied each time."""
        for name, is_set in (
            ("skip_nonfinite", self._inner_update.skip_nonfinite),
            ("master_weights", self._masters is not None),
        ):
            if is_set:
                raise RuntimeError(
                    f"{name}=True does not go with a closure in a manual loop, which the inner optimizer "
                    "calls in the middle of its update; call backward() and then step() without one"
                )

        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._capture.settle()
            self._finish_sums()
            with observers.phase("update"):
                self._inner_update.prepare(Scaling())
            return loss

        self._finish_sums()
        self._arena.present()
        try:
            return self.optimizer.step(evaluate)
        finally:
            self._inner_update.release()

    def _run_update(self, ratio: float | Tensor | None) -> tuple[Any, bool]:
        """The inner optimizer's step on the sums times `ratio`; None drops it, for all weights are 0.

        Returns its result, and whether the host has decided to drop it.
        """
        if ratio is None:
            return None, True
        scaling = self._scaling_at_hand()
        scaling.multiply(ratio)
        try:
            with observers.phase("update"), self._on_masters():
                return self._inner_update.step(scaling)
        except BaseException:
            if self._inner_update.applied:
                self._window.tainted = "an exception has interrupted an update that had scaled its gradients"
            raise

    @contextlib.contextmanager
    def _on_masters(self, slots: list[Slot] | None = None) -> Iterator[None]:
        """While inside, `slots` (else those with gradients) are their float32 masters, if there are any."""
        if self._masters is None:
            yield
            return
        if slots is None:
            slots = [slot for slot, _ in self._arena.finals()]
        try:
            with self._masters.swapped(slots):
                yield
        finally:
            self._capture.rearm(slots)

    def _finish_sums(self) -> None:
        """Manual loop: bring the sums to their final scale, as far as the host knows it."""
        window = self._window
        window.check_untainted()
        if window.reduction != "sum" and window.micro_step > 0:
            with observers.phase("update"):
                self._capture.deliver(ending=False)

    def _scaling_at_hand(self) -> Scaling:
        """What a GradScaler, ours or torch's, has said of this update, and weights that are on the device."""
        scaling = self._scaling
        if scaling is None:
            found = self.__dict__.get("found_inf")
            scaling = Scaling(self.__dict__.get("grad_scale"), found if isinstance(found, Tensor) else None)
        faulty = self._window.faulty
        if faulty is not None:
            scaling.drop_if(faulty)
        return scaling

    def _run_scaled(self, scaling: Scaling, run: Callable[[], Any]) -> Any:
        """`step` or `flush` for a GradScaler of ours; `scaling` then holds what was found."""
        self._scaling = scaling
        try:
            return run()
        finally:
            self._scaling = None

    def _check_scaler(self, method: str) -> None:
        """Raise RuntimeError where a GradScaler of ours has scaled the losses and is passed by."""
        if self._scaling is None and self._scaled_by() is not None:
            raise RuntimeError(
                f"{method}() would update from gradients of scaled losses: call scaler.{method}(optimizer) "
                "of the fusedacc.amp.GradScaler that has scaled them"
            )

    @property
    def _closes_window(self) -> bool:
        """Whether a `step()` now would update."""
        window = self._window
        return not window.counted or window.full or (window.micro.ran and window.will_update)

    def _follow_groups(self) -> None:
        """Take in parameters that were put into `param_groups` behind our back, and re-arm what has moved."""
        groups = self.param_groups
        if sum(len(group["params"]) for group in groups) != len(self._slots):
            for index, group in enumerate(groups):
                slots = self._slots_of(group, index, self._arena.backend, lenient=True)
                self._capture.claim(slots)
                self._slots.extend(slots)
        self._capture.refresh()

    def _update(self, partial: bool) -> None:
        """One update of the inner optimizer from the window's sums.

        If it raises, the window stays as it is: `step()` or `flush()` tries again, `zero_grad()` gives up.
        """
        window = self._window
        ratio = self._capture.conclude(partial)
        _, skipped = self._run_update(ratio)
        if ratio is None:
            self._arena.clear()
        else:
            self._arena.withdraw()
        window.end_update(skipped)
        self._follow_groups()

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: of the last update (counted; nothing in mid-window), or all (manual).

        With `set_to_none=False` zeros stay visible in `p.grad` where there was a gradient, and parameters
        without one in the next window are updated with zeros, as in stock.

        Raises:
            RuntimeError: counted loop: a backward has not been ended by `step()`; its gradients are in the
                sums and cannot be taken back (see `ignore` and `discard`).
        """
        if self._closed:
            return self.optimizer.zero_grad(set_to_none)
        self._capture.settle()
        window = self._window
        if window.counted:
            if window.tainted is not None:
                return None
            if window.micro.ran:
                raise RuntimeError(
                    "zero_grad() after a backward that no step() has ended: its gradients are in the "
                    "window's sums and cannot be taken back. Put a backward that shall not count inside "
                    "optimizer.ignore(), or call optimizer.discard() to throw the window away"
                )
            if window.micro_step > 0 and not window.full:
                self._arena.clear_ignored()
                return None
        if not window.empty:
            window.restart()
        window.tainted = None
        if set_to_none:
            self._arena.clear()
        else:
            self._arena.zero()
        return self._follow_groups()

    @contextlib.contextmanager
    def accumulate(
        self, model: torch.nn.Module | None = None, weight: float | Tensor | None = None
    ) -> Iterator[MicroBatch]:
        """Context around one micro-batch: its weight, and no gradient synchronisation before the last.

        Args:
            model: a DistributedDataParallel (or whatever has `no_sync()`), which is told not to synchronise
                gradients before the window's last micro-batch. With reduction "weighted", and in a manual
                loop, where the last is not known, it synchronises every time.
            weight: tokens or samples in this micro-batch, for "weighted" and "normalized"; 0 adds nothing. A
                number, or a 0-dim tensor, which is not waited for where it is on a device. It may also be set
                later on the object that is yielded (see `MicroBatch.weight`).

        Raises:
            ValueError: a weight where the reduction takes none, or a negative or infinite one.
            TypeError: a weight that is no number.
            RuntimeError: contexts are nested.
        """
        window = self._window
        micro = window.open(weight)
        self._capture.refresh()
        silent: contextlib.AbstractContextManager = contextlib.nullcontext()
        if hasattr(model, "no_sync") and window.counted and window.reduction != "weighted":
            micro.deferred = not window.will_update
            if micro.deferred:
                silent = model.no_sync()  # type: ignore[union-attr, operator]
        try:
            with silent:
                yield micro
        finally:
            self._capture.settle()
            if not window.counted and window.micro is micro and micro.ran and window.tainted is None:
                self._capture.reclaim()
                window.end_micro_batch()
            window.in_context = False

    @contextlib.contextmanager
    def ignore(self) -> Iterator[None]:
        """Context: a backward inside is left to stock and does not count.

        For a generator's pass through a discriminator: the gradients land in `p.grad`, and `zero_grad()` of
        this optimizer clears them, in mid-window too.
        """
        self._capture.refresh()
        before, self._capture.ignoring = self._capture.ignoring, True
        try:
            yield
        finally:
            self._capture.ignoring = before

    @_disable_dynamo
    def flush(self) -> None:
        """Update from a part-filled window; a no-op if it is empty.

        "mean" divides by the micro-batches that the window holds. A backward that no `step()` has ended
        counts as a micro-batch. In a manual loop this is `step()` if any gradient has come since the last.

        Raises:
            RuntimeError: as `step`.
        """
        window = self._window
        self._check_scaler("flush")
        self._capture.settle()
        window.check_untainted()
        window.has_updated = False
        if not window.counted:
            if not window.empty:
                self.step()
            return
        window.check_synchronised("flush() would update every rank with gradients of its own")
        if window.empty:
            self._arena.disown()
        self._capture.collect(self._slots)
        if window.micro.ran:
            window.end_micro_batch()
        if not window.empty:
            self._update(partial=True)

    @_disable_dynamo
    def discard(self) -> None:
        """Throw the window away: its sums, its count, and what is in `p.grad`."""
        self._capture.forget()
        self._arena.clear()
        self._window.reset()
        self._capture.refresh()

    def close(self) -> None:
        """Restore stock completely: no hooks, each parameter's `grad_dtype` as it was.

        What is in `p.grad` stays there, in the parameter's dtype; a part-filled counted window is dropped.
        The inner optimizer goes on alone. Closing twice does nothing.
        """
        if self._closed:
            return
        self._capture.settle()
        self._capture.close()
        for slot in self._slots:
            slot.forget()
            slot.drop_buffer()
        self._closed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does; they join the window at hand.

        Raises:
            ValueError, TypeError: as torch and `__init__`; nothing is added then.
        """
        groups = self.optimizer.param_groups
        self.optimizer.add_param_group(param_group)
        try:
            slots = self._slots_of(groups[-1], len(groups) - 1, self._arena.backend)
            self._capture.claim(slots)
        except Exception:
            groups.pop()
            raise
        self._slots.extend(slots)
        self._capture.refresh()

    def explain(self) -> str:
        """A table: each parameter's path, backend, dtypes, bytes per micro-batch, and why; and the update."""
        self._capture.refresh()
        update = self._inner_update.describe(casts=self._masters is None)
        if self._masters is not None:
            update += "; on float32 masters, which one pass then rounds into the parameters"
        return explain(self._slots, self._window, self._arena, update)

    # Checkpoints

    @_disable_dynamo
    def state_dict(self, include_partial: bool = True) -> dict[str, Any]:
        """The inner optimizer's state, and with `include_partial` a part-filled window's sums and counters.

        Without a part-filled window the result loads into the bare inner optimizer too.

        Raises:
            RuntimeError: the window's sums are neither old nor new after an exception (see `discard`), or
                gradients that `accumulate(model)` has left unsynchronised.
        """
        self._capture.settle()
        self._window.check_untainted()
        if include_partial:
            self._window.check_synchronised("state_dict(include_partial=True) would save one rank's part")
        self._count_skipped()
        return checkpoint.save(self.optimizer, self._window, self._arena, self._masters, include_partial)

    def _count_skipped(self) -> None:
        """Bring the count of updates that the device has dropped to the host; waits for the device."""
        dropped, self._inner_update.skipped = self._inner_update.skipped, None
        if dropped is not None:
            self._window.num_skipped += int(dropped.item())

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, from here or from the bare inner optimizer.

        Raises:
            ValueError, TypeError: the checkpoint does not fit; everything is left as it was.
        """
        self._capture.settle()
        checkpoint.load(self.optimizer, self._window, self._arena, self._masters, state_dict)
        self._capture.rearm(self._slots if self._masters is not None else ())
        self._capture.refresh()

    def __getstate__(self) -> dict[str, Any]:
        self._capture.settle()
        self._count_skipped()
        own = {name: value for name, value in self.__dict__.items() if name not in _REBUILT}
        return own | {
            "schedule": self._window.schedule,
            "reduction": self._window.reduction,
            "window": self._window.state(),
            "backend": self._arena.backend,
            "masters": None if self._masters is None else [self._masters.of(slot) for slot in self._slots],
            # A manual loop's sums are its parameters' p.grad, which torch does not copy either.
            "sums": [
                None
                if self._arena.visible or self._window.empty
                else (self._arena.current(slot), slot.delivered)
                for slot in self._slots
            ],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = dict(state)
        window = Window(own.pop("schedule"), own.pop("reduction"))
        counters, sums, masters = own.pop("window"), own.pop("sums"), own.pop("masters")
        settings = own.pop("_accumulate_dtype"), own.pop("backend"), own.pop("_finishing")
        self._build(own.pop("optimizer"), window, *settings, masters is not None, lenient=True)
        self.__dict__.update(own)
        window.restore(counters if window.counted else fresh_window(counters))
        for slot, kept in zip(self._slots, sums, strict=True):
            if kept is not None and kept[0] is not None:
                self._arena.restore(slot, *kept)
        for slot, master in zip(self._slots, masters or (), strict=False):
            if master is not None and self._masters is not None:
                self._masters.put(slot, master)


#: What unpickling makes anew. A scheduler's patch of step() belongs to the scheduler's own optimizer.
_REBUILT = (
    "_window",
    "_slots",
    "_arena",
    "_capture",
    "_inner_update",
    "_masters",
    "_scaling",
    "_scaled_by",
    "_closed",
    "step",
)


def _nobody() -> None:
    """A weak reference to nothing."""
