"""Peak memory of the demo's training loop, stock against wrapped, by two instruments in fresh processes.

- live bytes: every allocation and release that torch's CPU allocator reports, down to the byte (on a GPU the
  caching allocator's own count);
- resident: the kernel's high-water mark of the process (VmHWM, reset after a warm-up), with malloc told to
  hand every large block back at once (`MALLOC` below).

The goal: no more than stock's, with sums of the same dtype, plus one bucket of 25 MB.

    python benchmarks/peak_memory.py [--quick]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from common import RESULTS, ROOT, Row, reached, report
from tqdm import tqdm

sys.path.insert(0, str(ROOT / "examples"))
from demo.loops import DTYPES, LOOPS, Config
from demo.measure import peak_memory, run
from demo.model import load_text

BUCKET = 25_000_000
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
SLEEPING_THREADS = {"OMP_WAIT_POLICY": "passive"}  # nothing is timed, and other work may run beside
KINDS = {kind.name: kind for kind in LOOPS}


def resident(field: str) -> int:
    """Bytes of `field` (VmRSS, VmHWM) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status holds no {field}")


def measure_here(loop: str, config: Config, updates: int) -> dict[str, int]:
    """Both instruments, one after the other, after one warm-up update whose tensors are gone."""
    text = load_text()
    run(KINDS[loop], config, text, 1)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run(KINDS[loop], config, text, updates)
    high_water = resident("VmHWM") - before
    return {"live": peak_memory(KINDS[loop], config, text, updates), "resident": high_water}


def measure_fresh(loop: str, dtype: str, width: int, steps: int, updates: int, device: str) -> dict[str, int]:
    command = [sys.executable, __file__, "--measure", loop, "--dtype", dtype, "--width", str(width)]
    command += ["--steps", str(steps), "--updates", str(updates), "--device", device]
    found = subprocess.run(
        command, env={**os.environ, **MALLOC, **SLEEPING_THREADS}, capture_output=True, text=True
    )
    if found.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{found.stderr}")
    return json.loads(found.stdout.splitlines()[-1])


def figures(quick: bool = False, device: str = "cpu") -> list[Row]:
    """`speedup` is the room left: (stock + bucket) / wrapped, which must be at least 1.

    Windows of 2 micro-batches: with more, the peak is the same.
    """
    cases = [(256, "float32"), (256, "bfloat16"), (256, "autocast"), (768, "float32"), (768, "bfloat16")]
    if quick:
        cases = [(32, "float32")]
    steps, updates = 2, 1 if quick else 2
    rows = []
    for width, dtype in tqdm(cases, desc="peak memory", leave=False):
        peaks = {loop: measure_fresh(loop, dtype, width, steps, updates, device) for loop in KINDS}
        for instrument in ("live", "resident"):
            stock, ours = (peaks[loop][instrument] / 1e6 for loop in ("stock", "fusedacc"))
            case = f"demo, width {width}, {dtype}, {steps} micro-batches: peak {instrument} bytes"
            room = (stock + BUCKET / 1e6) / ours
            goal = {"against": "stock + bucket", "speedup": room, "goal": 1.0, "reached": reached(room, 1.0)}
            rows += [
                Row(case, "stock", "MB", stock, stock, stock),
                Row(case, "fusedacc", "MB", ours, ours, ours, **goal),
            ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, to try the script: nothing is recorded"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--measure", choices=KINDS, help="measure one loop in this process and print JSON")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--updates", type=int, default=2)
    options = parser.parse_args()
    if options.measure:
        config = Config(options.dtype, torch.device(options.device), options.steps)
        config = dataclasses.replace(config, width=options.width)
        print(json.dumps(measure_here(options.measure, config, options.updates)))
    else:
        rows = figures(options.quick, options.device)
        report("peak_memory", rows, None if options.quick else options.results, options.device)


if __name__ == "__main__":
    main()
