"""`python -m fusedacc selftest`: check every backend on every device, measure them, and write a report."""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..kernels import (
    dtypes,
    grouped,
    library,
    lists,
    matmul,
    matmul_eager,
    registry,
    selftest,
    selftest_checks,
    softmax,
)
from ..optimizer import AccumulatingOptimizer
from . import machine, timing
from .bench.report import Progress
from .exit_status import MISUSED, STOPPED, WRONG

#: Elements of the measured tensors by device type: more than the caches hold.
ELEMENTS = {"cpu": 2**23, "cuda": 2**26}
ROUNDS = 9

Entry = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One check, with arguments of `kernels.selftest.problem_of`. is_default: used if no backend is named."""

    who: str
    what: str
    is_default: bool
    check: Callable[[], str | None]


def run(options: argparse.Namespace) -> int:
    """Check, measure, write the report and print a summary. Return the exit status."""
    try:
        options.output.touch()
    except OSError as problem:
        print(f"python -m fusedacc selftest: error: {problem}", file=sys.stderr)
        return MISUSED
    try:
        report = collect(not options.no_benchmark)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(summary(report))
    print(f"report: {options.output}")
    return 0 if report["passed"] else WRONG


def devices() -> list[torch.device]:
    """Return the CPU and every CUDA GPU."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def collect(measures: bool = True) -> dict[str, Any]:
    """Return the whole report, as plain values."""
    problem = library.load_error()
    report: dict[str, Any] = {
        "library": library.built_with() if problem is None else {"why_not": problem},
        "driver": selftest.driver(),
        "devices": [],
    }
    machines = {device: machine.collect(device) for device in devices()}
    # Earlier results must not keep a backend from being checked.
    with selftest.suspended(), mock.patch.dict(os.environ), Progress(sys.stderr) as progress:
        os.environ.pop(registry.VARIABLE, None)
        for device, facts in machines.items():
            entry: Entry = {"machine": facts, "checks": [], "bandwidth": []}
            entry["unavailable"] = {name: why for name, why in _obstacles(device).items() if why is not None}
            cases = list(cases_on(device))
            for number, case in enumerate(cases, 1):
                progress.show(number, len(cases), f"{device}: {case.who}: {case.what}")
                checked = _checked(case, device)
                entry["checks"].append(checked)
                if checked["problem"]:  # at once: the rest may be interrupted
                    progress.note(f"{device}: {case.who}: {case.what}: FAILED: {checked['problem']}")
            if measures:
                for name in _able(device):
                    progress.show(1, None, f"{device}: bandwidth of {name}")
                    entry["bandwidth"] += bandwidth(name, device)
            report["devices"].append(entry)
    report["passed"] = not any(
        check["problem"] and check["is_default"] for entry in report["devices"] for check in entry["checks"]
    )
    return report


def _checked(case: Case, device: torch.device) -> Entry:
    start = time.perf_counter()
    try:
        with selftest.undisturbed(device):
            problem = case.check()
    except Exception as error:  # report whatever a broken kernel or installation raises
        problem = selftest.first_line(error)
    if device.type in selftest.DEVICE_TYPES:
        selftest.record(case.who, case.what, device, problem)
    facts = {"who": case.who, "what": case.what, "is_default": case.is_default}
    return {**facts, "problem": problem, "seconds": round(time.perf_counter() - start, 3)}


def cases_on(device: torch.device) -> Iterator[Case]:
    """Yield everything that can run on a device."""
    for gradient, accumulator in sorted(dtypes.PAIRS, key=str):
        what = dtypes.pair_name(gradient, accumulator)
        default = registry.select(device, accumulator, gradient).backend.name
        for name in _able(device):
            check = functools.partial(selftest_checks.sums, registry.get(name), device, gradient, accumulator)
            yield Case(name, what, name == default, check)
        yield from _products(device, gradient, accumulator, what)
    for dtype in (torch.float32, torch.bfloat16):
        check = functools.partial(_training, device, dtype)
        yield Case("AccumulatingOptimizer", f"training in {dtypes.dtype_name(dtype)}", True, check)


def _products(
    device: torch.device, operand: torch.dtype, accumulator: torch.dtype, what: str
) -> Iterator[Case]:
    multiply = functools.partial(matmul.gemm_accumulate_, backend="auto")
    check = functools.partial(selftest_checks.product, multiply, device, operand, accumulator)
    on_gpu = device.type in selftest.DEVICE_TYPES
    yield Case(matmul_eager.WIDENING if on_gpu else "model= product", what, True, check)
    default = grouped.select(device, accumulator, operand).name
    for name in dict.fromkeys((default, "eager")):
        multiply = functools.partial(grouped.grouped_accumulate_, backend=name)
        check = functools.partial(selftest_checks.grouped, multiply, device, operand, accumulator)
        who = grouped.KERNEL if name == "triton" else f"{name}, grouped products"
        yield Case(who, what, name == default, check)
    default = lists.select_for_rows(device, accumulator, operand).backend.name
    for name in dict.fromkeys((default, "eager")):
        check = functools.partial(selftest_checks.rows, registry.get(name), device, operand, accumulator)
        yield Case(f"{name}, rows of a table", what, name == default, check)
    if softmax.compute_dtype(operand) == accumulator:
        for name in {"eager", softmax.select(device, operand)[0]}:
            check = functools.partial(selftest_checks.softmax, *softmax.passes_of(name), device, operand)
            yield Case(f"{name}, slices of logits", what, name != "eager", check)


def _training(device: torch.device, dtype: torch.dtype) -> str | None:
    """Train a model with the wrapper and by hand, and compare the parameters."""
    steps = 2
    windows = 3
    generator = torch.Generator(device="cpu").manual_seed(0)
    weights = [torch.randn(sizes, generator=generator) / 4 for sizes in ((20, 24), (30, 24), (30,))]
    words = torch.randint(0, 20, (steps * windows, 50), generator=generator)
    trained = []
    for wrapped in (False, True):
        model = torch.nn.Sequential(torch.nn.Embedding(20, 24), torch.nn.Linear(24, 30)).to(device, dtype)
        for parameter, value in zip(model.parameters(), weights, strict=True):
            torch.nn.init.zeros_(parameter).add_(value.to(device))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        if wrapped:
            optimizer = AccumulatingOptimizer(optimizer, steps, model=model, max_grad_norm=1.0)
        for number, micro_batch in enumerate(words.to(device), 1):
            with torch.enable_grad():
                loss = model(micro_batch).float().square().mean()
                (loss if wrapped else loss / steps).backward()
            if not wrapped and number % steps == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if wrapped or number % steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        trained.append(torch.cat([p.detach().cpu().double().flatten() for p in model.parameters()]))
    expected, of_wrapper = trained
    moved = (expected - torch.cat([value.double().flatten() for value in weights])).abs().max()
    # Each window's gradient and each update is rounded.
    allowed = windows * torch.finfo(dtype).eps * (2 * expected.abs() + 8 * moved)
    return selftest_checks.differences(of_wrapper, expected, allowed)


def _obstacles(device: torch.device) -> dict[str, str | None]:
    """Return why each backend cannot run on a device; None for those that can."""
    one = torch.float32
    return {name: registry.obstacle(name, device, one, one) for name in registry.order(device)}


def _able(device: torch.device) -> list[str]:
    return [name for name, reason in _obstacles(device).items() if reason is None]


def bandwidth(name: str, device: torch.device) -> list[Entry]:
    """Return the bandwidth of a backend's kernels, each with that of a copy of as many bytes."""
    backend = registry.get(name)
    count = ELEMENTS[device.type]
    low = torch.ones(count, dtype=torch.bfloat16, device=device)
    high, total = (torch.ones(count, dtype=torch.float32, device=device) for _ in range(2))

    def add(into: Tensor, gradient: Tensor, overwrite: bool = False) -> Callable[[], object]:
        return lambda: backend.accumulate_([into], [gradient], 0.125, overwrite)

    kernels: dict[str, tuple[int, Callable[[], object]]] = {
        "add bfloat16 into float32": (10 * count, add(total, low)),
        "add float32 into float32": (12 * count, add(total, high)),
        "cast float32 to bfloat16": (6 * count, add(low, high, True)),
        "norm of float32": (4 * count, lambda: backend.norm_partials([total], 2.0)),
    }
    entries: list[Entry] = []
    for kernel, (moved, call) in kernels.items():
        try:
            calls = {"kernel": call, "copy": timing.copy_of(moved, device)}
            with selftest.undisturbed(device):  # the first round compiles
                times = timing.take_turns(calls, range(-1, ROUNDS), timing.timer_for(device))
        except Exception as error:  # the checks above have reported it
            entries.append({"backend": name, "kernel": kernel, "problem": selftest.first_line(error)})
            continue
        seconds = statistics.median(times["kernel"])
        seconds_of_copy = statistics.median(times["copy"])
        rate = {
            "microseconds": seconds * 1e6,
            "gb_per_s": moved / seconds / 1e9,
            "percent_of_copy": 100 * seconds_of_copy / seconds,
        }
        entries.append({"backend": name, "kernel": kernel, **rate})
    return entries


def summary(report: dict[str, Any]) -> str:
    """Return which checks passed and failed on each device, and the bandwidths."""
    lines = []
    for entry in report["devices"]:
        facts = entry["machine"]
        lines.append(f"{facts['device']}: {facts['name']}")
        for who in dict.fromkeys(check["who"] for check in entry["checks"]):
            checks = [check for check in entry["checks"] if check["who"] == who]
            failed = [check for check in checks if check["problem"]]
            state = f"{len(checks)} checks passed"
            if failed:
                state = f"{len(failed)} of {len(checks)} checks FAILED"
            default = ", used by default" if any(check["is_default"] for check in checks) else ""
            lines.append(f"  {who}{default}: {state}")
            lines += [f"    {check['what']}: {check['problem']}" for check in failed]
        lines += [f"  {name}: unavailable: {why}" for name, why in entry["unavailable"].items()]
        for row in entry["bandwidth"]:
            result = row.get("problem")
            if result is None:
                result = f"{row['gb_per_s']:.0f} GB/s, {row['percent_of_copy']:.0f} % of a copy"
            lines.append(f"  {row['backend']:<7} {row['kernel']:<26} {result}")
    passed = "passed" if report["passed"] else f"FAILED: please report it: {selftest.HOW_TO_REPORT}"
    return "\n".join([*lines, f"self-test {passed}"])
