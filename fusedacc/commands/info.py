"""What is built and what would run where: the facts that `python -m fusedacc info` prints (`info_text`)."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from ..kernels import (
    dtypes,
    grouped,
    library,
    loop_settings,
    matmul,
    native_module,
    reference,
    registry,
    tuning,
)
from ..optimizer import AccumulatingOptimizer, small_layers
from .bench import report
from .bench.work import name_of, off, wrong
from .measuring.machine import version

_ELEMENTS = 1000
_SCALE = 0.3


def devices() -> list[torch.device]:
    """The CPU and every GPU that torch can see."""
    found = [torch.device("cpu")]
    found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append(torch.device("mps"))
    return found


def try_pair(
    backend: registry.Backend,
    device: torch.device,
    gradient_dtype: torch.dtype,
    accumulator_dtype: torch.dtype,
) -> str | None:
    """Run one small sum and compare it with the reference on the CPU; returns what is wrong, if anything.

    A result may differ from the reference by one unit in the last place of the larger term: the reference
    itself is rounded, and some backends round a product before they add it.
    """
    generator = torch.Generator().manual_seed(0)
    accumulator, gradient = (
        torch.randn(_ELEMENTS, generator=generator).to(dtype) for dtype in (accumulator_dtype, gradient_dtype)
    )
    wide = dtypes.computation_dtype(accumulator_dtype)
    expected = accumulator.clone()
    reference.scale_accumulate_([expected], [gradient], _SCALE, False)
    largest = torch.maximum(accumulator.double().abs(), (gradient.double() * _SCALE).abs())
    allowed = 2 * largest * torch.finfo(accumulator_dtype).eps + largest * torch.finfo(wide).eps
    try:
        result = accumulator.to(device)
        backend.accumulate_([result], [gradient.to(device)], _SCALE, False)
        error = (result.cpu().double() - expected.double()).abs()
    except Exception as problem:  # whatever a broken installation raises is what the user came to read
        return f"{type(problem).__name__}: {problem}"
    return wrong(off(error, allowed), _ELEMENTS)


def _backend_on(name: str, device: torch.device) -> dict[str, Any]:
    """Which pairs a backend runs on a device, what its trials gave, and why it does not run the others."""
    ran, failures, reasons = [], {}, []
    for gradient_dtype, accumulator_dtype in sorted(dtypes.PAIRS, key=str):
        pair = f"{name_of(gradient_dtype)} into {name_of(accumulator_dtype)}"
        reason = registry.obstacle(name, device, accumulator_dtype, gradient_dtype)
        if reason is not None:
            reasons.append(reason)
            continue
        problem = try_pair(registry.get(name), device, gradient_dtype, accumulator_dtype)
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


def _hooks() -> dict[str, Any]:
    """Whether a wrapper's hooks are native, tried on one parameter, and why; None: no wrapper can be made."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    try:
        optimizer = AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0))
        native, why_not = optimizer._slots[0].native is not None, native_module.why_not()
        optimizer.close()
    except (RuntimeError, ValueError) as problem:
        return {"native": None, "why": str(problem)}
    why = why_not or "the module loads, and this torch's nodes do not take its hooks"
    if native:
        why = f"built for torch {torch.__version__}, Python {platform.python_version()}"
    return {"native": native, "why": why}


def _choices() -> dict[str, Any]:
    """What trials have found on this machine; what nobody has asked yet is asked now."""
    try:
        tuning.trials_disabled_by()  # raises, for a variable that is wrong
        if library.load_error() is None:
            loop_settings.tune_grain_size()
            loop_settings.tune_prefetch()
            for choice in (
                *matmul.choices(),
                *grouped.choices(),
                *small_layers.questions(AccumulatingOptimizer),
            ):
                tuning.choose(choice)
    except ValueError as problem:
        return {"problem": str(problem)}
    return {
        "machine": tuning.machine(),
        "kept_in": tuning.kept_where(),
        "is_saved": tuning.is_saved(),
        **report.choices(),
    }


def collect() -> dict[str, Any]:
    """Return all that `info` knows, as plain values: versions, the library, each backend on each device."""
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
        "hooks": _hooks(),
        native_module.VARIABLE: os.environ.get(native_module.VARIABLE),
        registry.VARIABLE: os.environ.get(registry.VARIABLE),
        "choices": _choices(),
        "devices": [
            {
                "device": str(device),
                "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
                "auto": _automatic(device),
                "backends": [_backend_on(name, device) for name in registry.NAMES],
            }
            for device in devices()
        ],
    }


def healthy(facts: dict[str, Any]) -> bool:
    """Whether every trial run gave the right sums, a wrapper has hooks, and "auto" a backend everywhere."""
    return (
        facts["hooks"]["native"] is not None
        and "problem" not in facts["choices"]
        and all(
            device["auto"]["backend"] is not None and not any(row["failures"] for row in device["backends"])
            for device in facts["devices"]
        )
    )
