"""Predict the memory and traffic of an update for any micro-batch, by a run on fake tensors."""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.optim import Optimizer

from ..traffic import TrafficMeter
from .allocations import TEMPORARIES, Look, Peak, recorded_peak
from .budget import available, format_bytes
from .fake_tensors import GroupedProducts, OperatorTrials, RunLstmByOneDnn, Trace
from .training import (
    KIND_IN,
    MICRO_BATCHES,
    Batch,
    LossFunction,
    Recipe,
    copy_of,
    fake_copy,
    held,
    recipe_of,
    train,
    windows_of,
)

#: Errors of fake tensors at an operator whose result depends on data.
_UNKNOWN_TO_FAKES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class DataDependentError(RuntimeError):
    """The model depends on values in its tensors, which fake tensors do not have."""


class Traffic(NamedTuple):
    """Bytes read and written per update, and the part of them that accumulates gradients."""

    bytes: int
    accumulation: int


class Predictor:
    """Predicts for one model, optimizer, loss and batch. Each micro-batch size is run once.

    The model and the optimizer (or its recipe) are not changed. note: called with each size before it runs.
    in_flight: as in `plan`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Recipe,
        batch: Batch,
        loss_fn: LossFunction,
        device: torch.device,
        note: Callable[[int], None],
        in_flight: int = 1,
    ) -> None:
        self._model, self._recipe, self._batch = model, recipe_of(optimizer), batch
        self._loss_fn, self._device, self._note, self._in_flight = loss_fn, device, note, in_flight
        #: Without that device, fake tensors run on the CPU, whose oneDNN needs do not apply to it.
        self.runs_there = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())
        self._runs_on = device if self.runs_there else torch.device("cpu")
        self._trials = OperatorTrials() if device.type == "cpu" else None
        self._peaks: dict[tuple[int, int], Peak] = {}
        #: Operators in what `traffic` ran whose traffic is not known from shapes.
        self.uncounted: set[str] = set()
        has_lstm = any(isinstance(module, nn.LSTM) for module in model.modules())
        self._lstm = RunLstmByOneDnn if has_lstm else contextlib.nullcontext

    def peak(self, size: int, steps: int) -> Peak:
        """Return the memory at the peak of training with micro-batches of `size`, `steps` per update."""
        key = size, min(steps, MICRO_BATCHES)
        if key not in self._peaks:
            self._note(size)
            self._peaks[key] = self._run(*key)
        return self._peaks[key]

    @property
    def tried(self) -> dict[int, int]:
        """The peak bytes of each size so far."""
        return {size: peak.bytes for (size, _), peak in sorted(self._peaks.items())}

    def _run(self, size: int, steps: int) -> Peak:
        trace = Trace(self._runs_on)
        with self._fake(size, steps) as (copy, draw):

            def look() -> None:
                for kind, tensors in held(copy).items():
                    trace.mark(tensors, kind)

            with trace:
                windows = windows_of(steps)
                phase = lambda name: trace.phase(KIND_IN[name])  # noqa: E731
                train(copy, draw, self._loss_fn, windows, phase, look, self._in_flight)
            found = trace.peak(self._trials)
        return found

    def traffic(self, size: int, steps: int) -> Traffic:
        """Return the traffic of an update of `steps` micro-batches, once sums and state exist."""
        with self._fake(size, steps) as (copy, draw):
            meter = TrafficMeter(copy.model)
            rests: list[Traffic] = []

            def look() -> None:
                found = meter.as_dict()
                rests.append(Traffic(found["total_bytes"], found["by_phase"].get("accumulate", 0)))

            *before, window = windows_of(steps)
            train(copy, draw, self._loss_fn, before, _nothing, lambda: None)
            with meter:
                train(copy, draw, self._loss_fn, (window,), _nothing, look)
        self.uncounted.update(meter.uncounted)
        # `rests` has the totals before, after each backward, and after each micro-batch.
        more = steps - window
        counts = zip(*rests[-3:], strict=True)
        return Traffic(*(end + more * (after - before) for before, after, end in counts))

    def measured_peak(self, size: int, steps: int) -> tuple[int | None, str]:
        """Measure the peak of real updates on a copy of model and optimizer.

        Returns:
            The bytes and "", or None and why they were not measured.
        """
        device, predicted = self._device, self.peak(size, steps).bytes
        first = next(self._model.parameters()).device
        if first.type != device.type:
            return None, f"the model is on {first.type}, and is planned for {device.type}"
        free = available(device)
        if predicted > free:
            return None, f"a copy would take {format_bytes(predicted)}, and {format_bytes(free)} are free"
        windows = windows_of(steps)

        def updates(look: Look) -> None:
            copy = copy_of(self._model, self._recipe, windows)
            draw = partial(self._batch.drawn, size)
            see = lambda: look(held(copy))  # noqa: E731
            train(copy, draw, self._loss_fn, windows, _nothing, see, self._in_flight)

        with kept_random_state(device):
            return recorded_peak(updates, device, TEMPORARIES).bytes, ""

    @contextlib.contextmanager
    def _fake(self, size: int, steps: int) -> Iterator[tuple[Any, Callable[[], Any]]]:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with kept_random_state(self._runs_on), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            copy = fake_copy(mode, self._model, self._recipe, windows_of(steps), self._runs_on)
            try:
                with mode, GroupedProducts(), self._lstm():
                    yield copy, lambda: self._batch.shapes(size, self._runs_on)
            except _UNKNOWN_TO_FAKES as error:
                raise DataDependentError(
                    f"the model calls {error.func}, whose result depends on values in its tensors, so its "
                    "memory cannot be predicted; allowed: fusedacc.planner.find_micro_batch_size, which "
                    "runs each size"
                ) from error
            except Exception as error:
                if sys.version_info >= (3, 11):
                    error.add_note(f"with fake tensors, at a micro-batch of {size}")
                raise


@contextlib.contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Context: restore Python's, NumPy's and torch's random states at the end."""
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(drawn)


def _nothing(_: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
