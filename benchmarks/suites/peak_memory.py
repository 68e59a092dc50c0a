"""Peak memory of the demo's training loop, stock against wrapped, by two instruments in fresh processes.

- live bytes: every allocation and release that torch's CPU allocator reports, down to the byte (on a GPU the
  caching allocator's own count);
- resident: the kernel's high-water mark of the process (VmHWM, reset after a warm-up), with malloc told to
  hand every large block back at once (`MALLOC` below).

The goal: no more than stock's, with sums of the same dtype, plus one bucket of 25 MB.

    python -m benchmarks.suites.peak_memory [--quick | --full]
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from examples.demo.loops import DTYPES, Config, StockLoop, WrappedLoop
from examples.demo.measure import peak_memory, run
from examples.demo.model import load_text
from fusedacc.commands.measuring.records import Case, Results, at_most, cannot_run, first_line, row

from .. import harness
from ..harness import processes, progress

BUCKET = 25_000_000
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
SLEEPING_THREADS = {"OMP_WAIT_POLICY": "passive"}  # nothing is timed, and other work may run beside
KINDS = {kind.name: kind for kind in (StockLoop, WrappedLoop)}


def resident(field: str) -> int:
    """Bytes of `field` (VmRSS, VmHWM) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status holds no {field}")


def measure_here(loop: str, config: Config, updates: int) -> dict[str, int]:
    """Each instrument in turn, after one warm-up update whose tensors are gone; on a GPU only the first."""
    text = load_text()
    run(KINDS[loop], config, text, 1)
    if config.device.type != "cpu":
        return {"live": peak_memory(KINDS[loop], config, text, updates)}
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run(KINDS[loop], config, text, updates)
    high_water = resident("VmHWM") - before
    return {"live": peak_memory(KINDS[loop], config, text, updates), "resident": high_water}


def measure_fresh(loop: str, config: Config, updates: int) -> dict[str, int]:
    with processes(MALLOC | SLEEPING_THREADS, 1) as pool:
        return pool.submit(measure_here, loop, config, updates).result()


def figures(results: Results, effort: str) -> None:
    """`speedup` is the room left: (stock + bucket) / wrapped, which must be at least 1.

    Windows of 2 micro-batches: with more, the peak is the same.
    """
    cases = {
        "quick": [(32, "float32")],
        "short": [(256, "float32"), (256, "bfloat16"), (256, "autocast")],
        "full": [(width, dtype) for width in (256, 768) for dtype in DTYPES],
    }[effort]
    steps, updates = 2, 1 if effort == "quick" else 2
    for width, dtype in progress(cases, "peak memory", "case"):
        shapes = f"transformer of 3 blocks of width {width}, {steps} micro-batches"
        dtypes = {"bfloat16": "bfloat16 into float32"}.get(dtype, dtype)
        case = Case("peak_memory", f"demo, width {width}", "training", shapes, dtypes)
        try:
            config = dataclasses.replace(Config(dtype, results.device, steps), width=width)
            peaks = {loop: measure_fresh(loop, config, updates) for loop in KINDS}
        except Exception as error:
            results.add([cannot_run(case, loop, first_line(error)) for loop in KINDS])
            continue
        for instrument in peaks["stock"]:
            seen = dataclasses.replace(case, case=f"{case.case}, {instrument} bytes")
            stock, ours = (peaks[loop][instrument] / 1e6 for loop in ("stock", "fusedacc"))
            figure = {"metric": "peak memory", "unit": "MB"}
            goal = at_most(stock + BUCKET / 1e6, ours, "stock + bucket")
            results.add([row(seen, "stock", **figure, median=stock)])
            results.add([row(seen, "fusedacc", **figure, median=ours, **goal)])


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
