"""A plan in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import Optimizer

from ..optimizer import AccumulatingOptimizer
from .allocations import ACTIVATIONS, KINDS, LIBRARIES, Peak
from .budget import format_bytes
from .search import TooSmallError

if TYPE_CHECKING:
    from .plans import Plan


def render(plan: Plan) -> str:
    """The table that `str(plan)` is."""
    steps, last = plan.gradient_accumulation_steps, plan.micro_batch_sizes[-1]
    times = f"{plan.micro_batch_size} x {steps}"
    if plan.world_size > 1:
        times += f" x {plan.world_size} ranks"
    ragged = f", the last micro-batch of {last}" if last != plan.micro_batch_size else ""
    lines = [
        f"micro_batch_size={plan.micro_batch_size}, gradient_accumulation_steps={steps}: "
        f"{times} for a batch of {plan.global_batch_size}{ragged}",
        "",
        f"{'at the peak':<28}{'bytes':>12}  {'share':>6}",
    ]
    for kind in (*KINDS, LIBRARIES):
        size = plan.bytes_by_kind[kind]
        lines.append(_line(kind, size, plan.peak_bytes, plan.certainty.get(kind, "")))
    lines.append(_line("peak, predicted", plan.peak_bytes, plan.memory_budget, plan.certainty["peak_bytes"]))
    if plan.measured_peak_bytes is None:
        lines.append(f"{'peak, measured':<28}{'none':>12}  {plan.not_measured}")
    else:
        lines.append(_line("peak, measured", plan.measured_peak_bytes, plan.memory_budget, "measured"))
    lines.append(_line("budget", plan.memory_budget, plan.memory_budget, ""))
    lines.append(_line("headroom", plan.headroom_bytes, plan.memory_budget, ""))
    share = plan.accumulation_bytes_per_update / max(1, plan.bytes_per_update)
    moved = f"{format_bytes(plan.bytes_per_update)}, {share:.0%} of it to accumulate gradients"
    if plan.wrapper_arguments().get("model") is not None:
        moved += ", beside what products add by themselves"
    lines += [
        "",
        f"an update moves {moved}",
        "shares of kinds are of the peak, the others of the budget",
    ]
    if plan.bytes_by_kind[LIBRARIES]:
        lines.append(
            "counted is what is alive: the C library may keep more of a CPU's memory (docs/memory.md)"
        )
    return "\n".join(lines)


def _line(name: str, size: int, whole: int, certainty: str) -> str:
    return f"{name:<28}{format_bytes(size):>12}  {size / max(1, whole):>6.1%}  {certainty}".rstrip()


def too_small(error: TooSmallError, peak: Peak, scratch: int, optimizer: Optimizer) -> str:
    """Why no micro-batch fits, and what would make one."""
    held = [f"{kind} {format_bytes(size)}" for kind, size in peak.by_kind.items() if size]
    missing = error.cost - error.budget
    cures = []
    if peak.by_kind.get(ACTIVATIONS, 0) > missing:
        cures.append("activation checkpointing")
    wrapper = optimizer if isinstance(optimizer, AccumulatingOptimizer) else None
    if wrapper is not None and wrapper._masters is not None:
        cures.append("no master_weights")
    if wrapper is not None and any(slot.accumulate_dtype.itemsize > 2 for slot in wrapper._slots):
        cures.append('accumulate_dtype=torch.bfloat16 with rounding="stochastic"')
    fixed = error.cost - peak.by_kind.get(ACTIVATIONS, 0) - scratch
    ranks = 2
    while ranks < 1024 and fixed / ranks + peak.by_kind.get(ACTIVATIONS, 0) + scratch > error.budget:
        ranks *= 2
    if ranks < 1024:
        cures.append(f"sharding model and optimizer over {ranks} ranks")
    return (
        f"memory_budget={format_bytes(error.budget)} is {format_bytes(missing)} less than one sample "
        f"takes ({format_bytes(error.cost)}: {', '.join(held)}); what may help: "
        f"{', '.join(cures) or 'a smaller model'}"
    )
