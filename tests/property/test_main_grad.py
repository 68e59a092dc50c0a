"""With `main_grad=True` the wrapper equals plain PyTorch under random events, as in test_property.py."""

from dataclasses import replace

import pytest
import torch
from main_grad_modules import PROTOCOLS, _Product
from torch import Tensor

import fusedacc
from fusedacc.accumulators.p_grad import ParamGrads

from .event import Event
from .events import random_case
from .legality import exact
from .lockstep import failure, report
from .models import Dense
from .oracle import Loop
from .test_property import COUNT, ONE, Schedule, check_norms, choose_engine, shrink_buckets
from .world import Case, Make

SEEDS = range(max(COUNT // 4, 1)) if ONE is None else [int(ONE)]
#: Events after which `main_grad=True` differs from a plain sum, as docs/main-grad.md says.
LEFT_OUT = ("edit", "edit_spent", "put", "set_grad", "raising", "hook", "cast", "resize", "grad")
VARIANTS = ("plain", "thread", "stashed", "adversarial")


def restricted(case: Case) -> Case:
    """Return the case without what `main_grad=True` refuses."""
    loop = case.loop
    if loop.reduction == "weighted":
        loop = replace(loop, reduction="normalized")
    if loop.rounding == "stochastic":
        loop = replace(loop, rounding="nearest")
    is_cast = case.model.dtype in ("bfloat16", "float16") or loop.accumulate_dtype is not None
    if not loop.counted and is_cast:
        # After `step()` p.grad has what a cast has left, but in the dtype of the sum.
        loop = replace(loop, scaling=None, clip=None, reduction="sum")
    if repeats(case) and exact(replace(case, loop=loop)):
        loop = replace(loop, clip=1.0)
    events: list[Event] = []
    has_run = False
    for event in case.events:
        is_second = has_run and event.kind in ("backward", "closure") and loop.counted
        if event.kind in LEFT_OUT or is_second or (event.kind == "unscale" and loop.scaling is None):
            continue
        has_run = event.kind == "backward" or (has_run and event.kind not in ("step", "closure", "flush"))
        events.append(plain(event, loop))
    return replace(case, loop=loop, events=tuple(events))


def repeats(case: Case) -> bool:
    """Whether a weight is used several times in a pass.

    Modules add each use to the sum. Autograd adds up the uses first, in the parameter's dtype.
    """
    order = case.model.order
    return any(order.count(i) > 1 for i, name in enumerate(case.model.blocks) if name == "dense")


def plain(event: Event, loop: Loop) -> Event:
    args = dict(event.args)
    if args.get("variant") not in (None, *VARIANTS):
        args["variant"] = "plain"
    if args.get("weight") == 0.0:
        args["weight"] = 2.0
    unused = ("model", "nan", "calls") if loop.weighs else ("model", "nan", "calls", "weight", "late")
    if args.get("bad"):
        args.pop("index", None)  # the hook that puts it there would get no gradient
    for name in unused:
        args.pop(name, None)
    return replace(event, args=args)


def keep_final_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave copies of the final gradients in p.grad after an update, which the comparison reads."""
    end_window = ParamGrads.end_window

    def end_and_show(grads: ParamGrads) -> None:
        shown = [(slot.param, slot.param.grad) for slot in grads.slots if slot.param.grad is not None]
        copies = [(param, gradient.clone()) for param, gradient in shown]
        end_window(grads)
        for param, gradient in copies:
            param.grad = gradient
        grads.mark_consumed()

    monkeypatch.setattr(ParamGrads, "end_window", end_and_show)


def wrapping(seed: int) -> Make:
    def wrapped(inner: torch.optim.Optimizer, loop: Loop) -> fusedacc.AccumulatingOptimizer:
        return fusedacc.AccumulatingOptimizer(
            inner,
            Schedule(loop.steps) if isinstance(loop.steps, tuple) else loop.steps,
            reduction=loop.reduction,
            accumulate_dtype=loop.accumulate_dtype,
            max_grad_norm=loop.clip,
            norm_type=loop.norm_type,
            skip_nonfinite=loop.skips,
            master_weights=loop.masters,
            main_grad=True,
        )

    return wrapped


def returned(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient to autograd."""
    return gradient


@pytest.mark.parametrize("seed", SEEDS)
def test_training_with_main_grad_equals_stock(seed, monkeypatch):
    case, make = restricted(random_case(seed)), wrapping(seed)
    is_low = case.model.dtype in ("bfloat16", "float16")
    protocol = returned if repeats(case) and is_low else list(PROTOCOLS.values())[seed % 3]

    def forward(self, x):
        linear = self.linear
        adds = hasattr(linear.weight, "main_grad")  # not with plain PyTorch, and not if it is frozen
        chosen = protocol if adds else returned
        return torch.tanh(_Product.apply(x, linear.weight, chosen) + linear.bias)

    monkeypatch.setattr(Dense, "forward", forward)
    keep_final_gradients(monkeypatch)
    shrink_buckets(seed, monkeypatch)
    choose_engine(case, seed, monkeypatch)
    check_norms(monkeypatch)
    failed = failure(case, make, exposes=False) is not None
    assert not failed, report(case, make, exposes=False)
