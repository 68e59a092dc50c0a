"""Peak memory of the demo's training loop, stock against wrapped, measured in two ways in new processes.

- live bytes: every allocation and release that torch's CPU allocator reports (on a GPU the caching
  allocator's count);
- resident: the kernel's high-water mark of the process (VmHWM, reset after a warm-up). `MALLOC` makes the C
  library return every large block at once.

Goal: no more than stock's with sums of the same dtype, within 2 %. On a GPU the gradients that may wait for a
launch come on top.
"""

import dataclasses
import itertools
from pathlib import Path

from examples.demo.loops import DTYPES, Config, StockLoop, WrappedLoop
from examples.demo.measure import peak_memory, run
from examples.demo.model import load_text

from .. import harness
from ..harness import in_process, processes, progress
from ..records import Case, Results, value_rows
from .training import waiting_megabytes

#: How much more than its goal's limit a peak may be, because two processes never allocate alike.
ROOM = 0.02
#: OpenMP's threads sleep, because nothing is timed.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "OMP_WAIT_POLICY": "passive",
}
KINDS = {kind.name: kind for kind in (StockLoop, WrappedLoop)}


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status holds no {field}")


def measure_here(loop: str, config: Config, updates: int) -> dict[str, int]:
    """Return both figures after one warm-up update; on a GPU only the first."""
    text = load_text()
    found = {}
    run(KINDS[loop], config, text, 1)
    if config.device.type == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        run(KINDS[loop], config, text, updates)
        found = {"resident": resident("VmHWM") - before}
    return {"live": peak_memory(KINDS[loop], config, text, updates), **found}


def measure_fresh(loop: str, config: Config, updates: int) -> dict[str, int]:
    with processes(MALLOC, 1) as pool:
        return in_process(pool, measure_here, loop, config, updates)


def figures(results: Results, effort: str) -> None:
    """Measure windows of 2 micro-batches. With more, the peak is the same."""
    widths = {"quick": (32,), "short": (256,), "full": (256, 768)}[effort]
    cases = list(itertools.product(widths, ("float32",) if effort == "quick" else DTYPES))
    steps = 2
    updates = 1 if effort == "quick" else 2
    waiting = waiting_megabytes(results.device)
    for width, dtype in progress(cases, "peak memory", "case"):
        shapes = f"transformer of 3 blocks of width {width}, {steps} micro-batches"
        dtypes = {"bfloat16": "bfloat16 into float32"}.get(dtype, dtype)
        case = Case("peak_memory", f"demo, width {width}", "training", shapes, dtypes)
        config = dataclasses.replace(Config(dtype, results.device, steps), width=width)
        peaks = {kind: results.attempt(case, [kind], measure_fresh, kind, config, updates) for kind in KINDS}
        for instrument in peaks["stock"] if all(peaks.values()) else ():
            seen = dataclasses.replace(case, case=f"{case.case}, {instrument} bytes")
            peak = {loop: peaks[loop][instrument] / 1e6 for loop in KINDS}
            limits = {"fusedacc": (peak["stock"] + waiting, "stock", ROOM)}
            results.add(value_rows(seen, "peak memory", "MB", peak, limits))


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
