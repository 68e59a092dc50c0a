"""A window of k micro-batches and its update on the parameter lists of real models, per way to accumulate.

    python -m benchmarks.suites.models [--models resnet50,gpt2] [--settings bfloat16] [--providers fusedacc]
    python -m benchmarks.suites.models --count      only the bytes, on a small list: seconds

Loops and settings are in contestants/windows.py, lists in contestants/shapes/. Rows of benchmark "models":

mode "window k=8", metric "time": a whole window; `bytes` and `launches` are what a TrafficMeter counts in it.
mode "window k=8", metric "bytes: total" and, for case "counted" only, "bytes: PART" for each of
    windows.PARTS: counted bytes of one window per parameter, in B/param. They depend on the way, not on the
    model. Case "counted" is a small list, but so large that scalars do not show. It alone has the way
    "fusedacc model=".
mode "accumulate", metric "time": one pass over the whole list, `sum += gradient / 8`.

The `note` of a window begins with the way's role: "as written", "best stock", "stock", "ours", "ours, manual
loop", "ours, model=", "inexact", "floor". All ways work on the same weights and Adam states in turns. Where
memory does not suffice, a model keeps the first of its layers, whole ones, and `shapes` says how many.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections import Counter
from collections.abc import Sequence

import torch

from fusedacc.commands.bench.lists import Additions
from fusedacc.commands.measuring.records import Case, Goal, Results, Row, Variant, cannot_run, first_line, row
from fusedacc.commands.measuring.timing import synchronize, timer_for
from fusedacc.kernels import registry
from fusedacc.traffic import TrafficMeter

from .. import harness
from ..contestants import model_shapes, windows
from ..contestants.loops import BF16, F32, Loop
from ..contestants.model_shapes import Parameters
from ..contestants.windows import DTYPES, PARTS, SETTINGS, Memory, WindowVariant, moved, part_of
from ..harness import chosen, measure, progress
from . import kernels

PROVIDERS = tuple(variant.name for variant in (*windows.VARIANTS, *windows.COUNTED_ONLY))
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


#: One accumulate pass: the loop and the forms of foreach, and how many times as fast as the loop and the
#: fastest foreach ours is to be (0: no goal).
LOOP, FOREACH = "add_", ("torch._foreach_add_", "foreach cast and add")
BACKENDS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}
PASS_GOALS = {"cpu": (1.0, 1.0), "cuda": (0.0, 1.5)}


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a window is like, whatever the model and the loop."""

    device: torch.device
    steps: int = 8
    clip: bool = True
    backend: str = "auto"

    @property
    def mode(self) -> str:
        return f"window k={self.steps}" + ("" if self.clip else ", no clipping")


@dataclasses.dataclass
class Opened:
    """A loop that has run a window, and what the next one moved and took."""

    variant: WindowVariant
    loop: Loop
    meter: TrafficMeter
    seconds: float

    def run(self) -> None:
        self.loop.window([()] * self.loop.task.steps)


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
    setup = Setup(results.device, steps, clip, backend)
    count(results, setup, settings=settings, providers=providers)
    for name in models or {"quick": SHORT[:1], "short": SHORT}.get(effort, model_shapes.NAMES):
        whole = model_shapes.load(name)
        if effort == "quick":
            whole = model_shapes.tiny(whole)
        brief = effort == "short" and model_shapes.elements(whole) > SMALL
        for setting in settings or [name for name in SETTINGS if not (brief and name == "autocast")]:
            of = variants(setting, providers)
            if brief and not providers:
                of = [each for each in of if each.role in MAIN_ROLES and each.role != "floor"]
            if of:
                model(results, name, whole, setting, of, effort, setup)
                release()
        for dtype in (BF16, F32):
            one_pass(results, name, whole, dtype, effort, backend)
            release()


def variants(setting: str, providers: Sequence[str] | None) -> list[WindowVariant]:
    return [each for each in windows.variants(setting) if not providers or each.name in providers]


def one_pass(
    results: Results, name: str, whole: Parameters, dtype: torch.dtype, effort: str, backend: str
) -> None:
    """Gradients of `dtype` into float32 sums, as many layers as memory has room for.

    backend: ours; "auto" for all that are made for the device.
    """
    device = results.device
    # Sums, gradients, and what a case takes beside them.
    parameters = model_shapes.fitting_memory(whole, 2 * (4 + dtype.itemsize) + 20, device)
    shapes = model_shapes.describe(parameters or whole, whole)
    case = Case("models", name, "accumulate", shapes, f"{str(dtype)[6:]} into float32")
    ours = [f"fusedacc {own}" for own in (BACKENDS[device.type] if backend == "auto" else (backend,))]
    names = [LOOP, *FOREACH, *ours]
    if not parameters:
        results.add([cannot_run(case, name, "no memory for one layer of each stack") for name in names])
        return
    work = Additions(name, model_shapes.shapes(parameters), dtype, F32, device)
    facts = kernels.measure(work, names, kernels.EFFORTS[effort])
    forms = {e["name"]: e["samples"] for e in facts["ways"] if e["name"] in FOREACH and e["samples"]}
    best = min(forms, key=lambda form: statistics.median(forms[form]), default=LOOP)
    goals = [Goal(*pair) for pair in zip((LOOP, best), PASS_GOALS[device.type], strict=True)]
    results.add(kernels.rows(case, facts, dict.fromkeys(ours, goals)))


# Windows


def count(
    results: Results,
    setup: Setup,
    *,
    settings: Sequence[str] | None = None,
    providers: Sequence[str] | None = None,
) -> None:
    """The bytes of a window by part, on a small list."""
    for setting in settings or SETTINGS:
        case = Case("models", "counted", setup.mode, "4 parameters of 512 x 512", DTYPES[setting])
        alone = [each for each in windows.COUNTED_ONLY if setting in each.settings]
        alone = [each for each in alone if not providers or each.name in providers]
        opened = start(results, case, setting, variants(setting, providers) + alone, COUNTED, setup)
        for part in (*PARTS, "total"):
            found = [part_of_window(case, each, part, COUNTED) for each in opened]
            results.add([figure for figure in found if figure.median >= NOTHING])
        stop(opened)


def model(
    results: Results,
    name: str,
    whole: Parameters,
    setting: str,
    of: list[WindowVariant],
    effort: str,
    setup: Setup,
) -> None:
    """The windows of a model in one setting: bytes and times of every loop, ours against the others."""
    left_out: list[WindowVariant] = []
    if len(model_shapes.fitting_memory(whole, windows.need(setting, of), setup.device)) < len(whole):
        main = [each for each in of if each.role in MAIN_ROLES] or of
        left_out, of = [each for each in of if each not in main], main
    needed = windows.need(setting, of)
    parameters = model_shapes.fitting_memory(whole, needed, setup.device)
    shapes = model_shapes.describe(parameters or whole, whole)
    case = Case("models", name, setup.mode, shapes, DTYPES[setting])
    results.add([cannot_run(case, each.name, "left out, so that more layers fit") for each in left_out])
    if not parameters:
        size = needed * model_shapes.elements(whole) / 1e9
        why = f"no memory for one layer of each stack; the whole model needs {size:.3g} GB"
        results.add([cannot_run(case, each.name, why) for each in of])
        return
    opened = start(results, case, setting, of, parameters, setup)
    results.add([part_of_window(case, each, "total", parameters) for each in opened])
    exact = [each.variant for each in opened if each.variant.role in ("as written", "best stock", "stock")]
    goals = tuple(Goal(each.name, 1.0 if each.role == "best stock" else 0.0) for each in exact)
    timed = [
        Variant(
            each.variant.name,
            each.run,
            each.meter.total_bytes,
            goals if each.variant.role.startswith("ours") else (),
            each.meter.calls,
            note=note(each),
        )
        for each in opened
    ]
    patience, most = PATIENCE[effort]
    # One round is not timed; on CUDA every timed call has one before it, to fill the queue.
    calls = 2 if setup.device.type == "cuda" else 1
    once = calls * sum(each.seconds for each in opened)
    rounds = min(most, max(3, int(patience / once) - 1)) if once else most
    try:
        rows = measure(case, timed, rounds, timer=timer_for(setup.device)) if timed else []
    except Exception as error:
        rows = [cannot_run(case, each.name, first_line(error)) for each in timed]
    results.add(rows)
    stop(opened)


def start(
    results: Results,
    case: Case,
    setting: str,
    of: Sequence[WindowVariant],
    parameters: Parameters,
    setup: Setup,
) -> list[Opened]:
    """The loops that can run here, each after two windows, the second counted. The others leave a row."""
    shapes = model_shapes.shapes(parameters)
    memory = Memory(shapes, setting, setup.device, setup.steps, setup.clip, setup.backend)
    opened = []
    for variant in progress(of, f"{case.case}, {setting}", "loop"):
        if obstacle := variant.kind.obstacle():
            results.add([cannot_run(case, variant.name, obstacle)])
            continue
        try:
            own = Opened(variant, variant.make(memory), TrafficMeter(), 0.0)
            own.seconds = one_window(own, setup.device)
            own.meter = TrafficMeter(own.loop.parameters)
            source = own.loop.model
            with own.meter:
                source.phase = own.meter.phase
                own.loop.window([()] * setup.steps, own.meter.phase)
                source.phase = None
            if setup.device.type == "cuda":  # the first one has built kernels
                own.seconds = one_window(own, setup.device)
            opened.append(own)
        except Exception as error:
            results.add([cannot_run(case, variant.name, first_line(error))])
            release()
    return opened


def one_window(opened: Opened, device: torch.device) -> float:
    begin = time.perf_counter()
    opened.run()
    synchronize(device)
    return time.perf_counter() - begin


def stop(opened: Sequence[Opened]) -> None:
    for each in opened:
        each.loop.close()


def part_of_window(case: Case, opened: Opened, part: str, parameters: Parameters) -> Row:
    """The counted bytes of a part of a window, or of its "total", per parameter."""
    by_part: Counter[str] = Counter()
    for phase, ops in opened.meter.as_dict()["by_phase_and_op"].items():
        for op, found in ops.items():
            by_part[part_of(phase, op)] += moved(opened.loop, phase, op, found)
    size = sum(by_part.values()) if part == "total" else by_part[part]
    return row(
        case,
        opened.variant.name,
        metric=f"bytes: {part}",
        unit="B/param",
        median=size / model_shapes.elements(parameters),
        bytes=size,
        launches=opened.meter.calls if part == "total" else None,
        note=note(opened),
    )


def note(opened: Opened) -> str:
    """The loop's role, what it does, and what was not counted."""
    role, text = opened.variant.role, opened.variant.note
    text = text if text.startswith(role) else f"{role}: {text}"
    missed = ", ".join(opened.meter.uncounted)
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
    if options.count:
        kept = harness.results(options)
        setup = Setup(kept.device, options.k, clip, options.backend)
        count(kept, setup, settings=settings, providers=providers)
        kept.report()
        return
    harness.run(
        figures,
        options,
        models=models,
        settings=settings if options.settings else None,
        providers=providers if options.providers else None,
        steps=options.k,
        clip=clip,
        backend=options.backend,
    )


if __name__ == "__main__":
    main()
