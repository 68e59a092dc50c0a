"""Compiled models: the time of a window, compared with the same loop of plain compiled PyTorch.

The figure is the CPU time of one thread for a window of eight micro-batches and an update that changes
nothing. Inductor compiles forward and backward. In bfloat16 PyTorch has two loops: `grad_dtype=float32`,
and a hook with a mixed `add_`. Each is measured with the C library's defaults and with freed memory kept.
By default the library returns gradients of megabytes to the kernel in some windows, and page faults
dominate.
"""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedacc
from fusedacc.commands.timing import take_turns

from .. import harness
from ..contestants.zoo.networks import GPT
from ..harness import INSIDE, STOCK, WRAPPED, one_thread, processes, rounds, thread_time
from ..records import Case, Results, at_most, row, spread
from .experts import DEFAULTS, MODES

STEPS = 8
HOOK = "stock, hook"
ROUNDS = {"quick": 2, "short": 31, "full": 101}
#: The goal without `model=`, as a share of stock's time.
WITHOUT = 1.02


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


@dataclasses.dataclass(frozen=True)
class Workload:
    """One model, its input and its goal: the most of stock's time that `model=` may take."""

    name: str
    shapes: str
    make: Callable[[], nn.Module]
    data: Callable[[], Tensor]
    goal: float
    dtype: torch.dtype = torch.float32
    autocast: bool = False

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output = model(x)
        if x.is_floating_point():
            return output.float().square().mean()
        return F.cross_entropy(output.float().flatten(0, 1), x.flatten())


def _gpt() -> nn.Module:
    model = GPT(2048, 512, 3, 64)
    model.head = nn.Linear(512, 2048, bias=False)  # not tied to the embedding
    return model


def _tokens() -> Tensor:
    return torch.randint(0, 2048, (1, 64))


WORKLOADS = (
    Workload("MLP 1024", "16 tokens", lambda: mlp(1024), lambda: torch.randn(16, 1024), 0.70),
    Workload("MLP 512", "32 tokens", lambda: mlp(512), lambda: torch.randn(32, 512), 0.92),
    Workload(
        "head", "512 x 8192, 64 tokens", lambda: nn.Linear(512, 8192), lambda: torch.randn(64, 512), 0.82
    ),
    Workload("GPT", "3 layers of width 512, 64 tokens", _gpt, _tokens, 0.80),
    Workload("GPT", "3 layers of width 512, 64 tokens", _gpt, _tokens, 0.88, autocast=True),
    Workload("MLP 1024", "16 tokens", lambda: mlp(1024), lambda: torch.randn(16, 1024), 0.40, torch.bfloat16),
)
QUICK = (Workload("MLP 64", "4 tokens", lambda: mlp(64), lambda: torch.randn(4, 64), 1.0),)


def window(way: str, work: Workload, backend: str) -> Callable[[], None]:
    """Return a function that trains one window in this way, compiled by this backend of torch.compile."""
    torch.manual_seed(0)
    model = nn.Sequential(work.make()).to(work.dtype)
    parameters = list(model.parameters())
    batches = [work.data() for _ in range(STEPS)]
    if work.dtype is not torch.float32:
        batches = [x.to(work.dtype) for x in batches]
    loss = torch.compile(work.loss, backend=backend, fullgraph=True)
    sums: dict[Tensor, Tensor] = {}
    inner = WithoutUpdate(parameters)
    if way in (WRAPPED, INSIDE):
        given: dict[str, Any] = {"model": model} if way == INSIDE else {}
        optimizer = fusedacc.AccumulatingOptimizer(inner, STEPS, **given)

        def wrapped() -> None:
            for x in batches:
                loss(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()

        return wrapped

    def add(parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        assert gradient is not None
        if parameter in sums:
            sums[parameter].add_(gradient)
        else:
            sums[parameter] = gradient.float()

    for parameter in parameters:
        if way == HOOK:
            parameter.register_post_accumulate_grad_hook(add)
        elif work.dtype is not torch.float32:
            parameter.grad_dtype = torch.float32

    def stock() -> None:
        for x in batches:
            loss(model, x).backward()
        inner.step()
        inner.zero_grad()
        sums.clear()

    return stock


class WithoutUpdate(torch.optim.Optimizer):
    """Leaves the parameters unchanged, because the update is the same in every loop."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def measure(index: int, effort: str, what: str) -> dict[str, list[float]]:
    """Seconds of a micro-batch of the workload with this number, by way and round."""
    work = works(effort)[index]
    ways = [STOCK, WRAPPED, INSIDE]
    if work.dtype is not torch.float32:
        ways.insert(1, HOOK)
    with one_thread():
        # aot_eager, because Inductor is slow to compile
        backend = "aot_eager" if effort == "quick" else "inductor"
        torch.compiler.reset()
        runs = {way: window(way, work, backend) for way in ways}
        for run in runs.values():
            run()
        times = take_turns(runs, rounds(ROUNDS[effort], what), thread_time)
    return {way: [seconds / STEPS for seconds in times_of_way] for way, times_of_way in times.items()}


def works(effort: str) -> tuple[Workload, ...]:
    return QUICK if effort == "quick" else WORKLOADS


def figures(results: Results, effort: str) -> None:
    modes = {DEFAULTS: MODES[DEFAULTS]} if effort == "quick" else MODES
    for mode, values in modes.items():
        with processes(values, 1) as apart:
            for index, work in enumerate(works(effort)):
                kind = "autocast bfloat16" if work.autocast else str(work.dtype)[6:]
                case = Case("compiled", work.name, mode, f"{work.shapes}, k={STEPS}", kind)
                each = apart.submit(measure, index, effort, case.case).result()
                rows = [
                    row(case, way, **spread(times_of_way, 1e3), unit="ms")
                    for way, times_of_way in each.items()
                ]
                for way, goal in ((WRAPPED, WITHOUT), (INSIDE, work.goal)):
                    shares = [seconds / base for seconds, base in zip(each[way], each[STOCK], strict=True)]
                    held = at_most(goal, statistics.median(shares), "limit, share of stock's time")
                    rows.append(
                        row(case, way, metric="share of stock's time", unit="", **spread(shares), **held)
                    )
                results.add(rows)


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
