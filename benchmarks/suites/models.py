"""A window of 8 micro-batches and its update, on the parameter lists of real models, by loop.

mode "window k=8", metric "time": a whole window, with the bytes and operators that a TrafficMeter counts.
mode "window k=8", metric "bytes: total" and, for case "counted" only, "bytes: PART" for each of
    windows.PARTS: bytes of one window in B/param. They depend on the loop, not on the model.
mode "accumulate", metric "time": one pass over the whole list, `sum += gradient / 8`.

The `note` of a window begins with the loop's role (see `windows.WindowVariant`). If memory does not suffice,
a model keeps as many of its first layers as fit; `shapes` says how many.
"""

import dataclasses
import gc
import statistics
from collections import Counter
from collections.abc import Sequence

import torch

from fusedacc.commands.bench.cases import Additions
from fusedacc.commands.timing import cpu_timer, synchronize, timer_for
from fusedacc.traffic import TrafficMeter

from .. import harness
from ..contestants import model_shapes, windows
from ..contestants.loops import Loop
from ..contestants.model_shapes import Parameters
from ..contestants.windows import DTYPES, PARTS, SETTINGS, Memory, WindowVariant, moved, part_of
from ..harness import BF16, F32, Names, measure, progress
from ..records import Case, Goal, Results, Row, Variant, cannot_run, row
from . import kernels

PROVIDERS = tuple(variant.name for variant in (*windows.VARIANTS, *windows.COUNTED_ONLY))
#: Micro-batches per window.
STEPS = 8
MODE = f"window k={STEPS}"
COUNTED: Parameters = [(f"weight{index}", (512, 512)) for index in range(4)]
#: Parts of the counted window with fewer bytes per parameter are scalars, and left out.
NOTHING = 0.01
SHORT = ["resnet50", "gpt2"]
#: The roles that are measured if all would take too long or too much memory.
MAIN_ROLES = ("as written", "best stock", "ours", "floor")
#: In the short sweep, longer lists have the main roles without the floor, and no autocast.
SMALL = 64 * 10**6
#: Seconds to time one case, and the most rounds. The least are three.
PATIENCE = {"quick": (1.0, 3), "short": (6.0, 5), "full": (30.0, 15)}
#: One accumulate pass: stock's loop, its foreach forms, and the least speed of ours relative to the loop and
#: to the fastest foreach form (0: no goal).
LOOP, FOREACH = "add_", ("torch._foreach_add_", "foreach cast and add")
BACKENDS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}
PASS_GOALS = {"cpu": (1.0, 1.0), "cuda": (0.0, 1.5)}


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
    results: Results, effort: str, *, models: Names = None, settings: Names = None, providers: Names = None
) -> None:
    """Count bytes on a small list. Then, per model, time windows and one accumulate pass per dtype."""
    count(results, settings, providers)
    for name in models or {"quick": SHORT[:1], "short": SHORT}.get(effort, model_shapes.NAMES):
        whole = model_shapes.load(name, effort == "quick")
        brief = effort == "short" and model_shapes.elements(whole) > SMALL
        for setting in settings or [name for name in SETTINGS if not (brief and name == "autocast")]:
            of = variants(windows.VARIANTS, setting, providers)
            if brief and not providers:
                of = [each for each in of if each.role in MAIN_ROLES and each.role != "floor"]
            if of:
                model(results, name, whole, setting, of, effort)
                release()
        for dtype in (BF16, F32):
            one_pass(results, name, whole, dtype, effort)
            release()


def variants(of: Sequence[WindowVariant], setting: str, providers: Names) -> list[WindowVariant]:
    return [each for each in of if setting in each.settings and each.name in (providers or PROVIDERS)]


def one_pass(results: Results, name: str, whole: Parameters, dtype: torch.dtype, effort: str) -> None:
    """Add gradients of `dtype` to float32 sums, for as many layers as fit into memory."""
    device = results.device
    # Sums, gradients, and what a case takes besides.
    parameters = model_shapes.fitting_memory(whole, 2 * (4 + dtype.itemsize) + 20, device)
    shapes = model_shapes.describe(parameters or whole, whole)
    case = Case("models", name, "accumulate", shapes, f"{str(dtype)[6:]} into float32")
    ours = [f"fusedacc {backend}" for backend in BACKENDS[device.type]]
    names = [LOOP, *FOREACH, *ours]
    if not parameters:
        results.add([cannot_run(case, name, model_shapes.NO_MEMORY) for name in names])
        return
    work = Additions(name, model_shapes.shapes(parameters), (dtype, F32), device)
    facts = kernels.measure(work, names, kernels.EFFORTS[effort])
    forms = {e["name"]: e["samples"] for e in facts["ways"] if e["name"] in FOREACH and e["samples"]}
    best = min(forms, key=lambda form: statistics.median(forms[form]), default=LOOP)
    goals = [Goal(*pair) for pair in zip((LOOP, best), PASS_GOALS[device.type], strict=True)]
    results.add(kernels.rows(case, facts, dict.fromkeys(ours, goals)))


def count(results: Results, settings: Names = None, providers: Names = None) -> None:
    for setting in settings or SETTINGS:
        case = Case("models", "counted", MODE, "4 parameters of 512 x 512", DTYPES[setting])
        of = variants((*windows.VARIANTS, *windows.COUNTED_ONLY), setting, providers)
        opened = start(results, case, setting, of, COUNTED)
        for part in (*PARTS, "total"):
            found = [part_of_window(case, each, part, COUNTED) for each in opened]
            results.add([figure for figure in found if figure.median >= NOTHING])
        for each in opened:
            each.loop.close()


def model(
    results: Results, name: str, whole: Parameters, setting: str, of: list[WindowVariant], effort: str
) -> None:
    """Add the windows of a model in one setting: bytes, times, and ours against the other loops."""
    left_out: list[WindowVariant] = []
    if len(model_shapes.fitting_memory(whole, windows.need(setting, of), results.device)) < len(whole):
        main = [each for each in of if each.role in MAIN_ROLES] or of
        left_out = [each for each in of if each not in main]
        of = main
    needed = windows.need(setting, of)
    parameters = model_shapes.fitting_memory(whole, needed, results.device)
    shapes = model_shapes.describe(parameters or whole, whole)
    case = Case("models", name, MODE, shapes, DTYPES[setting])
    results.add([cannot_run(case, each.name, "left out, so that more layers fit") for each in left_out])
    if not parameters:
        size = needed * model_shapes.elements(whole) / 1e9
        why = f"{model_shapes.NO_MEMORY}; the whole model needs {size:.3g} GB"
        results.add([cannot_run(case, each.name, why) for each in of])
        return
    opened = start(results, case, setting, of, parameters)
    results.add([part_of_window(case, each, "total", parameters) for each in opened])
    exact = [each.variant for each in opened if each.variant.role in ("as written", "best stock", "stock")]
    goals = tuple(Goal(each.name, 1.0 if each.role == "best stock" else 0.0) for each in exact)
    timed = []
    for each in opened:
        variant = each.variant
        bytes_moved = each.meter.total_bytes
        held_to = goals if variant.role.startswith("ours") else ()
        timed.append(Variant(variant.name, each.run, bytes_moved, held_to, each.meter.calls, note=note(each)))
    patience, most = PATIENCE[effort]
    # One round is not timed. On CUDA an extra call before every timed one fills the queue.
    once = (2 if results.device.type == "cuda" else 1) * sum(each.seconds for each in opened)
    rounds = min(most, max(3, int(patience / once) - 1)) if once else most
    if timed:
        names = [variant.name for variant in timed]
        timer = timer_for(results.device)
        results.add(results.attempt(case, names, measure, case, timed, rounds, 1, timer) or [])
    for each in opened:
        each.loop.close()


def start(
    results: Results, case: Case, setting: str, of: Sequence[WindowVariant], parameters: Parameters
) -> list[Opened]:
    """Return the loops that can run here after two windows, the second counted. The others get a row."""
    memory = Memory(model_shapes.shapes(parameters), setting, results.device, STEPS)
    opened = []
    for variant in progress(of, f"{case.case}, {setting}", "loop"):
        if obstacle := variant.kind.obstacle():
            results.add([cannot_run(case, variant.name, obstacle)])
        elif loop := results.attempt(case, [variant.name], open_loop, variant, memory):
            opened.append(loop)
        else:
            release()
    return opened


def open_loop(variant: WindowVariant, memory: Memory) -> Opened:
    def timed_window() -> float:
        return cpu_timer(lambda: (opened.run(), synchronize(memory.device)), 1)

    opened = Opened(variant, variant.make(memory), TrafficMeter(), 0.0)
    opened.seconds = timed_window()
    opened.meter = TrafficMeter(opened.loop.parameters)
    source = opened.loop.model
    with opened.meter:
        source.phase = opened.meter.phase
        opened.loop.window([()] * memory.steps, opened.meter.phase)
        source.phase = None
    if memory.device.type == "cuda":  # the first one has built kernels
        opened.seconds = timed_window()
    return opened


def part_of_window(case: Case, opened: Opened, part: str, parameters: Parameters) -> Row:
    """Return the counted bytes of a part of a window, or of its "total", per parameter."""
    by_part: Counter[str] = Counter()
    for phase, ops in opened.meter.as_dict()["by_phase_and_op"].items():
        for op, found in ops.items():
            by_part[part_of(phase, op)] += moved(opened.loop, phase, op, found)
    size = sum(by_part.values()) if part == "total" else by_part[part]
    figure = {"metric": f"bytes: {part}", "unit": "B/param", "bytes": size, "note": note(opened)}
    figure |= {"median": size / model_shapes.elements(parameters)}
    return row(case, opened.variant.name, **figure, launches=opened.meter.calls if part == "total" else None)


def note(opened: Opened) -> str:
    """Return the loop's role, what it does, and what was not counted."""
    role = opened.variant.role
    text = opened.variant.note
    text = text if text.startswith(role) else f"{role}: {text}"
    missed = ", ".join(opened.meter.uncounted)
    return f"{text}; not counted: {missed}" if missed else text


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--count", action="store_true", help="only count bytes, on a small list")
    names = {"models": model_shapes.NAMES, "settings": SETTINGS, "providers": PROVIDERS}
    options, chosen_names = harness.parsed(parser, **names)
    if not options.count:
        harness.run(figures, options, **chosen_names)
        return
    kept = harness.results(options)
    count(kept, chosen_names["settings"], chosen_names["providers"])
    kept.report()


if __name__ == "__main__":
    main()
