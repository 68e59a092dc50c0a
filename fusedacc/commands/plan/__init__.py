"""`python -m fusedacc plan`: predict which micro-batch fits in memory, and where memory goes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable

import torch

from ...planner import Plan, plan
from ...planner.budget import format_bytes, parse_bytes
from ...planner.plans import RESERVE, TooSmallError, place_of
from ..bench import MISUSED, STOPPED, WRONG, count
from ..bench.report import Progress
from ..measuring import plots
from . import plot
from .factory import InputError, NothingFitsError, Training, is_the_users, load, one_line

#: Total MiB as `nvidia-smi` reports it. A GPU sold with 80 GB does not have a round number.
TOTAL_MIB = {
    "b200": 183_359,
    "h200": 143_771,
    "h100": 81_559,
    "a100-80": 81_920,
    "a100-40": 40_960,
    "l40s": 46_068,
    "l4": 23_034,
    "a10": 23_028,
    "t4": 15_360,
    "rtx5090": 32_607,
    "rtx4090": 24_564,
    "rtx3090": 24_576,
}
#: MiB that the driver, one process's context and the libraries' workspaces use.
DRIVER_MIB = 1024

OURS, STOCK = "wrapped", "stock"
DESCRIPTION = """\
Predicts the largest micro-batch that fits, the number of micro-batches per update, and where the memory goes,
by running the training step on fake tensors. Then runs one real update, if the device is available.

FACTORY is called without arguments. It returns a tuple (model, optimizer, sample_batch), optionally with
loss_fn and batch_dims at the end:
  model         an nn.Module as it will train, or on the meta device
  optimizer     an AccumulatingOptimizer of its parameters, or a bare optimizer for the stock loop
  sample_batch  a tensor, or nested tensors, whose first dimension counts samples
  loss_fn       loss_fn(model, batch) returns the loss; default: model(**batch).loss
  batch_dims    the dimension that counts samples, if it is not the first of every tensor
"""
EPILOGUE = f"""\
A GPU given by name need not be available. {DRIVER_MIB} MiB of its memory are reserved for driver, context and
libraries, and 5 % of the rest. Exit status: 0; 1 if the measured peak exceeds the budget; 2 if an argument
cannot be used; 130 if interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = DESCRIPTION, EPILOGUE
    parser.add_argument("--model", required=True, metavar="FACTORY", help="package.module:factory")
    parser.add_argument(
        "--batch", required=True, type=count, metavar="N", help="samples of an update, on all ranks together"
    )
    parser.add_argument(
        "--memory",
        type=_memory,
        metavar="SIZE",
        help='bytes, or text like "24GiB"; includes parameters (default: the free memory of the device)',
    )
    parser.add_argument(
        "--world", type=count, default=1, metavar="N", help="data-parallel ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--device",
        type=_device,
        metavar="NAME",
        help=f"cpu, cuda, cuda:N, or a GPU that need not be available: {', '.join(TOTAL_MIB)} "
        "(default: the model's device)",
    )
    parser.add_argument("--stock", action="store_true", help="plan the stock loop, without the wrapper")
    parser.add_argument("--json", action="store_true", help="print the plan's figures as JSON")
    parser.add_argument(
        "--plot",
        type=plots.picture,
        metavar="FILE",
        help="draw memory by kind against the micro-batch, in both loops (.png, .svg, ...; needs matplotlib)",
    )
    parser.add_argument("--no-verify", action="store_true", help="run no real update")


def _memory(text: str) -> int:
    try:
        return parse_bytes(int(text) if text.isdecimal() else text, "--memory")
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def _device(text: str) -> str:
    allowed = ["cpu", "cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    allowed += TOTAL_MIB
    if text.lower() not in allowed:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; allowed: {', '.join(allowed)}")
    return text.lower()


def memory_of(name: str) -> int:
    """Return the bytes that training may use on a GPU of this name: without `DRIVER_MIB` and the reserve."""
    return int((1 - RESERVE) * (TOTAL_MIB[name] - DRIVER_MIB) * 2**20)


def run(options: argparse.Namespace) -> int:
    """Plan and print. Return the exit status: 1 if a real update exceeded the budget, else 0."""
    try:
        return _run(options)
    except InputError as problem:
        print(f"python -m fusedacc plan: error: {problem}", file=sys.stderr)
        return MISUSED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED


def _run(options: argparse.Namespace) -> int:
    training = load(options.model)
    primary = STOCK if options.stock or not training.wrapped else OURS
    device, memory = _where(options)
    with Progress(sys.stderr) as progress:
        loops = _Loops(options, device, memory, progress)
        if primary == OURS or loops.compared:
            try:
                training = training.ours()
                loops.add(OURS, training, primary == OURS)
            except (TypeError, ValueError) as problem:  # an optimizer that cannot be wrapped
                loops.lines.append(f"{OURS}: {one_line(problem)}")
        training = training.stock() if primary == STOCK or loops.compared else training
        if primary == STOCK or loops.compared:
            loops.add(STOCK, training, primary == STOCK)
    planned = loops.planned
    assert planned is not None
    if options.json:
        print(json.dumps(planned.as_dict(), indent=2))
    else:
        print("\n".join([str(planned), "", *loops.lines]))
    if options.plot is not None:
        _draw(
            options,
            loops.curves,
            planned.memory_budget,
            options.device or str(place_of(training.model, None)),
        )
    measured = planned.measured_peak_bytes
    return WRONG if measured is not None and measured > planned.memory_budget else 0


def _where(options: argparse.Namespace) -> tuple[torch.device | None, int | None]:
    """Return the device and the budget; None for what was not given."""
    name: str | None = options.device
    if name in TOTAL_MIB:
        return torch.device("cuda"), options.memory or memory_of(name)
    if name == "cuda" and options.memory is None and not torch.cuda.is_available():
        raise InputError("--device cuda: no GPU is available; allowed: the name of a GPU, or --memory too")
    return torch.device(name) if name else None, options.memory


def _draw(options: argparse.Namespace, found: list[plot.Curve], budget: int, device: str) -> None:
    ranks = f" on {options.world} ranks" if options.world > 1 else ""
    about = (
        f"{options.model}, a batch of {options.batch}{ranks}, {device}, torch {torch.__version__}; predicted"
    )
    try:
        plot.draw(found, budget, "What fits, and why", f"{about}. Dotted: what fits.", options.plot)
    except OSError as problem:
        raise InputError(f"--plot: {one_line(problem)}") from problem
    print(f"drawn: {options.plot}", file=sys.stderr)


@dataclasses.dataclass
class _Loops:
    """Plans of the wrapped and the stock loop: the requested one, and the other for comparison."""

    options: argparse.Namespace
    device: torch.device | None
    memory: int | None
    progress: Progress
    count: int = 0
    #: The requested plan.
    planned: Plan | None = None
    lines: list[str] = dataclasses.field(default_factory=list)
    curves: list[plot.Curve] = dataclasses.field(default_factory=list)

    @property
    def compared(self) -> bool:
        """Whether to plan the other loop too."""
        return not self.options.json or self.options.plot is not None

    def add(self, title: str, training: Training, asked_for: bool) -> None:
        """Plan a loop, and compute its curve if there will be a picture.

        Raises:
            InputError: this loop was requested and cannot be planned.
        """
        place = place_of(training.model, self.device)

        def note(size: int) -> None:
            self.count += 1
            self.progress.show(self.count, None, f"{title}: a micro-batch of {size}")

        chosen = None
        try:
            found = self._plan(training, place, asked_for and not self.options.no_verify, note)
        except InputError as problem:
            if asked_for:
                raise
            self.lines.append(f"{title}: {problem}")
            if not isinstance(problem, NothingFitsError):
                return
        else:
            self.memory = found.memory_budget  # the free memory changes all the time
            chosen, steps = found.micro_batch_size, found.gradient_accumulation_steps
            self.lines.append(
                f"{title}: {chosen} x {steps}, peak {format_bytes(found.peak_bytes)}, predicted"
            )
            if asked_for:
                self.planned = found
        if self.options.plot is not None:
            samples = math.ceil(self.options.batch / self.options.world)
            reach = plot.reach_of(chosen, samples)
            reach = max([reach, *(max(other.by_size) for other in self.curves)])
            self.curves.append(plot.curve(title, training, samples, chosen, reach, place, note))

    def _plan(
        self, training: Training, place: torch.device, verify: bool, note: Callable[[int], None]
    ) -> Plan:
        try:
            return plan(
                training.model,
                training.optimizer,
                training.sample_batch,
                global_batch_size=self.options.batch,
                memory_budget=self.memory,
                world_size=self.options.world,
                loss_fn=training.loss_fn,
                verify=verify,
                device=place,
                batch_dims=training.batch_dims,
                progress=note,
            )
        except Exception as error:
            if not is_the_users(error):
                raise
            nothing = isinstance(error.__context__, TooSmallError)
            raise (NothingFitsError if nothing else InputError)(one_line(error)) from error
