"""Every way to do `accumulator += scale * gradient`, by dtype pair and size: one tensor, lists, products.

    python -m benchmarks.suites.kernels [--quick | --full] [--sizes 64Mi,1000x1000] [--device cuda]
                                        [--dtypes bfloat16:float32] [--providers "fusedacc cpu,add_"]

Dtypes are gradient:accumulator. The providers are those of `contestants/accumulate.py`; `copy` and `triad`,
which are the peak, always run.

Buffers are rotated: a case has several sets of tensors, and consecutive calls of one provider take one set
after the other, so that none finds what it just left in a cache. The sets hold at least 64 MiB, on CUDA also
four times the second-level cache, as far as 512 sets, 20,000 tensors and memory allow; cases say how many.
A last-level cache that is larger than that (some servers have hundreds of MiB) still holds small cases whole.
Lists of many small tensors are cold in another way too: torch's own records of them, hundreds of bytes each,
have left the caches. Cases called "the same" leave that out: one set, on every call.

The triad is in place (a += s * b), as an accumulation is. Before it writes elsewhere, as in the copy, a CPU
reads what is there, which no count of bytes has.

Time: providers in turns, as many calls per sample as take half a millisecond. On CUDA the time is the
device's, with the calls queued behind a kernel that waits, so that the host is not what is timed; a provider
that synchronises, or fills the queue, shows as the time it takes. `host_us` is the host's part (see
`results.Row`), empty for compiled providers on a CPU, which would compile anew. `bytes` are counted by
`fusedacc.traffic.TrafficMeter` in one call, or follow a formula where torch's dispatcher does not show them;
the note says so. `launches`: operators that move data on a CPU, kernels on CUDA (by torch.profiler).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fusedacc.commands.bench import timing
from fusedacc.commands.bench.conditions import available_memory
from fusedacc.commands.bench.measuring import rotated

from ..contestants.accumulate import ACCUMULATE, Provider
from ..contestants.products import PRODUCT
from ..harness import command
from ..harness.command import chosen
from ..harness.measure import PEAK, Variant, measure, progress, timer_for
from ..harness.results import Case, Results, Row, cannot_run, first_line
from .kernel_cases import (
    DTYPES,
    GOALS,
    LISTS,
    MAIN_DTYPES,
    OTHER_DTYPES_ON_CUDA,
    PRODUCT_DTYPES,
    PRODUCTS,
    SIZES,
    SWEEPS,
    Work,
)

SCALE = 0.125
SAMPLE_SECONDS = 0.5e-3
CALL = "one call of "
PROVIDERS = tuple(dict.fromkeys((*ACCUMULATE, *PRODUCT)))


# What is known of one provider before it is timed


def moved(provider: Provider, run: Callable[[], object], by_hand: int) -> tuple[int, int | None, str]:
    """Bytes and operator calls of one call, and a note where the bytes follow the formula."""
    if provider.counted:
        from fusedacc.traffic import TrafficMeter

        with TrafficMeter() as meter:
            run()
        if not meter.uncounted:
            return meter.total_bytes, meter.calls, ""
    return by_hand, None, "bytes by formula"


def host_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds to issue one call into an empty queue (on a CPU: of the call)."""
    if device.type == "cuda":
        return timing.host_seconds(run)
    run()
    calls = max(1, min(100, int(100e-6 / max(timing.cpu_timer(run, 1), 1e-7))))
    return statistics.median(timing.cpu_timer(run, calls) for _ in range(7))


def kernels_of(variants: Sequence[Variant]) -> dict[str, int]:
    """Kernels that one call of each launches, by one profile of all."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for variant in variants:
            torch.cuda.synchronize()
            with record_function(CALL + variant.name):
                variant.run()
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return kernels_in(events, [variant.name for variant in variants])


def kernels_in(events: Sequence[dict], names: Sequence[str]) -> dict[str, int]:
    """From a trace's events: the kernels that started within the annotation of each name that has one."""
    starts = [event["ts"] for event in events if event.get("cat") == "kernel"]
    found = {}
    for event in events:
        name = str(event.get("name", "")).removeprefix(CALL)
        if event.get("cat") == "user_annotation" and name in names:
            found[name] = sum(event["ts"] <= start < event["ts"] + event["dur"] for start in starts)
    return found


def with_kernels(variants: Sequence[Variant]) -> list[Variant]:
    """The variants with the kernels that they launch, or a note why these were not counted."""
    try:
        found = kernels_of(variants)
    except Exception as error:
        note = f"launches not counted: {first_line(error)}"
        return [
            dataclasses.replace(variant, launches=None, note="; ".join(filter(None, (variant.note, note))))
            for variant in variants
        ]
    return [dataclasses.replace(variant, launches=found.get(variant.name)) for variant in variants]


# One cell


def figures_of(work: Work, providers: dict[str, Provider], hosts: dict[tuple, float]) -> list[Row]:
    """The rows of one cell; `hosts` keeps host times of calls that are the same for all sizes."""
    available = available_memory(work.device)
    sets = work.sets(available)
    case = work.case(sets)
    if sets == 0:
        return [
            cannot_run(case, "all", f"needs {work.held_bytes} bytes; {available} of memory are available")
        ]
    try:
        tensors = [work.make() for _ in range(sets)]
    except (MemoryError, RuntimeError) as error:
        return [cannot_run(case, "all", first_line(error))]
    rows, variants = [], []
    for provider in providers.values():
        try:
            found = variant_of(work, provider, tensors, hosts)
        except Exception as error:
            found = first_line(error)
        if isinstance(found, str):
            rows.append(cannot_run(case, provider.name, found))
        else:
            variants.append(found)
    if work.device.type == "cuda":
        variants = with_kernels(variants)
    names = {variant.name for variant in variants}
    variants = [
        dataclasses.replace(v, goals=tuple(goal for goal in v.goals if goal.against in names))
        for v in variants
    ]
    return measure(case, variants, rounds(work), timer=fitting_timer(work)) + rows


def variant_of(
    work: Work, provider: Provider, tensors: Sequence[tuple[list[Tensor], list]], hosts: dict[tuple, float]
) -> Variant | str:
    """The provider over the sets of tensors, warmed up and counted; or why it cannot run."""
    accumulators, gradients = tensors[0]
    why = provider.unsupported(accumulators, gradients)
    if why is None and provider.compiled:
        why = work.compile_obstacle()
    if why is not None:
        return why
    sizes = (work.accumulator.itemsize, work.gradient.itemsize)
    needed = provider.kept(*sizes) * work.elements * len(tensors)
    needed += provider.temporary(*sizes) * max(map(math.prod, work.shapes))
    available = available_memory(work.device)
    if needed > available:
        return f"needs {needed} bytes beside the tensors; {available} of memory are available"
    assert provider.make is not None
    runs = [provider.make(*lists, SCALE) for lists in tensors]
    for run in runs:
        run()
    size, launches, note = moved(provider, runs[0], provider.moved(accumulators, gradients))
    run = rotated(runs)
    if work.device.type == "cuda":
        host = host_seconds(run, work.device)
    elif provider.compiled:
        host = None
    else:
        key = (provider.name, work.dtypes, work.is_product, len(work.shapes))
        if key not in hosts:
            hosts[key] = host_seconds(provider.make(*work.smallest(), SCALE), work.device)
        host = hosts[key]
    return Variant(
        provider.name,
        run,
        size,
        GOALS.get((work.size, work.dtypes, provider.name), ()),
        launches,
        None if host is None else 1e6 * host,
        "; ".join(filter(None, (provider.note, note))),
    )


def rounds(work: Work) -> int:
    if work.effort == "quick":
        return 3
    if work.device.type == "cuda":
        return 9
    if work.effort == "short":
        return 7 if work.elements >= 2**24 else 15
    return 5 if work.elements >= 2**28 else 15 if work.elements >= 2**24 else 31


def fitting_timer(work: Work) -> timing.Timer:
    """A timer that makes as many calls per sample as take half a millisecond, for each function its own."""
    timer = timer_for(work.device)
    most = 200 if work.device.type == "cuda" else 1000
    least = 10 if work.is_same else 1  # the first of a sample finds what other providers left in the caches

    @functools.cache
    def calls_of(run: Callable[[], object]) -> int:
        seconds = statistics.median(timer(run, 1) for _ in range(3))
        return max(least, min(most, math.ceil(SAMPLE_SECONDS / max(seconds, 1e-7))))

    return lambda run, calls: timer(run, calls_of(run))


# The sweep


def runnable(registry: dict[str, Provider], names: Sequence[str], mode: str, results: Results):
    """The providers of those names that can run on the device; a row says why of each other."""
    found = {}
    for name in (*PEAK, *(name for name in names if name in registry and name not in PEAK)):
        why = registry[name].unavailable(results.device)
        if why is None:
            found[name] = registry[name]
        else:
            results.add([cannot_run(Case("kernels", "cannot run here", mode), name, why)])
    return found


def figures(
    results: Results,
    effort: str,
    *,
    providers: Sequence[str] = PROVIDERS,
    dtypes: Sequence[str] | None = None,
    sizes: Sequence[str] | None = None,
) -> None:
    """Measures the sweep of that effort, or the dtypes and sizes given; each cell's rows are kept at once."""
    if sizes is None:
        # The goal for a GPU is on a size that no CPU's short sweep has time for.
        on_gpu = effort == "short" and results.device.type == "cuda"
        sizes = (*SWEEPS[effort], *(["1Gi"] if on_gpu else []))
    pairs = (tuple(DTYPES) if effort == "full" else MAIN_DTYPES) if dtypes is None else dtypes
    left_out: set[str] = set()
    if dtypes is None and results.device.type == "cuda":
        left_out = set(LISTS) - set(OTHER_DTYPES_ON_CUDA)
    hosts: dict[tuple, float] = {}
    for registry, mode, own in ((ACCUMULATE, "accumulate", LISTS), (PRODUCT, "product", PRODUCTS)):
        chosen_sizes = [size for size in sizes if size in own]
        chosen_pairs = [pair for pair in pairs if mode == "accumulate" or pair in PRODUCT_DTYPES]
        if not chosen_sizes or not chosen_pairs:
            continue
        able = runnable(registry, providers, mode, results)
        cells = [
            (size, pair)
            for size, pair in itertools.product(chosen_sizes, chosen_pairs)
            if size not in left_out or pair in MAIN_DTYPES
        ]
        for size, pair in progress(cells, f"kernels, {mode}", "case"):
            work = Work(size, pair, results.device, effort)
            try:
                rows = figures_of(work, able, hosts)
            except RuntimeError as error:  # out of memory, say: the other cases still run
                rows = [cannot_run(work.case(0), "all", first_line(error))]
            results.add(rows)
            free_compiled(able)


def free_compiled(providers: dict[str, Provider]) -> None:
    """Lets the tensors of a case go, and its compiled code: the next case would count as a recompilation."""
    if any(provider.compiled for provider in providers.values()):
        torch._dynamo.reset()
    gc.collect()


def main() -> None:
    parser = command.arguments(__doc__)
    described = {**PRODUCT, **ACCUMULATE}
    parser.epilog = "providers:\n" + "\n".join(f"  {n:<28}{described[n].description}" for n in PROVIDERS)
    parser.add_argument("--providers", help="comma-separated; copy and triad always run (default: all)")
    parser.add_argument("--dtypes", help=f"comma-separated, of {', '.join(DTYPES)}")
    parser.add_argument("--sizes", help=f"comma-separated, of {', '.join(SIZES)}")
    options = parser.parse_args()
    own = {
        "providers": chosen(options.providers, PROVIDERS, "provider"),
        "dtypes": chosen(options.dtypes, tuple(DTYPES), "dtypes") if options.dtypes else None,
        "sizes": chosen(options.sizes, SIZES, "size") if options.sizes else None,
    }
    command.run(figures, options, **own)


if __name__ == "__main__":
    main()
