"""`explain()`: a table of each parameter's path and backend, with the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import traffic
from ..accumulators import Accumulators, Path, Slot
from ..accumulators.param import MODULE_PATHS
from ..autograd import reasons
from ..distributed.pipelines import AttachedSchedule
from ..kernels import grouped, lists, matmul, native_module, softmax
from ..kernels.local_parts import is_distributed
from ..kernels.torch_private import is_compiler_imported
from .window import Window


class Row(NamedTuple):
    """A row of the table. `first` and `later` are bytes per element; `why` is the number of a note."""

    parameter: str
    shape: str
    path: str
    backend: str
    gradient: str
    sum: str
    first: str
    later: str
    why: str


COLUMNS = Row._fields


@dataclass(frozen=True)
class Route:
    """How a parameter's gradient reaches its accumulator; by several paths if several modules share it."""

    paths: tuple[Path, ...]
    backend: str
    why: str

    def noting(self, words: str) -> Route:
        """Return the same route with one more reason."""
        return replace(self, why=f"{self.why}; {words}")


#: The entry of a path in the columns `first` and `later`: a text, or the names of two loops of
#: `traffic.accounting`, for a counted and for a manual loop. In a manual loop autograd itself adds the
#: gradients that it stores.
BYTES: dict[Path, str | tuple[str, str]] = {
    Path.NONE: "0",
    Path.EMBEDDING: "rows",
    Path.GEMM: ("gemm", "gemm"),
    Path.GROUPED: ("gemm", "gemm"),
    Path.HEAD: ("gemm", "gemm"),
    Path.SINK: ("gemm", "gemm"),
    Path.MAIN_GRAD: "-",
    Path.MULTI_TENSOR: ("fusedacc", "fusedacc"),
    Path.FSDP2: ("fusedacc", "fusedacc"),
    Path.EAGER: ("fusedacc", "mixed_add"),
}

_SCHEDULED = (
    "trained by a pipeline schedule, which may divide p.grad: autograd fills p.grad, and the sum takes it "
    "when the schedule's step() has ended"
)


def explain(
    slots: Sequence[Slot],
    window: Window,
    accumulators: Accumulators,
    update: str,
    *,
    scheduled: bool = False,
    attached: AttachedSchedule | None = None,
    why_schedule_leaves: str = "",
) -> str:
    """Return a table with a row per parameter, the reasons, and a description of the update.

    Args:
        slots: the parameters.
        window: the wrapper's window.
        accumulators: the wrapper's accumulators.
        update: the description of the update.
        scheduled: whether a pipeline schedule that is not attached trains the parameters.
        attached: the attached schedule, if any.
        why_schedule_leaves: why a schedule leaves modules to PyTorch.
    """
    reasons: dict[str, int] = {}
    rows = [Row(*COLUMNS)]
    for slot in slots:
        if slot.sharded:
            chosen = _route_of_shard(slot, accumulators, window)
        else:
            chosen = route(slot, accumulators, scheduled=scheduled)
        if attached is not None and id(slot.param) in attached.parameters and chosen.paths != (Path.NONE,):
            waits = attached.splits and not {Path.GEMM, Path.GROUPED}.isdisjoint(chosen.paths)
            chosen = chosen.noting("at W of the schedule" if waits else "inside schedule.step()")
        number = reasons.setdefault(chosen.why, len(reasons) + 1)
        stochastic = accumulators.noise.rounds(slot.accumulate_dtype)
        first, later = _count_bytes(slot, chosen, window, stochastic=stochastic)
        row = Row(
            parameter=slot.name,
            shape="x".join(map(str, slot.param.shape)) or "scalar",
            path="+".join(chosen.paths),
            backend=chosen.backend,
            gradient=_name(slot.param.dtype),
            sum=_name(slot.accumulate_dtype),
            first=first,
            later=later,
            why=f"[{number}]",
        )
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    loop = f"counted loop, {window.steps} micro-batches per update" if window.counted else "manual loop"
    notes = [f"[{number}] {reason}" for reason, number in reasons.items()]
    legend = (
        "first, later: bytes read and written per element in the window's first micro-batch and the others, "
        "the gradient's own write included; rows: only of the rows that were looked up; grouped, later: "
        "only of experts that had rows"
    )
    rounded = sum(accumulators.noise.rounds(slot.accumulate_dtype) for slot in slots)
    if rounded:
        notes.append(
            f"rounding: the sums of {rounded} parameters are rounded stochastically, up or down at random "
            f"(seed {accumulators.noise.seed}); they are right on average"
        )
    num_casts = sum(slot.keeps_cast for slot in slots)
    if num_casts:
        notes.append(
            f"casts: those of {num_casts} weights under autocast are kept from a window's first forward "
            "until its update: 6 bytes an element moved in a window, not in each micro-batch. With "
            "activation checkpointing, which otherwise holds one block's casts at a time, this takes 2 bytes "
            "an element"
        )
    if why_schedule_leaves:
        notes.append(why_schedule_leaves)
    if window.shards:
        notes.append(window.shards.describe())
    head = f"{loop}, reduction {window.reduction.name!r}"
    return "\n".join([head, *table, legend, *notes, f"engine: {_engine()}", f"update: {update}"])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _engine() -> str:
    why_not = native_module.why_not()
    return "native" if why_not is None else f"none ({why_not}): {native_module.LOST}"


def route(slot: Slot, accumulators: Accumulators, *, scheduled: bool = False) -> Route:
    """Return the route of this parameter's next gradient; `scheduled` as in `explain`."""
    reason = accumulators.engine.reason_for(slot)
    words, path, backend = reasons.REASONS[reason]
    if scheduled and reason in (reasons.ORDINARY, reasons.WEIGHT_HOOK, reasons.IN_MODULE):
        stored = reasons.REASONS[reasons.HOOK_AFTER_NODE]
        return Route((stored.path,), str(stored.backend), _SCHEDULED)
    if reason == reasons.IN_MODULE:
        return _in_backward(slot, accumulators)
    if slot.added_by_module:
        return Route((Path.MAIN_GRAD,), "module", "a module adds to main_grad by itself inside its backward")
    if backend is None:
        selection = accumulators.passes.select(slot.lane)
        cast = "the weight's cast is kept over the window" if slot.keeps_cast and not slot.paths else ""
        notes = [words or slot.left_to, cast, "" if words else selection.reason]
        return Route((path,), selection.backend.name, "; ".join(filter(None, notes)))
    left_to = slot.left_to if is_distributed(slot.param) or reason == reasons.NO_ENGINE else ""
    return Route((path,), backend, "; ".join(filter(None, (words, left_to))))


def _product(describe: Any, words: str, slot: Slot, accumulators: Accumulators) -> tuple[str, str]:
    device, gradient, accumulator = slot.lane
    name, reason = describe(device, accumulator, gradient, accumulators.backend)
    return name, f"{words}: {reason}"


def _lookup(slot: Slot, accumulators: Accumulators) -> tuple[str, str]:
    device, gradient, accumulator = slot.lane
    lookup = lists.select_for_rows(device, accumulator, gradient, accumulators.backend)
    return lookup.backend.name, f"an Embedding's rows: only those that were looked up; {lookup.reason}"


def _head(slot: Slot, accumulators: Accumulators) -> tuple[str, str]:
    describe = partial(matmul.describe, in_slices=True)
    name, reason = _product(describe, "a head's product, by slices of the vocabulary", slot, accumulators)
    device, operand, _ = slot.lane
    of_softmax, why = softmax.select(device, operand, accumulators.backend)
    return name, f"{reason}; softmax by {of_softmax}: {why}"


def _sink(slot: Slot, accumulators: Accumulators) -> tuple[str, str]:
    return "user", "a backward outside fusedacc adds to it through fusedacc.sink"


#: For each path of modules that add inside their backward: a function that returns the backend and reason.
IN_MODULE: dict[Path, Callable[[Slot, Accumulators], tuple[str, str]]] = {
    Path.GEMM: partial(_product, matmul.describe, "a Linear's product"),
    Path.GROUPED: partial(_product, grouped.describe, "experts' products, only of experts that have rows"),
    Path.EMBEDDING: _lookup,
    Path.HEAD: _head,
    Path.SINK: _sink,
}


def _in_backward(slot: Slot, accumulators: Accumulators) -> Route:
    """Return the route of a weight whose modules add to its accumulator inside their backward."""
    paths = tuple(sorted(map(Path, slot.paths), reverse=True))
    names = []
    reasons = []
    for path in MODULE_PATHS:
        if path in paths:
            name, why = IN_MODULE[path](slot, accumulators)
            names.append(name)
            reasons.append(why)
    if is_distributed(slot.param):
        reasons.append("tensor parallel: each rank adds to its own shard")
    if slot.left_to:
        reasons.append(slot.left_to)
    if slot.compiled:
        reasons.append("compiled: an operator in the backward's graph adds it")
    elif slot.left_to_compiler and is_compiler_imported():
        reasons.append(f"inside torch.compile left to the compiler: {slot.left_to_compiler}")
    return Route(paths, "+".join(dict.fromkeys(names)), "; ".join(reasons))


def _route_of_shard(slot: Slot, accumulators: Accumulators, window: Window) -> Route:
    """Return the route of an FSDP2 shard, whose gradient modules may have accumulated unsharded."""
    sharded = route(slot, accumulators)
    shards = window.shards
    if shards is None or shards.make_sums is None:
        return sharded
    if shards.sums is None:
        return sharded.noting(
            "model= adds in place only while set_requires_gradient_sync(False) defers FSDP2's reduction"
        )
    unsharded = shards.sums.slot_of(slot)
    if unsharded is None:
        return sharded.noting(shards.sums.why_left(slot))
    chosen = _in_backward(unsharded, shards.sums.accumulators) if unsharded.paths else sharded
    return chosen.noting(f"unsharded, reduced by FSDP2; sums in {_name(unsharded.accumulate_dtype)}")


def _count_bytes(slot: Slot, chosen: Route, window: Window, *, stochastic: bool) -> tuple[str, str]:
    """Return bytes per element in the window's first and in later micro-batches; "-" if not counted."""
    shown = BYTES[chosen.paths[0]]
    if isinstance(shown, str):
        return shown, shown
    if slot.needs_eager:
        return "-", "-"
    parameters: dict[str, Any] = {
        "loop": shown[0] if window.counted else shown[1],
        "scale_is_one": not window.may_scale,
        "visible": not window.counted,
        "rounding": "stochastic" if stochastic else "nearest",
    }
    if window.counted and window.reduction.counts:
        parameters["scale"] = 1 / window.steps
    dtypes = (slot.param.dtype, slot.param.dtype, slot.accumulate_dtype)
    first = traffic.total(traffic.bytes_per_micro_batch(*dtypes, **parameters, first=True))
    later = traffic.total(traffic.bytes_per_micro_batch(*dtypes, **parameters, first=False))
    return f"{first:g}", f"{later:g}"
