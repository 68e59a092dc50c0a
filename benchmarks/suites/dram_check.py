"""The byte counter against a GPU's DRAM counters, for the kernels that accumulate and update.

Each case is one call on one tensor, in a new process. TrafficMeter counts the call, and `ncu` (Nsight
Compute) reads dram__bytes_read and dram__bytes_write while the same call runs again. Goal: they agree within
5 %. The caches stay as the warm-up left them, so about as much is written back for the call before as is
still in the cache at the end of this one. With 1 Gi elements, an L2 of 60 MB is 1 % of a call.

Exit status: 0 if all agree, 1 if one does not or fails, 77 if the counters cannot be read here.
"""

import contextlib
import csv
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fusedacc.commands.timing import synchronize
from fusedacc.functional import prepare
from fusedacc.traffic import TrafficMeter

from .. import harness
from ..harness import ROOT, chosen, progress
from ..records import Case, Results, Row, cannot_run, count, row

SCALE = 0.125
TOLERANCE = 0.05
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
#: Sectors of 32 bytes that were written to the L2 cache. Stores that fill half of a sector count as a whole.
SECTORS, SECTOR_BYTES = "lts__t_sectors_op_write.sum", 32
#: What ncu says if it cannot read the counters of this machine.
UNAVAILABLE = ("ERR_NVGPUCTRPERM", "Failed to initialize the profiler", "not supported on this device")
#: The time limit of a profiled process, which imports torch, fills its tensors and calls twice.
SECONDS = 90
CANNOT_READ = 77
COUNTED = "counted "

Call = Callable[[], object]


class CountersUnavailable(RuntimeError):
    """No case can be measured on this machine, for the reason in the message."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One call, which `make(total, gradient)` returns. `memory`: bytes of device memory per element."""

    mode: str
    dtypes: str
    memory: int
    make: Callable[[Tensor, Tensor], Call]
    gradient: torch.dtype = torch.float32

    def call(self, elements: int, device: str) -> Call:
        gradient = torch.randn(elements, device=device, dtype=self.gradient)
        return self.make(torch.zeros(elements, device=device), gradient)


def _ours(backend: str, *, overwrite: bool) -> Callable[[Tensor, Tensor], Call]:
    def make(total: Tensor, gradient: Tensor) -> Call:
        plan = prepare([total], backend=backend)
        return lambda: plan([gradient], SCALE, overwrite=overwrite)

    return make


def _adamw(weight: Tensor, gradient: Tensor) -> Call:
    weight.requires_grad_().grad = gradient
    return torch.optim.AdamW([weight], fused=True).step


def _sum_of_bfloat16(mode: str, make: Callable[[Tensor, Tensor], Call]) -> Check:
    return Check(mode, "bfloat16 into float32", memory=6, make=make, gradient=torch.bfloat16)


def _sum_of_float32(mode: str, make: Callable[[Tensor, Tensor], Call]) -> Check:
    return Check(mode, "float32 into float32", memory=8, make=make)


def _add(total: Tensor, gradient: Tensor) -> Call:
    return lambda: total.add_(gradient, alpha=SCALE)


def _foreach_add(total: Tensor, gradient: Tensor) -> Call:
    return lambda: torch._foreach_add_([total], [gradient], alpha=SCALE)


CHECKS = {}
for _name in ("cuda", "triton"):
    CHECKS |= {
        f"fusedacc {_name} bf16": _sum_of_bfloat16("accumulate", _ours(_name, overwrite=False)),
        f"fusedacc {_name} f32": _sum_of_float32("accumulate", _ours(_name, overwrite=False)),
        f"fusedacc {_name} bf16 first": _sum_of_bfloat16("overwrite", _ours(_name, overwrite=True)),
    }
CHECKS |= {
    "torch mixed add_": _sum_of_bfloat16("accumulate", _add),
    "torch _foreach_add_": _sum_of_float32("accumulate", _foreach_add),
    "torch AdamW fused": Check("update", "float32", memory=16, make=_adamw),
}


def launch(name: str, elements: int, device: str) -> None:
    """Count one call of the case, print the count, and call again for the profiler."""
    call = CHECKS[name].call(elements, device)
    on_gpu = device == "cuda"
    call()  # compiles the kernel and makes the optimizer's state
    with TrafficMeter() as meter:
        call()
    print(COUNTED + json.dumps(meter.as_dict()), flush=True)
    synchronize(torch.device(device))
    with torch.cuda.profiler.profile() if on_gpu else contextlib.nullcontext():
        call()
        synchronize(torch.device(device))


def parse(text: str) -> dict[str, list[float]]:
    """Return the value of each metric for every kernel, from the output of `ncu --csv`.

    Raises ValueError, with the profiler's words, if the DRAM metrics are missing or incomplete.
    """
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if '"Metric Name"' in line), len(lines))
    found: dict[str, list[float]] = {metric: [] for metric in (*METRICS, SECTORS)}
    for entry in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        if entry["Metric Name"] in found:
            found[entry["Metric Name"]].append(float(entry["Metric Value"].replace(",", "")))
    read, written = (len(found[metric]) for metric in METRICS)
    if not read or read != written:
        said = [line for line in lines if line.startswith(("==ERROR==", "==WARNING=="))] or lines[-1:]
        raise ValueError(f"ncu listed {read} and {written} kernels: {' '.join(said) or 'it printed nothing'}")
    return found


def profile(name: str, elements: int, device: str) -> tuple[dict[str, list[float]], dict]:
    """Return what `parse` found for one call of the case, and what TrafficMeter counted.

    Raises CountersUnavailable if ncu is missing or may not read the counters, RuntimeError if the case failed
    or took more than `SECONDS`, and ValueError if ncu did not print the two metrics.
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
    said = [line.strip() for text in (listing, ran.stdout, ran.stderr) for line in text.splitlines() if line]
    for line in (line for line in said if any(words in line for words in UNAVAILABLE)):
        hint = "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        raise CountersUnavailable(f"ncu cannot read the counters here: {line} ({hint})")
    counted = next((line for line in ran.stdout.splitlines() if line.startswith(COUNTED)), None)
    if counted is None:
        raise RuntimeError(f"ended with status {ran.returncode}: {' '.join(said[-1:])}")
    return parse(listing), json.loads(counted.removeprefix(COUNTED))


def check_row(case: Case, name: str, measured: dict[str, list[float]], counted: dict) -> Row:
    """Return the row of one case: the bytes that the counters saw, and their ratio to those counted."""
    read, written, sectors = (round(sum(values)) for values in measured.values())
    total = read + written
    ratio = total / counted["total_bytes"] if counted["total_bytes"] else None
    agrees = ratio is not None and abs(ratio - 1) <= TOLERANCE and not counted["uncounted"]
    note = f"goal: within {TOLERANCE:.0%}; read {read} of {counted['read_bytes']} counted, "
    note += f"written {written} of {counted['written_bytes']}"
    if sectors:
        share = sectors * SECTOR_BYTES / max(counted["written_bytes"], 1)
        note += f"; {share:.2f} times the bytes written went to L2 in sectors of {SECTOR_BYTES}"
    if counted["uncounted"]:
        note += "; not counted: " + ", ".join(counted["uncounted"])
    judged = {"against": "bytes counted", "speedup": ratio, "goal": 1.0, "reached": "yes" if agrees else "no"}
    found = {"median": total, "bytes": counted["total_bytes"], "launches": len(measured[METRICS[0]])}
    return row(case, name, metric="bytes", unit="B", rounds=1, **found, **judged, note=note)


def figures(
    results: Results, effort: str, names: Sequence[str] = tuple(CHECKS), elements: int | None = None
) -> str | None:
    """Add a row per case. Return why the counters cannot be read, or None."""
    device = results.device.type
    wanted = elements or (2**28 if effort == "quick" else 2**30)
    why = None
    for name in progress(names, "DRAM counters", "case"):
        check = CHECKS[name]
        size = wanted
        while device == "cuda" and check.memory * size > 0.8 * torch.cuda.mem_get_info()[0]:
            size //= 2
        case = Case("dram", f"{count(size)} elements", check.mode, f"1 tensor of {size}", check.dtypes)
        try:
            if why is not None:
                raise CountersUnavailable(why)
            results.add([check_row(case, name, *profile(name, size, device))])
        except (RuntimeError, ValueError) as error:
            why = str(error) if isinstance(error, CountersUnavailable) else why
            results.add([cannot_run(case, name, str(error))])
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
