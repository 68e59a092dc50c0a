"""Find the largest micro-batch with which training runs on a GPU, by trying sizes."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .budget import available, check, check_int, format_bytes, parse_bytes
from .prediction import kept_random_state

#: Updates per try. The first one creates the optimizer state, so it needs less memory than the others.
TRIED_UPDATES = 3


class Try(NamedTuple):
    """A size, whether its updates ran, and the seconds that they took."""

    size: int
    fits: bool
    seconds: float


@dataclass(frozen=True)
class FoundSize:
    """What `find_micro_batch_size` found.

    Attributes:
        micro_batch_size: the largest size that ran.
        margin_bytes: the part of the budget that no try could use.
        budget_bytes: bytes that training may add to what the process has allocated before.
        maximum: the argument.
        updates: number of updates that ran with this size.
        tries: all tries, in order.
    """

    micro_batch_size: int
    margin_bytes: int
    budget_bytes: int
    maximum: int
    updates: int
    tries: tuple[Try, ...]

    def __str__(self) -> str:
        allowed = format_bytes(self.budget_bytes - self.margin_bytes)
        too_large = [tried.size for tried in self.tries if not tried.fits]
        end = f"{min(too_large)} does not fit" if too_large else f"{self.maximum} is the maximum"
        seconds = sum(tried.seconds for tried in self.tries)
        return (
            f"micro-batch size {self.micro_batch_size}: {self.updates} updates ran within {allowed}; {end}\n"
            f"budget {format_bytes(self.budget_bytes)}, of which {format_bytes(self.margin_bytes)} "
            f"were kept free as a margin\n"
            f"{len(self.tries)} tries in {seconds:.0f} s"
        )


def find_micro_batch_size(
    step: Callable[[], Callable[[int], object]],
    *,
    start: int = 1,
    maximum: int,
    memory_budget: int | str | None = None,
    device: torch.device | str = "cuda",
    steps: int = 100,
    margin: float = 0.05,
    progress: bool = True,
) -> FoundSize:
    """Find the largest micro-batch with which training runs on a GPU in a given amount of memory.

    A size fits if three updates run. The search tries 1 and `start`, doubles, and then halves the interval
    between the largest size that fits and the smallest that does not. The size found must then run for
    `steps` updates; otherwise the next smaller size that does is returned. Random states are restored. The
    memory of a size that does not fit is freed before the next one is tried.

    Args:
        step: called once, without arguments. It builds model, optimizer and data, and returns a callable
            `run(micro_batch_size)` that makes one whole update with all its micro-batches; its result is
            ignored. `run` is called again after an update that ran out of memory in the middle, so with
            `AccumulatingOptimizer` it must begin with `optimizer.discard()`, and with another optimizer with
            `optimizer.zero_grad()`.
        start: the first size to try after 1, ideally a prediction.
        maximum: the largest size to try.
        memory_budget: bytes that torch's allocator may reserve beyond those that it holds now, model and
            optimizer included; or text such as "24GiB". None: the free memory of the GPU. The allocator's own
            limit (`torch.cuda.set_per_process_memory_fraction`) is lowered during the call and then restored.
        device: the CUDA GPU whose memory is limited, which is the current one while sizes are tried. The step
            places its own tensors.
        steps: updates that the found size must run for.
        margin: share of the budget that tries may not use, because memory fragments in longer runs.
        progress: show a progress bar if tqdm is installed.

    Raises:
        TypeError, ValueError: an argument is wrong. On a CPU sizes cannot be tried: use `plan(verify=True)`.
        torch.OutOfMemoryError: not even one sample fits.

    Other errors that the step raises get a note with the micro-batch size.
    """
    if not callable(step):
        raise TypeError(
            f"step is a callable without arguments, which returns run(micro_batch_size); it was {step!r}"
        )
    check_int("steps", steps, TRIED_UPDATES)
    check_int("maximum", maximum, 1)
    if check_int("start", start, 1) > maximum:
        raise ValueError(f"start is at most maximum, {maximum}; it was {start}")
    check("margin", margin, "a number, at least 0 and below 1", int | float, lambda share: 0 <= share < 1)
    budget = None if memory_budget is None else parse_bytes(memory_budget, "memory_budget")
    gpu = _gpu(device)

    _free_unused_memory()
    if budget is None:
        budget = available(gpu)
    kept_free = int(budget * margin)
    with (
        torch.cuda.device(gpu),
        kept_random_state(gpu),
        _allocator_limit(gpu, budget - kept_free),
        _progress_bar(progress) as bar,
    ):
        trials = _Trials(step, gpu, bar)
        try:
            size = trials.find(start, maximum, steps)
        finally:
            trials.drop_step()
    if size == 0:
        raise torch.OutOfMemoryError(
            f"micro-batch size 1 does not fit within {format_bytes(budget - kept_free)}, the budget of "
            f"{format_bytes(budget)} less a margin of {format_bytes(kept_free)}: {trials.why}"
        )
    return FoundSize(size, kept_free, budget, maximum, steps, tuple(trials.tries))


def _gpu(device: torch.device | str) -> torch.device:
    """Return the device with its index. Raises ValueError if it is not an available GPU."""
    given = torch.device(device)
    if given.type == "cpu":
        raise ValueError(
            'device is "cpu", and sizes can be tried on a GPU only: Linux kills a process that is short of '
            "memory; allowed: a CUDA GPU. For a CPU, use fusedacc.planner.plan(verify=True)"
        )
    if given.type != "cuda":
        raise ValueError(f'device is a CUDA GPU, such as "cuda"; it was "{given}"')
    if not torch.cuda.is_available():
        raise ValueError(f'device is "{given}", and torch.cuda.is_available() is false')
    return torch.device("cuda", torch.cuda.current_device()) if given.index is None else given


def _free_unused_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def _allocator_limit(gpu: torch.device, allowed: int) -> Iterator[None]:
    """Context: torch's allocator may reserve so many more bytes than now. A lower limit stays."""
    before = torch.cuda.get_per_process_memory_fraction(gpu)
    total = torch.cuda.get_device_properties(gpu).total_memory
    share = (torch.cuda.memory_reserved(gpu) + allowed) / total
    torch.cuda.set_per_process_memory_fraction(min(before, share), gpu)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, gpu)


@contextlib.contextmanager
def _progress_bar(wanted: bool) -> Iterator[Any]:
    """Context: a progress bar that counts tries; None if it is not wanted or tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        wanted = False
    if not wanted:
        yield None
        return
    shape = "{desc} [{n_fmt} tried, {elapsed}{postfix}]"
    with tqdm(desc="micro-batch size", bar_format=shape, dynamic_ncols=True, leave=False) as bar:
        yield bar


class _Trials:
    """Runs updates of a step with different micro-batch sizes."""

    def __init__(self, step: Callable[[], Callable[[int], object]], gpu: torch.device, bar: Any) -> None:
        self.step = step
        self.gpu = gpu
        self.bar = bar
        #: What `step` returned.
        self.run: Callable[[int], object] | None = None
        self.tries: list[Try] = []
        #: Why the last size that did not fit did not.
        self.why = ""

    def find(self, start: int, maximum: int, steps: int) -> int:
        """Return the largest size that runs for `steps` updates; 0 if none does."""

        def lasts(size: int) -> bool:
            return self.fits(size, steps)

        if not self.fits(1):
            return 0
        size = largest_fitting(self.fits, start, maximum)
        if lasts(size):
            return size
        if size == 1 or not lasts(1):
            return 0
        return largest_fitting(lasts, size - 1, size - 1)

    def fits(self, size: int, updates: int = TRIED_UPDATES) -> bool:
        """Run so many updates. Return whether there was enough memory."""
        began = time.monotonic()
        has_room = True
        try:
            self._run_updates(size, updates)
        except torch.OutOfMemoryError as error:
            has_room = False
            self.why = str(error).strip().split("\n")[0]
            _drop_frames(error)
        except Exception as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"in find_micro_batch_size, at a micro-batch of {size}")
            raise
        # Here the exception is gone, and with it what the frames held.
        _free_unused_memory()
        self.tries.append(Try(size, has_room, time.monotonic() - began))
        if self.bar is not None:
            self.bar.update()
        return has_room

    def _run_updates(self, size: int, updates: int) -> None:
        if self.run is None:
            self._show(size, 0, updates)
            self.run = self.step()
            if not callable(self.run):
                raise TypeError(f"step() must return a callable run(micro_batch_size); got {self.run!r}")
        for done in range(updates):
            self._show(size, done, updates)
            self.run(size)
            torch.cuda.synchronize(self.gpu)

    def _show(self, size: int, done: int, updates: int) -> None:
        if self.bar is not None:
            last = ", ".join(f"{tried.size}{'' if tried.fits else ' does not'}" for tried in self.tries[-3:])
            self.bar.set_postfix_str(f"fits: {last}" if last else "", refresh=False)
            self.bar.set_description_str(
                f"micro-batch size {size}, {done} of {updates} updates", refresh=done == 0
            )

    def drop_step(self) -> None:
        """Free what the step has built."""
        self.run = None
        _free_unused_memory()


def _drop_frames(error: BaseException) -> None:
    """Clear the variables of the functions that raised an error and its causes: they hold tensors."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__


def largest_fitting(fits: Callable[[int], bool], start: int, maximum: int) -> int:
    """Return the largest size that fits, given that 1 does and that smaller sizes need less.

    The search doubles from `start`, then halves the interval.
    """
    fitting = 1
    too_large = maximum + 1
    size = max(start, 2)
    while too_large - fitting > 1:
        if fits(size):
            fitting = size
        else:
            too_large = size
        nothing_failed = too_large > maximum
        size = min(2 * fitting, maximum) if nothing_failed else (fitting + too_large) // 2
    return fitting
