"""`python -m fusedacc info`: what is built, what would run on which device, and how that is printed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import textwrap
from collections.abc import Iterable
from typing import Any

import torch

from ..kernels import (
    cache_folder,
    dtypes,
    engine_build,
    library,
    native_module,
    registry,
    selftest,
    selftest_checks,
)
from ..kernels.machine_names import version
from ..optimizer import AccumulatingOptimizer
from . import selftest as selftest_command


def devices() -> list[torch.device]:
    """Return the CPU and every GPU that torch sees."""
    mps = [torch.device("mps")] if torch.backends.mps.is_available() else []
    return [*selftest_command.devices(), *mps]


def run(options: argparse.Namespace) -> int:
    facts = collect()
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        print(summary(facts))
    return 0 if healthy(facts) else 1


def _backend_on(name: str, device: torch.device) -> dict[str, Any]:
    """Return the pairs that a backend runs on a device, its failures, and why it does not run the others."""
    ran = []
    failures = {}
    reasons = []
    for gradient_dtype, accumulator_dtype in sorted(dtypes.PAIRS, key=str):
        pair = dtypes.pair_name(gradient_dtype, accumulator_dtype)
        reason = registry.obstacle(name, device, accumulator_dtype, gradient_dtype)
        if reason is not None:
            reasons.append(reason)
            continue
        try:
            lists = selftest_checks.lists(gradient_dtype, accumulator_dtype)
            problem = selftest_checks.addition(registry.get(name), lists, lists.to(device))
        except Exception as error:  # report whatever a broken installation raises
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            ran.append(pair)
        else:
            failures[pair] = problem
    return {
        "backend": name,
        "runs": bool(ran) and not failures,
        "pairs": ran,
        "failures": failures,
        "why_not": "; ".join(dict.fromkeys(reasons)) or None,
    }


def _automatic(device: torch.device) -> dict[str, str | None]:
    try:
        chosen = registry.select(device, torch.float32, torch.float32)
    except (RuntimeError, ValueError) as problem:
        return {"backend": None, "reason": str(problem)}
    return {"backend": chosen.backend.name, "reason": chosen.reason}


def _engine() -> dict[str, Any]:
    """Return whether wrappers have the native engine, and why; None: no wrapper can be made."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    try:
        AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0)).close()
        why_not = native_module.why_not()
    except (RuntimeError, ValueError) as problem:
        return {"native": None, "why": str(problem)}
    built = f"built for torch {torch.__version__}, Python {platform.python_version()}"
    return {"native": why_not is None, "why": why_not or built}


def _self_tests() -> dict[str, Any]:
    """Return the results of the self-tests on each GPU, by this process or an earlier one."""
    try:
        off = selftest.is_off()
    except ValueError as problem:
        return {"problem": str(problem)}
    try:
        kept_in = str(cache_folder.folder() / selftest.FILE)
    except RuntimeError:  # no home
        kept_in = None
    gpus = [] if off else [device for device in devices() if device.type in selftest.DEVICE_TYPES]
    return {
        "off": off,
        "kept_in": kept_in,
        "devices": {str(device): selftest.results(device) for device in gpus},
    }


def collect() -> dict[str, Any]:
    """Return all that `info` knows, as plain values."""
    problem = library.load_error()
    built: dict[str, Any] = {"loaded": problem is None, "why_not": problem}
    if problem is None:
        built |= library.built_with()
    return {
        "fusedacc": version("fusedacc"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "threads": torch.get_num_threads(),
        "library": built,
        "engine": _engine(),
        **{name: os.environ.get(name) for name in _VARIABLES},
        "devices": [
            {
                "device": str(device),
                "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
                "auto": _automatic(device),
                "backends": [_backend_on(name, device) for name in registry.NAMES],
            }
            for device in devices()
        ],
        "selftest": _self_tests(),  # last, because "auto" above may run self-tests
    }


def healthy(facts: dict[str, Any]) -> bool:
    """Return whether sums and self-tests are right, wrappers can be made, and every device has a backend."""
    return (
        facts["engine"]["native"] is not None
        and "problem" not in facts["selftest"]
        and not any(any(results.values()) for results in facts["selftest"]["devices"].values())
        and all(
            device["auto"]["backend"] is not None and not any(row["failures"] for row in device["backends"])
            for device in facts["devices"]
        )
    )


#: Characters per line.
WIDTH = 110
#: A reason of more characters is shortened. `--json` has it whole.
REASON_LENGTH = 300
_VARIABLES = (native_module.VARIABLE, engine_build.VARIABLE, registry.VARIABLE, selftest.VARIABLE)


def summary(facts: dict[str, Any]) -> str:
    """Return versions, what is built, each backend with its problems, and the self-tests' results."""
    return "\n".join(_wrap(_texts(facts)))


def _texts(facts: dict[str, Any]) -> list[str]:
    devices = facts["devices"]
    hardware = _group((_hardware(facts, device), device["device"]) for device in devices)
    chosen = {device["device"]: device["auto"] for device in devices}
    auto = _group(
        (selected["backend"] or f"none ({_shorten(selected['reason'])})", name)
        for name, selected in chosen.items()
    )
    texts = [_versions(facts), _library_line(facts), _engine_line(facts)]
    if any(facts[name] for name in _VARIABLES):
        texts.append(", ".join(f"{name}={facts[name]}" for name in _VARIABLES if facts[name]))
    texts.append("devices: " + ", ".join(f"{names} ({what})" for what, names in hardware.items()))
    texts.append('backend="auto": ' + ", ".join(f"{what} on {names}" for what, names in auto.items()))
    texts += [_backend(facts, name) for name in registry.NAMES]
    return [*texts, *_self_test_lines(facts["selftest"])]


def _wrap(texts: Iterable[str]) -> list[str]:
    """Break texts into lines; continuation lines are indented."""
    lines: list[str] = []
    for text in texts:
        indent = " " * (len(text) - len(text.lstrip()) + 8)
        lines += textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return lines


def _shorten(reason: str) -> str:
    """Return a reason in one line. A long one loses its middle, because its end may say what to do."""
    text = " ".join(reason.split())
    if len(text) <= REASON_LENGTH:
        return text
    return f"{text[: REASON_LENGTH * 2 // 3].rstrip()} ... {text[-(REASON_LENGTH // 3) :].lstrip()}"


def _versions(facts: dict[str, Any]) -> str:
    return (
        f"fusedacc {facts['fusedacc'] or '(not installed: run from its sources)'}, Python {facts['python']}, "
        f"torch {facts['torch']}, Triton {facts['triton'] or 'not installed'}"
    )


def _library_line(facts: dict[str, Any]) -> str:
    built = facts["library"]
    if not built["loaded"]:
        return f"native library: not loaded: {_shorten(built['why_not'])}"
    architectures = ", ".join(built["cuda_architectures"])
    cuda = f"CUDA {built['cuda']} for {architectures}" if architectures else "no CUDA"
    return (
        f"native library: built with torch {built['torch']}; {cuda}; CPU kernels: {built['cpu_capability']}"
    )


def _engine_line(facts: dict[str, Any]) -> str:
    engine = facts["engine"]
    kind = "native" if engine["native"] else "none"
    lost = "" if engine["native"] else f": {native_module.LOST}"
    return f"engine: {kind} ({_reason(facts, engine['why'])}){lost}"


def _reason(facts: dict[str, Any], reason: str) -> str:
    """Return a shortened reason, or a reference to the library's line if that already gives it."""
    if reason == facts["library"]["why_not"]:
        return "the native library is not loaded"
    return _shorten(reason)


def _hardware(facts: dict[str, Any], device: dict[str, Any]) -> str:
    if device["device"] != "cpu":
        return str(device["name"])
    return f"{device['name']}, {facts['threads']} thread{'' if facts['threads'] == 1 else 's'}"


def _group(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the devices of each first item, such as "cpu, cuda:0-7"."""
    devices_of: dict[str, list[str]] = {}
    for key, device in pairs:
        devices_of.setdefault(key, []).append(device)
    return {key: _list_devices(devices) for key, devices in devices_of.items()}


def _list_devices(devices: Iterable[str]) -> str:
    runs: list[list[str]] = []
    for device in devices:
        kind, _, number = device.partition(":")
        if number and runs and runs[-1][-1] == f"{kind}:{int(number) - 1}":
            runs[-1].append(device)
        else:
            runs.append([device])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1].partition(':')[2]}" for run in runs)


def _backend(facts: dict[str, Any], name: str) -> str:
    """Return where a backend fails, works and is unavailable, and why."""
    rows = [
        (entry["device"], row)
        for entry in facts["devices"]
        for row in entry["backends"]
        if row["backend"] == name
    ]
    #: The types of the devices that the backend is for.
    its_types = {_type_of(device) for device, row in rows if row["pairs"] or row["failures"]}
    devices: dict[str, list[str]] = {"FAILS": [], "works": [], "unavailable": []}
    reasons: dict[str, list[str]] = {state: [] for state in devices}
    for device, row in rows:
        if row["failures"]:
            devices["FAILS"].append(device)
            reasons["FAILS"] += [f"{pair}: {why}" for pair, why in row["failures"].items()]
        elif row["runs"]:
            devices["works"].append(device)
            if row["why_not"]:
                reasons["works"].append(f"not for all dtype pairs: {row['why_not']}")
        # A GPU backend is not a problem on a CPU, nor a CPU backend on a GPU.
        elif not its_types or _type_of(device) in its_types:
            devices["unavailable"].append(device)
            reasons["unavailable"].append(_reason(facts, row["why_not"]))
    texts = []
    for state, on_devices in devices.items():
        if not on_devices:
            continue
        text = f"{state} on {_list_devices(on_devices)}" if its_types else state
        different = list(dict.fromkeys(reasons[state]))
        if different:
            # The last one, because that of the CPU may only say that the backend is for GPUs.
            text += f": {_shorten(different[-1])}"
        if len(different) > 1:
            text += f" (and {len(different) - 1} more, see --json)"
        texts.append(text)
    return f"  {name:<7} {'; '.join(texts)}"


def _type_of(device: str) -> str:
    return device.partition(":")[0]


def _self_test_lines(self_tests: dict[str, Any]) -> list[str]:
    """Return a line for each device on which a self-test at first use has run."""
    if "problem" in self_tests:
        return [f"self-test: {_shorten(self_tests['problem'])}"]
    if self_tests["off"]:
        return [f"self-test: off ({selftest.VARIABLE}=0)"]
    texts = []
    for device, results in self_tests["devices"].items():
        passed = [subject for subject, problem in results.items() if problem is None]
        parts = [f"passed: {_shorten(', '.join(passed))}"] if passed else []
        parts += [f"FAILED: {what}: {_shorten(why)}" for what, why in results.items() if why is not None]
        texts.append(f"self-test on {device}: {'; '.join(parts) or 'not run yet'}")
    return texts or ["self-test: none needed without a GPU (`python -m fusedacc selftest` checks the CPU)"]
