"""The byte counter against a GPU's DRAM counters, for the kernels that accumulate and update.

    python -m benchmarks.suites.dram_check [--elements 1073741824] [--cases "fusedacc cuda bf16"]

Each case is one call on one tensor, in a process of its own: TrafficMeter counts the call, and `ncu` (Nsight
Compute) reads dram__bytes_read and dram__bytes_write while the same call runs again. The two are to agree
within 5 %. The caches are left as the warm-up left them, so about as much is written back for the call before
as is still in the cache at the end of this one; with 1 Gi elements a whole L2 of 60 MB is 1 % of a call.

Exit status: 0 if all agree, 1 if one does not or fails, 77 if the counters cannot be read here.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fusedacc.commands.measuring.records import Case, Results, Row, cannot_run, count, row
from fusedacc.functional import prepare

from .. import harness
from ..harness import ROOT, chosen, progress

SCALE = 0.125
TOLERANCE = 0.05
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
#: Pieces of 32 bytes that were written to the L2 cache: more than were written, where stores half fill them.
SECTORS, SECTOR_BYTES = "lts__t_sectors_op_write.sum", 32
UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "Tbyte": 10**12}
#: A process that imports torch, fills its tensors and calls twice, under the profiler.
SECONDS = 90
CANNOT_READ = 77
COUNTED = "counted "

Call = Callable[[], object]


class CountersUnavailable(RuntimeError):
    """No case can be measured on this machine; the message says why."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One call. `memory`: bytes of device memory per element; `make(elements, device)` returns the call."""

    mode: str
    dtypes: str
    memory: int
    make: Callable[[int, str], Call]


def tensors(elements: int, device: str, gradient: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum in float32 and a gradient, with values."""
    return torch.zeros(elements, device=device), torch.randn(elements, device=device, dtype=gradient)


def ours(backend: str, gradient_dtype: torch.dtype, overwrite: bool = False) -> Check:
    def make(elements: int, device: str) -> Call:
        total, gradient = tensors(elements, device, gradient_dtype)
        plan = prepare([total], backend=backend)
        return lambda: plan([gradient], SCALE, overwrite=overwrite)

    mode = "overwrite" if overwrite else "accumulate"
    return Check(mode, f"{str(gradient_dtype)[6:]} into float32", 4 + gradient_dtype.itemsize, make)


def mixed_add(elements: int, device: str) -> Call:
    total, gradient = tensors(elements, device, torch.bfloat16)
    return lambda: total.add_(gradient, alpha=SCALE)


def foreach_add(elements: int, device: str) -> Call:
    total, gradient = tensors(elements, device, torch.float32)
    return lambda: torch._foreach_add_([total], [gradient], alpha=SCALE)


def fused_adamw(elements: int, device: str) -> Call:
    weight, gradient = tensors(elements, device, torch.float32)
    weight.requires_grad_().grad = gradient
    return torch.optim.AdamW([weight], fused=True).step


OURS = {"bf16": (torch.bfloat16, False), "f32": (torch.float32, False), "bf16 first": (torch.bfloat16, True)}
CHECKS = {
    f"fusedacc {name} {what}": ours(name, *of) for name in ("cuda", "triton") for what, of in OURS.items()
}
CHECKS |= {
    "torch mixed add_": Check("accumulate", "bfloat16 into float32", 6, mixed_add),
    "torch _foreach_add_": Check("accumulate", "float32 into float32", 8, foreach_add),
    "torch AdamW fused": Check("update", "float32", 16, fused_adamw),
}


# The process that is profiled


def launch(name: str, elements: int, device: str) -> None:
    """Counts one call of the case, prints the count, and makes the call again where the profiler looks."""
    from fusedacc.traffic import TrafficMeter

    call = CHECKS[name].make(elements, device)
    call()  # compiles the kernel and makes the optimizer's state
    with TrafficMeter() as meter:
        call()
    print(COUNTED + json.dumps(meter.as_dict()), flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


# The profiler and what it prints


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that the DRAM counters saw, over `kernels` launches, and sectors written to L2."""

    read: int
    written: int
    kernels: int
    sectors: int = 0


def parse(text: str) -> Traffic:
    """The sums over all kernels of an `ncu --csv` listing, with or without the profiler's other lines.

    Raises ValueError, with the profiler's own words, where there is no listing or a metric is missing in it.
    """
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if '"Metric Name"' in line), None)
    if start is None:
        said = [line for line in lines if line.startswith(("==ERROR==", "==WARNING=="))] or lines[-1:]
        raise ValueError(f"ncu listed no metrics: {' '.join(said) or 'it printed nothing'}")
    listing = [line for line in lines[start:] if line.startswith('"')]
    sums: Counter[str] = Counter()
    kernels: dict[str, set[str]] = {metric: set() for metric in METRICS}
    for found in csv.DictReader(io.StringIO("\n".join(listing))):
        metric, unit, value = found["Metric Name"], found["Metric Unit"], found["Metric Value"]
        if metric in METRICS and unit not in UNITS:
            raise ValueError(f"ncu gives {metric} in {unit!r}; known: {', '.join(UNITS)}")
        if metric in METRICS or metric == SECTORS:
            try:
                sums[metric] += float(value.replace(",", "")) * UNITS.get(unit, 1)
            except ValueError:
                raise ValueError(f"ncu has no value for {metric}: {value!r}") from None
            kernels.get(metric, set()).add(found["ID"])
    read, written = METRICS
    if not kernels[read] or kernels[read] != kernels[written]:
        raise ValueError(
            f"ncu listed {read} for {len(kernels[read])} kernels, {written} for {len(kernels[written])}"
        )
    return Traffic(round(sums[read]), round(sums[written]), len(kernels[read]), round(sums[SECTORS]))


def unavailable(said: str) -> str | None:
    """Why the counters cannot be read on this machine at all, if that is what the profiler said."""
    if "ERR_NVGPUCTRPERM" in said:
        return (
            "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    for line in said.splitlines():
        if "Failed to initialize the profiler" in line or "not supported on this device" in line:
            return f"ncu cannot read the counters here: {line.strip()}"
    return None


def profile(name: str, elements: int, device: str) -> tuple[Traffic, dict]:
    """What the counters saw of one call of the case, and what TrafficMeter counted of it.

    CountersUnavailable where ncu is missing or may not read the counters; RuntimeError where the case failed
    or took more than `SECONDS`; ValueError where ncu printed something else than the two metrics.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CountersUnavailable("ncu (Nsight Compute) is not on PATH")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        started = [ncu, "--metrics", ",".join((*METRICS, SECTORS)), "--csv", "--print-units", "base"]
        started += ["--profile-from-start", "off", "--target-processes", "all"]
        started += ["--cache-control", "none", "--clock-control", "none", "--log-file", str(log)]
        started += [sys.executable, "-m", __spec__.name, "--launch", name]
        started += ["--elements", str(elements), "--device", device]
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "LC_ALL": "C", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        try:
            ran = subprocess.run(started, env=env, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"took more than {SECONDS} s under ncu") from None
        listing = log.read_text() if log.exists() else ran.stdout
    said = "\n".join((listing, ran.stdout, ran.stderr))
    why = unavailable(said)
    if why is not None:
        raise CountersUnavailable(why)
    counted = next((line for line in ran.stdout.splitlines() if line.startswith(COUNTED)), None)
    if counted is None:
        last = [line for line in said.splitlines() if line.strip()][-1:]
        raise RuntimeError(f"ended with status {ran.returncode}: {' '.join(last)}")
    return parse(listing), json.loads(counted.removeprefix(COUNTED))


# The rows


def fitting(elements: int, memory: int, device: str) -> int:
    """`elements`, halved until `memory` bytes for each take at most 80 % of the device's free memory."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        while memory * elements > 0.8 * free:
            elements //= 2
    return elements


def check_row(case: Case, name: str, measured: Traffic, counted: dict) -> Row:
    """The row of one case: bytes that the counters saw, and their ratio to those counted."""
    total = measured.read + measured.written
    ratio = total / counted["total_bytes"] if counted["total_bytes"] else None
    agrees = ratio is not None and abs(ratio - 1) <= TOLERANCE and not counted["uncounted"]
    note = (
        f"goal: within {TOLERANCE:.0%}; read {measured.read} of {counted['read_bytes']} counted, "
        f"written {measured.written} of {counted['written_bytes']}"
    )
    if measured.sectors:
        share = measured.sectors * SECTOR_BYTES / max(counted["written_bytes"], 1)
        note += f"; {share:.2f} times the bytes written went to L2 in sectors of {SECTOR_BYTES}"
    if counted["uncounted"]:
        note += "; not counted: " + ", ".join(counted["uncounted"])
    judged = {"against": "bytes counted", "speedup": ratio, "goal": 1.0, "reached": "yes" if agrees else "no"}
    found = {"median": total, "rounds": 1, "bytes": counted["total_bytes"], "launches": measured.kernels}
    return row(case, name, metric="bytes", unit="B", **found, **judged, note=note)


def figures(
    results: Results, effort: str, names: Sequence[str] = tuple(CHECKS), elements: int | None = None
) -> str | None:
    """Adds a row per case; returns why the counters cannot be read, if they cannot."""
    device = results.device.type
    wanted = elements or (2**28 if effort == "quick" else 2**30)
    why = None
    for name in progress(names, "DRAM counters", "case"):
        check = CHECKS[name]
        size = fitting(wanted, check.memory, device)
        what = f"{count(size)} elements"
        case = Case("dram", what, check.mode, f"1 tensor of {size}", check.dtypes)
        if why is None:
            try:
                results.add([check_row(case, name, *profile(name, size, device))])
                continue
            except CountersUnavailable as error:
                why = str(error)
            except (RuntimeError, ValueError) as error:
                results.add([cannot_run(case, name, str(error))])
                continue
        results.add([cannot_run(case, name, why)])
    return why


def main() -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--elements", type=int, help="of each tensor (default: 1 Gi, or what fits)")
    parser.add_argument("--cases", help=f"some of: {', '.join(CHECKS)} (default: all)")
    parser.add_argument("--launch", metavar="CASE", help="what ncu runs: one case, counted and called again")
    options = parser.parse_args()
    if options.launch:
        (name,) = chosen(options.launch, list(CHECKS), "case")
        launch(name, options.elements or 2**30, options.device)
        return 0
    names = chosen(options.cases, list(CHECKS), "case")
    if options.device != "cuda" or not torch.cuda.is_available():
        raise SystemExit(f"dram_check.py needs a CUDA GPU, and torch {torch.__version__} sees none")
    results = harness.results(options)
    why = figures(results, harness.effort(options), names, options.elements)
    results.report()
    if why is not None:
        print(f"skipped: {why}")
        return CANNOT_READ
    return 0 if all(row.reached == "yes" for row in results.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
