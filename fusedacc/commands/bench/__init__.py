"""`python -m fusedacc bench`: compare our kernels with every PyTorch variant, on this machine.

Variants are checked against a float64 reference, then timed in turns with a copy of as many bytes.
`fusedacc.traffic.TrafficMeter` counts the bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import deque
from typing import Any, TextIO

import torch

from ...kernels import registry
from ...kernels.torch_state import on_device
from .. import machine
from ..arguments import device as device_of
from ..exit_status import MISUSED, STOPPED, WRONG
from . import comparison, report
from .cases import cases_of


def run(options: argparse.Namespace) -> int:
    """Measure and print. Return the exit status: 1 if any result is wrong, else 0."""
    device = options.device or device_of("cuda" if torch.cuda.is_available() else "cpu")
    try:
        registry.select(device, torch.float32, torch.float32)
    except (RuntimeError, ValueError) as problem:  # by FUSEDACC_BACKEND
        print(f"python -m fusedacc bench: error: {problem}", file=sys.stderr)
        return MISUSED
    effort = comparison.FULL if options.full else comparison.SHORT
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or before)
    try:
        figures = collect(device, effort, None if options.json else sys.stdout)
    except KeyboardInterrupt:
        print("stopped; the printed cases are complete", file=sys.stderr)
        return STOPPED
    finally:
        torch.set_num_threads(before)
    print(json.dumps(figures, indent=2) if options.json else report.ending(figures))
    return WRONG if report.wrong(figures) else 0


def collect(device: torch.device, effort: comparison.Effort, stream: TextIO | None = None) -> dict[str, Any]:
    """Return all figures as plain values: `machine`, `effort`, `seconds`, `cases`
    (`comparison.measure`).

    A table of each case is printed to the stream as soon as it is measured.
    """
    start = time.perf_counter()
    figures: dict[str, Any] = {"machine": machine.collect(device), "effort": effort.name, "cases": []}
    if stream is not None:
        print(report.beginning(figures), file=stream, flush=True)
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with warnings.catch_warnings(), on_device(device), forked, report.Progress(sys.stderr) as progress:
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # they are disabled on purpose
        torch.manual_seed(0)
        names = comparison.our_backends(device, effort.name)
        works = deque(cases_of(effort.name, device))
        total = len(works)
        while works:
            work = works.popleft()  # frees the tensors of the last one
            progress.show(total - len(works), total, work.title)
            case = comparison.measure(work, work.variants(names), effort, comparison.limit(device))
            figures["cases"].append(case)
            if stream is not None:
                progress.clear()
                print(report.table(case), file=stream, flush=True)
    figures["seconds"] = time.perf_counter() - start
    return figures
