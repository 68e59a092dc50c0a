"""A window of k micro-batches and its update on the parameter lists of real models, per way to accumulate.

    python -m benchmarks.suites.models [--models resnet50,gpt2] [--settings bfloat16] [--providers fusedacc]
    python -m benchmarks.suites.models --count      only the bytes, on a small list: seconds

Ways are in contestants/windows.py, settings in contestants/synthetic_gradients.py, lists in
contestants/shapes/. Rows of benchmark "models":

mode "window k=8", metric "time": a whole window; `bytes` and `launches` are what a TrafficMeter counts in it.
mode "window k=8", metric "bytes: total" and, for case "counted" only, "bytes: PART" for each of
    window.PARTS: counted bytes of one window per parameter, in B/param. They depend on the way, not on the
    model. Case "counted" is a small list, but so large that scalars do not show. It alone has the way
    "fusedacc model=".
mode "accumulate", metric "time": one pass over the whole list (model_pass.py).

The `note` of a window begins with the way's role: "as written", "best stock", "stock", "ours", "ours, manual
loop", "ours, model=", "inexact", "floor". All ways work on the same weights and Adam states in turns. Where
memory does not suffice, a model keeps the first of its layers, whole ones, and `shapes` says how many.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import Counter

import torch

from fusedacc.commands.measuring.records import (
    Case,
    Goal,
    Results,
    Row,
    Variant,
    cannot_run,
    first_line,
    row,
)
from fusedacc.commands.measuring.timing import timer_for
from fusedacc.kernels import registry
from fusedacc.traffic import TrafficMeter

from .. import harness
from ..contestants import model_shapes, windows
from ..contestants.model_shapes import Parameters
from ..contestants.synthetic_gradients import BF16, DTYPES, F32, SETTINGS, Memory
from ..contestants.window import PARTS, Window, part_of
from ..harness import measure, chosen, progress
from . import model_pass

PROVIDERS = tuple(way.name for way in (*windows.WAYS, *windows.COUNTED_ONLY))
COUNTED: Parameters = [(f"weight{index}", (512, 512)) for index in range(4)]
#: Bytes per parameter below which a part of the counted window is left out: it is scalars.
NOTHING = 0.01
SHORT = ["resnet50", "gpt2"]
#: The ways that are run where all would take too long or too much memory.
MAIN_ROLES = ("as written", "best stock", "ours", "floor")
#: In the short sweep longer lists than this have the main ways but the floor, and no autocast.
SMALL = 64 * 10**6
#: Seconds to time one case for, and the most rounds. There are three rounds at least.
PATIENCE = {"quick": (1.0, 3), "short": (6.0, 5), "full": (30.0, 15)}


@dataclasses.dataclass(frozen=True)
class Loop:
    """What a window is like, whatever the model and the way."""

    device: torch.device
    steps: int = 8
    clip: bool = True
    backend: str = "auto"

    @property
    def mode(self) -> str:
        return f"window k={self.steps}" + ("" if self.clip else ", no clipping")


@dataclasses.dataclass
class Opened:
    """A way that has run a window, and what the next one moved and took."""

    window: Window
    meter: TrafficMeter
    seconds: float


def figures(
    results: Results,
    effort: str,
    *,
    models: list[str] | None = None,
    settings: list[str] | None = None,
    providers: list[str] | None = None,
    steps: int = 8,
    clip: bool = True,
    backend: str = "auto",
) -> None:
    """The bytes on a small list; then per model its windows, and one accumulate pass per gradient dtype."""
    loop = Loop(results.device, steps, clip, backend)
    count(results, loop, settings=settings, providers=providers)
    for name in models or {"quick": SHORT[:1], "short": SHORT}.get(effort, model_shapes.NAMES):
        whole = model_shapes.load(name)
        if effort == "quick":
            whole = model_shapes.tiny(whole)
        brief = effort == "short" and model_shapes.elements(whole) > SMALL
        for setting in settings or [name for name in SETTINGS if not (brief and name == "autocast")]:
            of = ways(setting, providers)
            if brief and not providers:
                of = [way for way in of if way.role in MAIN_ROLES and way.role != "floor"]
            if of:
                model(results, name, whole, setting, of, effort, loop)
                release()
        for dtype in (BF16, F32):
            model_pass.figures(results, name, whole, dtype, effort, backend)
            release()


def ways(setting: str, providers: list[str] | None) -> list[type[Window]]:
    return [way for way in windows.ways(setting) if not providers or way.name in providers]


# Windows


def count(
    results: Results,
    loop: Loop,
    *,
    settings: list[str] | None = None,
    providers: list[str] | None = None,
) -> None:
    """The bytes of a window by part, on a small list."""
    for setting in settings or SETTINGS:
        case = Case("models", "counted", loop.mode, "4 parameters of 512 x 512", DTYPES[setting])
        alone = [way for way in windows.COUNTED_ONLY if setting in way.settings]
        alone = [way for way in alone if not providers or way.name in providers]
        opened = start(results, case, setting, ways(setting, providers) + alone, COUNTED, loop)
        for part in (*PARTS, "total"):
            found = [part_of_window(case, way, part, COUNTED) for way in opened]
            results.add([figure for figure in found if figure.median >= NOTHING])
        stop(opened)


def model(
    results: Results,
    name: str,
    whole: Parameters,
    setting: str,
    of: list[type[Window]],
    effort: str,
    loop: Loop,
) -> None:
    """The windows of a model in one setting: bytes and times of every way, ours against the others."""
    left_out: list[type[Window]] = []
    if len(model_shapes.fitting_memory(whole, windows.need(setting, of), loop.device)) < len(whole):
        left_out = [way for way in of if way.role not in MAIN_ROLES]
        of = [way for way in of if way.role in MAIN_ROLES] or left_out
        left_out = [way for way in left_out if way not in of]
    needed = windows.need(setting, of)
    parameters = model_shapes.fitting_memory(whole, needed, loop.device)
    shapes = model_shapes.describe(parameters or whole, whole)
    case = Case("models", name, loop.mode, shapes, DTYPES[setting])
    results.add([cannot_run(case, way.name, "left out, so that more layers fit") for way in left_out])
    if not parameters:
        size = needed * model_shapes.elements(whole) / 1e9
        why = f"no memory for one layer of each stack; the whole model needs {size:.3g} GB"
        results.add([cannot_run(case, way.name, why) for way in of])
        return
    opened = start(results, case, setting, of, parameters, loop)
    results.add([part_of_window(case, way, "total", parameters) for way in opened])
    exact = [way.window for way in opened if way.window.role in ("as written", "best stock", "stock")]
    goals = tuple(Goal(window.name, 1.0 if window.role == "best stock" else 0.0) for window in exact)
    variants = [
        Variant(
            way.window.name,
            way.window.run,
            way.meter.total_bytes,
            goals if way.window.role.startswith("ours") else (),
            way.meter.calls,
            note=note(way),
        )
        for way in opened
    ]
    patience, most = PATIENCE[effort]
    # One round is not timed; on CUDA every timed call has one before it, to fill the queue.
    calls = 2 if loop.device.type == "cuda" else 1
    once = calls * sum(way.seconds for way in opened)
    rounds = min(most, max(3, int(patience / once) - 1)) if once else most
    try:
        rows = measure(case, variants, rounds, timer=timer_for(loop.device)) if variants else []
    except Exception as error:
        rows = [cannot_run(case, variant.name, first_line(error)) for variant in variants]
    results.add(rows)
    stop(opened)


def start(
    results: Results,
    case: Case,
    setting: str,
    of: list[type[Window]],
    parameters: Parameters,
    loop: Loop,
) -> list[Opened]:
    """The ways that can run here, each after two windows, the second counted. The others leave a row."""
    memory = Memory(model_shapes.shapes(parameters), setting, loop.device)
    opened = []
    for way in progress(of, f"{case.case}, {setting}", "way"):
        if obstacle := way.obstacle():
            results.add([cannot_run(case, way.name, obstacle)])
            continue
        try:
            window = way(memory, loop.steps, loop.clip, loop.backend)
            seconds = one_window(window, loop.device)
            meter = TrafficMeter(window.parameters)
            with meter, window.counting(meter.phase):
                window.run()
            if loop.device.type == "cuda":  # the first one has built kernels
                seconds = one_window(window, loop.device)
            opened.append(Opened(window, meter, seconds))
        except Exception as error:
            results.add([cannot_run(case, way.name, first_line(error))])
            release()
    return opened


def one_window(window: Window, device: torch.device) -> float:
    """Seconds, roughly."""
    begin = time.perf_counter()
    window.run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def stop(opened: list[Opened]) -> None:
    for way in opened:
        way.window.close()


def part_of_window(case: Case, way: Opened, part: str, parameters: Parameters) -> Row:
    """The counted bytes of a part of a window, or of its "total", per parameter."""
    by_part: Counter[str] = Counter()
    for phase, ops in way.meter.as_dict()["by_phase_and_op"].items():
        for op, found in ops.items():
            by_part[part_of(phase, op)] += way.window.moved(phase, op, found)
    size = sum(by_part.values()) if part == "total" else by_part[part]
    return row(
        case,
        way.window.name,
        metric=f"bytes: {part}",
        unit="B/param",
        median=size / model_shapes.elements(parameters),
        bytes=size,
        launches=way.meter.calls if part == "total" else None,
        note=note(way),
    )


def note(way: Opened) -> str:
    """The way's role, what it does, and what was not counted."""
    window = way.window
    text = window.note if window.note.startswith(window.role) else f"{window.role}: {window.note}"
    missed = ", ".join(way.meter.uncounted)
    return f"{text}; not counted: {missed}" if missed else text


# Memory


def release() -> None:
    """Gives back what is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--models", help=f"comma-separated; allowed: {', '.join(model_shapes.NAMES)}")
    parser.add_argument("--settings", help=f"comma-separated; allowed: {', '.join(SETTINGS)}")
    parser.add_argument("--providers", help=f"comma-separated; allowed: {', '.join(PROVIDERS)}")
    parser.add_argument("--k", type=int, default=8, help="micro-batches per window (%(default)s)")
    parser.add_argument("--no-clip", action="store_true", help="leave clipping out")
    parser.add_argument("--backend", default="auto", choices=("auto", *registry.NAMES), help="fusedacc's")
    parser.add_argument("--count", action="store_true", help="only count bytes, on a small list")
    options = parser.parse_args()
    if options.k < 1:
        raise SystemExit(f"--k must be at least 1; got {options.k}")
    models = chosen(options.models, model_shapes.NAMES, "model") if options.models else None
    settings = chosen(options.settings, SETTINGS, "setting")
    providers = chosen(options.providers, PROVIDERS, "provider")
    clip = not options.no_clip
    kept = harness.results(options)
    if options.count:
        loop = Loop(kept.device, options.k, clip, options.backend)
        count(kept, loop, settings=settings, providers=providers)
    else:
        figures(
            kept,
            harness.effort(options),
            models=models,
            settings=settings if options.settings else None,
            providers=providers if options.providers else None,
            steps=options.k,
            clip=clip,
            backend=options.backend,
        )
    kept.report()


if __name__ == "__main__":
    main()
