"""One accumulate pass over all parameters of a model, `sum += gradient / 8`: loop, foreach, our plans."""

from __future__ import annotations

import statistics

import torch

from ..contestants import model_shapes
from ..contestants.accumulate import ACCUMULATE
from ..contestants.model_shapes import Parameters
from ..harness.measure import Goal, Variant, measure, timer_for
from ..harness.results import Case, Results, cannot_run, first_line

SCALE = 0.125
LOOP = "add_"
FOREACH = ("torch._foreach_add_", "foreach cast and add")
#: Backends of ours by device; goals: how many times as fast as the loop and the best foreach form
#: (0: no goal).
BACKENDS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}
GOALS = {"cpu": (1.0, 1.0), "cuda": (0.0, 1.5)}
ROUNDS = {"quick": 3, "short": 11, "full": 31}


def figures(
    results: Results, name: str, whole: Parameters, dtype: torch.dtype, effort: str, backend: str
) -> None:
    """Gradients of `dtype` into float32 sums, as many layers as memory has room for.

    backend: ours; "auto" for all that are made for the device.
    """
    device = results.device
    # Sums, gradients, and the copies of the form that casts first.
    parameters = model_shapes.fitting_memory(whole, 4 + dtype.itemsize + 4, device)
    shapes = model_shapes.describe(parameters or whole, whole)
    case = Case("models", name, "accumulate", shapes, f"{str(dtype)[6:]} into float32")
    ours = [f"fusedacc {own}" for own in (BACKENDS[device.type] if backend == "auto" else (backend,))]
    names = [LOOP, *FOREACH, *ours]
    if not parameters:
        results.add([cannot_run(case, name, "no memory for one layer of each stack") for name in names])
        return
    shapes_of = model_shapes.shapes(parameters)
    sums = [torch.zeros(shape, device=device) for shape in shapes_of]
    gradients = [torch.full(shape, 1 / 64, dtype=dtype, device=device) for shape in shapes_of]
    runs = {}
    for name in names:
        provider = ACCUMULATE[name]
        why = provider.unavailable(device) or provider.unsupported(sums, gradients)
        if why and name in FOREACH:
            continue  # float32: nothing to cast
        try:
            if not why:
                runs[name] = provider.make(sums, gradients, SCALE)
                runs[name]()
        except Exception as error:
            runs.pop(name, None)
            why = first_line(error)
        if why:
            results.add([cannot_run(case, name, why)])
    timer = timer_for(device)
    calls = 20 if device.type == "cuda" else 1
    best = min(
        (name for name in FOREACH if name in runs),
        key=lambda name: statistics.median(timer(runs[name], calls) for _ in range(3)),
        default=LOOP,
    )
    goals = [Goal(against, goal) for against, goal in zip((LOOP, best), GOALS[device.type], strict=True)]
    variants = [
        Variant(
            name,
            run,
            ACCUMULATE[name].moved(sums, gradients),
            tuple(goals) if name in ours else (),
            len(sums) if name == LOOP else None,
            note=ACCUMULATE[name].description,
        )
        for name, run in runs.items()
    ]
    results.add(measure(case, variants, ROUNDS[effort], calls, timer))
