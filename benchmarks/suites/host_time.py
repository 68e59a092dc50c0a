"""Host time of a micro-batch in a counted loop, and the package's Python calls in it.

Linear layers are so small that the host's work is most of the time. The time is processor time of all threads
for a window of eight micro-batches and its update (SGD), divided by eight. Plain PyTorch divides its loss by
eight, and calls `step()` and `zero_grad()` at the end of the window. Goal: not above plain PyTorch's time.

Calls are those of the package's Python functions in one micro-batch in the middle of a window, in the thread
that trains and in autograd's thread of the device.

On the emulated GPU (tests/emulation) with kernels that do nothing:

    FUSEDACC_SELFTEST=0 EMULATION_EMPTY_KERNELS=1 PYTHONPATH=tests/emulation/startup:tests:. \\
        python -m benchmarks.suites.host_time --device cuda
"""

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
from torch import Tensor, nn

import fusedacc
from fusedacc.commands.timing import Run, synchronize, take_turns

from .. import harness
from ..contestants.loops import window
from ..harness import INSIDE, STOCK, WRAPPED, one_thread, rounds
from ..records import Case, Goal, Results, Row, markdown, row, timed_rows

STEPS = 8
WIDTH, BATCH = 64, 4
#: Numbers of Linear layers, and windows per round of each.
LAYERS = {1: 8, 16: 2, 150: 1}
QUICK_LAYERS = {1: 1, 2: 1}
ROUNDS = {"quick": 3, "short": 41, "full": 201}
WAYS = (STOCK, WRAPPED, INSIDE)
#: The parts of a micro-batch in which calls are counted.
PARTS = ("forward", "backward", "step", "zero_grad")
PACKAGE = os.path.dirname(fusedacc.__file__) + os.sep


class Training:
    """A stack of Linear layers and the optimizer that trains it in one of the `WAYS`."""

    def __init__(self, way: str, layers: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(device)
        self.input = torch.randn(BATCH, WIDTH, device=device)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.optimizer = harness.wrap(way, inner, STEPS, self.model)
        self.window = window(self.optimizer, self.loss, STEPS)

    def loss(self, index: int = 0) -> Tensor:
        return self.model(self.input).sum()


class PythonCalls:
    """Counts the calls of the package's functions by part of a micro-batch."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.part = ""

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.counts[self.part] += 1

    def start_in_this_thread(self, gradient: Tensor) -> None:
        sys.setprofile(self.note)

    @contextlib.contextmanager
    def counted(self, part: str) -> Iterator[None]:
        self.part = part
        threading.setprofile(self.note)  # for new threads
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def stop_in_this_thread(gradient: Tensor) -> None:
    sys.setprofile(None)


def python_calls(training: Training) -> Counter[str]:
    """Return the calls in the middle of a window, by part. This ends in the middle of a window."""
    calls = PythonCalls()
    for _ in range(2):
        training.window()
    for index in range(STEPS // 2):
        is_last = index == STEPS // 2 - 1
        with calls.counted("forward") if is_last else contextlib.nullcontext():
            loss = training.loss()
        if is_last:
            # The hook runs first, in the thread that runs the rest of the backward pass.
            loss.register_hook(calls.start_in_this_thread)
        with calls.counted("backward") if is_last else contextlib.nullcontext():
            loss.backward()
        with calls.counted("step") if is_last else contextlib.nullcontext():
            training.optimizer.step()
        with calls.counted("zero_grad") if is_last else contextlib.nullcontext():
            training.optimizer.zero_grad()
    loss = training.loss()
    loss.register_hook(stop_in_this_thread)
    loss.backward()
    return calls.counts


def figures(results: Results, effort: str) -> None:
    device = results.device

    def processor_time(run: Run, calls: int) -> float:
        synchronize(device)
        start = time.process_time()
        for _ in range(calls):
            run()
        synchronize(device)
        return (time.process_time() - start) / calls

    with one_thread():
        for layers, windows in (QUICK_LAYERS if effort == "quick" else LAYERS).items():
            trainings = {way: Training(way, layers, device) for way in WAYS}
            runs = {way: training.window for way, training in trainings.items()}
            shapes = f"{layers} x Linear({WIDTH}, {WIDTH}), {BATCH} rows, k={STEPS}"
            case = Case("host_time", f"{layers} Linear", "micro-batch", shapes, "float32")
            times = take_turns(runs, rounds(ROUNDS[effort], case.case), processor_time, windows)
            each = {way: [seconds / STEPS for seconds in found] for way, found in times.items()}
            goals = {way: [Goal(STOCK, 1.0)] for way in (WRAPPED, INSIDE)}
            rows = timed_rows(case, each, goals)
            for way in (WRAPPED, INSIDE):
                counts = python_calls(trainings[way])
                rows += [
                    row(case, way, metric=f"Python calls: {part}", unit="", median=float(counts[part]))
                    for part in PARTS
                ]
            results.add(rows)


def overview(rows: Sequence[Row]) -> str:
    """Return a line for each case and way: microseconds, those beyond plain PyTorch's, and calls."""
    found = {(each.case, each.provider, each.metric): each for each in rows}
    lines = []
    for case, way in dict.fromkeys((each.case, each.provider) for each in rows):
        timed, stock = found[case, way, "time"], found[case, STOCK, "time"]
        assert timed.median is not None
        assert stock.median is not None
        ratio = "" if timed.speedup is None else f"{1 / timed.speedup:.2f}"
        calls = (found.get((case, way, f"Python calls: {part}")) for part in PARTS)
        lines.append(
            [
                case,
                way,
                f"{timed.median:.0f}",
                f"{timed.median - stock.median:+.0f}" if ratio else "",
                ratio,
                *("" if count is None else f"{count.median:.0f}" for count in calls),
            ]
        )
    head = ("case", "way", "us", "beyond PyTorch", "ratio", *(f"calls: {part}" for part in PARTS))
    return markdown(head, lines)


def main() -> None:
    options = harness.arguments(__doc__).parse_args()
    kept = harness.results(options)
    harness.complete(kept, figures, harness.effort(options))
    print(overview(kept.rows))
    print("\n" + ", ".join(f"{key} {value}" for key, value in kept.conditions.items() if value))


if __name__ == "__main__":
    main()
