"""`python -m fusedacc plan`: predict which micro-batch fits in memory, where memory goes, and draw both."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..optimizer import AccumulatingOptimizer
from ..planner import Plan, plan
from ..planner import budget as amounts
from ..planner.allocations import KINDS, LIBRARIES
from ..planner.budget import format_bytes
from ..planner.plans import RESERVE, TooSmallError, place_of
from ..planner.prediction import Batch, BatchDims, LossFunction, Predictor
from .bench.report import Progress
from .exit_status import MISUSED, STOPPED, WRONG
from .gpu_names import DRIVER_MIB, TOTAL_MIB
from .plots import BLUE, GREEN, GREY, INK, SKY, STYLE, VERMILION, YELLOW, finish, save, swatches

OURS = "wrapped"
STOCK = "stock"


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
    plans_both = not options.json or options.plot is not None
    device, memory = _device_and_memory(options)
    with Progress(sys.stderr) as progress:
        loops = _Loops(options, device, memory, progress)
        for title in (OURS, STOCK) if plans_both else (primary,):
            try:
                training = training.ours() if title == OURS else training.stock()
                loops.add(title, training, requested=title == primary)
            except (TypeError, ValueError) as problem:  # an optimizer that cannot be wrapped
                loops.lines.append(f"{title}: {one_line(problem)}")
    planned = loops.planned
    assert planned is not None
    if options.json:
        print(json.dumps(planned.as_dict(), indent=2))
    else:
        print("\n".join([str(planned), "", *loops.lines]))
    if options.plot is not None:
        ranks = f" on {options.world} ranks" if options.world > 1 else ""
        place = options.device or place_of(training.model, None)
        about = f"{options.model}, a batch of {options.batch}{ranks}, {place}, torch {torch.__version__}"
        try:
            draw(loops.curves, planned.memory_budget, f"{about}; predicted. Dotted: what fits.", options.plot)
        except OSError as problem:
            raise InputError(f"--plot: {one_line(problem)}") from problem
        print(f"drawn: {options.plot}", file=sys.stderr)
    return WRONG if (planned.measured_peak_bytes or 0) > planned.memory_budget else 0


def _device_and_memory(options: argparse.Namespace) -> tuple[torch.device | None, int | None]:
    """Return the device and the budget; None for what was not given."""
    name: str | None = options.device
    if name in TOTAL_MIB:
        return torch.device("cuda"), options.memory or memory_of(name)
    if name == "cuda" and options.memory is None and not torch.cuda.is_available():
        raise InputError("--device cuda: no GPU is available; allowed: the name of a GPU, or --memory too")
    return torch.device(name) if name else None, options.memory


@dataclasses.dataclass
class _Loops:
    """Plans of the wrapped and the plain loop: the requested one, and the other for comparison."""

    options: argparse.Namespace
    device: torch.device | None
    memory: int | None
    progress: Progress
    count: int = 0
    #: The requested plan.
    planned: Plan | None = None
    lines: list[str] = dataclasses.field(default_factory=list)
    curves: list[Curve] = dataclasses.field(default_factory=list)

    def add(self, title: str, training: Training, *, requested: bool) -> None:
        """Plan a loop, and compute its curve if there will be a picture. Raises InputError if this loop was
        requested and cannot be planned.
        """
        options = self.options
        place = place_of(training.model, self.device)
        chosen: int | None = None

        def note(size: int) -> None:
            self.count += 1
            self.progress.show(self.count, None, f"{title}: a micro-batch of {size}")

        try:
            planned = plan(
                training.model,
                training.optimizer,
                training.sample_batch,
                global_batch_size=options.batch,
                memory_budget=self.memory,
                world_size=options.world,
                loss_fn=training.loss_fn,
                verify=requested and not options.no_verify,
                device=place,
                batch_dims=training.batch_dims,
                in_flight=options.in_flight,
                progress=note,
            )
        except Exception as error:
            # Does it concern the user's input: raised by our checks, or in the user's code?
            if not isinstance(error, TypeError | ValueError | RuntimeError) and not _frames(error):
                raise
            if requested:
                raise InputError(one_line(error)) from error
            self.lines.append(f"{title}: {one_line(error)}")
            if not isinstance(error.__context__, TooSmallError):
                return
        else:
            self.memory = planned.memory_budget  # the free memory changes all the time
            chosen = planned.micro_batch_size
            self.lines.append(
                f"{title}: {chosen} x {planned.gradient_accumulation_steps}, "
                f"peak {format_bytes(planned.peak_bytes)}, predicted"
            )
            if requested:
                self.planned = planned
        if options.plot is not None:
            samples = math.ceil(options.batch / options.world)
            # Up to BEYOND times the micro-batch that fits, below the whole batch, and as far in both loops.
            reach = max(1, min(samples // options.in_flight - 1, max(4, BEYOND * (chosen or 1))))
            reach = max([reach, *(max(other.by_size) for other in self.curves)])
            drawn = curve(title, training, samples, chosen, reach, place, note, options.in_flight)
            self.curves.append(drawn)


RETURNS = "(model, optimizer, sample_batch), optionally with loss_fn and batch_dims at the end"


class InputError(Exception):
    """The user's input cannot be used; the message is one line."""


class Training(NamedTuple):
    """What is to be planned: arguments of `fusedacc.planner.plan`."""

    model: nn.Module
    optimizer: Optimizer
    sample_batch: Any
    loss_fn: LossFunction | None = None
    batch_dims: BatchDims = 0

    @property
    def wrapped(self) -> bool:
        return isinstance(self.optimizer, AccumulatingOptimizer)

    def stock(self) -> Training:
        """Return the plain loop. A wrapper is closed and can no longer train."""
        if not isinstance(self.optimizer, AccumulatingOptimizer):
            return self
        inner = self.optimizer.optimizer
        self.optimizer.close()
        return self._replace(optimizer=inner)

    def ours(self) -> Training:
        """Return the same with the optimizer wrapped, with the wrapper's defaults."""
        if self.wrapped:
            return self
        return self._replace(optimizer=AccumulatingOptimizer(self.optimizer, gradient_accumulation_steps=2))


def load(name: str) -> Training:
    """Call the factory `package.module:factory`. Raises InputError if there is none, it fails, or it returns
    something else.
    """
    module_name, _, factory_name = name.partition(":")
    if not module_name or not factory_name:
        raise InputError(f"--model is {name!r}; allowed: package.module:factory")
    with _input_errors(f"--model {name}: importing {module_name}"):
        module = importlib.import_module(module_name)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise InputError(f"--model {name}: {module_name} has no function {factory_name!r}")
    with _input_errors(f"--model {name}: {factory_name}()"):
        made = factory()
    if not isinstance(made, tuple) or not 3 <= len(made) <= 5:
        returned = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise InputError(f"--model {name}: {factory_name}() must return {RETURNS}; it returned {returned}")
    training = Training(*made)
    for what, kind in (("model", nn.Module), ("optimizer", Optimizer)):
        value = getattr(training, what)
        if not isinstance(value, kind):
            text = f"--model {name}: the {what} that {factory_name}() returned is {type(value).__name__}"
            raise InputError(f"{text}; allowed: a torch {kind.__name__}")
    if next(training.model.parameters(), None) is None:
        raise InputError(f"--model {name}: the model that {factory_name}() returned has no parameters")
    return training


@contextlib.contextmanager
def _input_errors(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise InputError(f"{what} failed: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return an error with its notes, and the place in the user's code where it was raised."""
    text = " ".join(str(error).split()) or "no message"
    notes = [" ".join(note.split()) for note in getattr(error, "__notes__", ())]
    frames = _frames(error)
    place = [f"at {Path(frames[-1].filename).name}:{frames[-1].lineno}"] if frames else []
    return ", ".join([f"{type(error).__name__}: {text}", *notes, *place])


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code, the innermost last."""
    libraries = (Path(__file__).parents[1], Path(torch.__file__).parent, Path(traceback.__file__).parent)

    def elsewhere(filename: str) -> bool:
        path = Path(filename)
        return path.is_absolute() and not any(path.is_relative_to(folder) for folder in libraries)

    return [frame for frame in traceback.extract_tb(error.__traceback__) if elsewhere(frame.filename)]


#: Number of sizes per curve, which is nearly straight in between; the largest, relative to what fits.
POINTS = 6
BEYOND = 2


@dataclasses.dataclass(frozen=True)
class Curve:
    """Bytes by kind at a few micro-batch sizes, and with the whole batch in memory at once."""

    title: str
    by_size: Mapping[int, Mapping[str, int]]
    full: Mapping[str, int]
    #: The samples of a micro-batch in `full`.
    samples: int
    #: The micro-batch that fits; None if not even one sample does.
    chosen: int | None


def curve(
    title: str,
    training: Training,
    samples: int,
    chosen: int | None,
    reach: int,
    device: torch.device,
    note: Callable[[int], None],
    in_flight: int = 1,
) -> Curve:
    """Predict memory at each size up to `reach`, and with all samples at once.

    samples: per update on one rank. note: called with each size before it runs. in_flight: as in `plan`.
    """
    batch = Batch(training.sample_batch, training.batch_dims)
    predictor = Predictor(
        training.model, training.optimizer, batch, training.loss_fn, device, note, in_flight
    )
    scratch = amounts.scratch_bytes() if device.type == "cpu" else 0

    def kinds(size: int) -> dict[str, int]:
        by_kind = predictor.peak(size, math.ceil(samples / size)).by_kind
        return {kind: by_kind.get(kind, 0) for kind in KINDS} | {LIBRARIES: scratch}

    count = min(POINTS, reach)
    sizes = sorted({round(1 + (reach - 1) * index / max(1, count - 1)) for index in range(count)})
    most = samples // in_flight
    return Curve(title, {size: kinds(size) for size in sizes}, kinds(most), most, chosen)


COLOURS = {LIBRARIES: INK, **dict(zip(KINDS, (GREY, BLUE, SKY, GREEN, YELLOW, VERMILION), strict=True))}
#: Height at which a bar is cut, relative to everything else.
TALLEST = 1.6


def draw(curves: Sequence[Curve], budget: int, about: str, path: Path) -> None:
    """Draw a panel for each loop: areas by kind, the whole batch as one bar, the budget as a line."""
    import matplotlib
    from matplotlib.figure import Figure

    most = max(budget, *(sum(drawn.full.values()) for drawn in curves))
    unit, unit_name = (2**30, "GiB") if most >= 2**31 else (2**20, "MiB")
    areas = max(sum(kinds.values()) for drawn in curves for kinds in drawn.by_size.values())
    whole = max(sum(drawn.full.values()) for drawn in curves)
    top = 1.12 * min(whole, TALLEST * max(areas, budget))
    top = max(top, 1.12 * areas, 1.08 * min(budget, 2 * max(areas, whole)))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.2 + 4.4 * len(curves), 5.2))
        panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
        for axes, drawn in zip(panels, curves, strict=True):
            draw_curve(axes, drawn, budget, top, unit)
            fits = "not one sample fits" if drawn.chosen is None else f"{drawn.chosen} samples fit"
            axes.set_title(f"{drawn.title}: {fits}", color=INK)
        panels[0].set_ylabel(f"{unit_name} at the peak")
        shown = {kind: colour for kind, colour in COLOURS.items() if kind in curves[0].full}
        save(finish(figure, "What fits, and why", [about], swatches(shown)), [path])


def draw_curve(axes: Any, drawn: Curve, budget: int, top: float, unit: int) -> None:
    """Draw one loop's panel. top: the highest byte shown. unit: bytes per unit of the axis."""
    sizes = list(drawn.by_size)
    shown = [kind for kind in COLOURS if kind in drawn.full]
    stacked = [[drawn.by_size[size][kind] / unit for size in sizes] for kind in shown]
    colours = [COLOURS[kind] for kind in shown]
    if len(sizes) > 1:
        axes.stackplot(sizes, stacked, colors=colours, linewidth=0)
    else:
        _bar(axes, sizes[0], 0.6, drawn.by_size[sizes[0]], shown, unit)
    wide = max(1.0, 0.09 * sizes[-1])
    place = sizes[-1] + 1.6 * wide
    _bar(axes, place, wide, drawn.full, shown, unit)
    height = sum(drawn.full.values())
    cut = height > top
    words = f"whole: {format_bytes(height)}" + (", cut" if cut else "")
    axes.text(
        place + wide / 2,
        min(height, 0.94 * top) / unit,
        words,
        fontsize=8.5,
        color=INK,
        ha="right",
        va="bottom",
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1},
    )
    if budget <= top:
        axes.axhline(budget / unit, color=INK, linestyle=(0, (5, 2)), linewidth=1.6)
        axes.text(
            sizes[0], budget / unit, f" budget {format_bytes(budget)}", va="bottom", fontsize=9, color=INK
        )
    if drawn.chosen is not None and drawn.chosen <= sizes[-1]:
        axes.axvline(drawn.chosen, color=INK, linewidth=1, linestyle=":")
    step = max(1, round((sizes[-1] - 1) / 6))
    ticks = list(range(1, sizes[-1] + 1, step))
    axes.set_xticks([*ticks, place], [*map(str, ticks), str(drawn.samples)])
    axes.set(xlim=(sizes[0] - (0.5 if len(sizes) == 1 else 0), place + wide), ylim=(0, top / unit))
    axes.set_xlabel("samples in a micro-batch; the bar: all samples at once")


def _bar(
    axes: Any, x: float, width: float, kinds: Mapping[str, int], shown: Sequence[str], unit: int
) -> None:
    base = 0.0
    for kind in shown:
        size = kinds[kind] / unit
        axes.bar(x, size, width, base, color=COLOURS[kind], linewidth=0)
        base += size
