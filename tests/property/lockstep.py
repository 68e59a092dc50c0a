"""Run a case with the wrapper and with plain PyTorch, compare after each event, and shrink failing cases."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .collector import Collector
from .event import Event
from .legality import BACKWARD, exact, legal
from .masters import MasterCollector
from .oracle import LOW, Loop, Mismatch, StockManual, dense, difference
from .world import Case, Make, World

#: A case ends when a parameter exceeds this, because sums overflow and differences mean nothing.
HUGE = 1e4
#: Events after which autograd may store a gradient in p.grad.
MOVES = ("freeze", "cast", "restore", "hook", "unhook", "copy", "add_group", "swap")
MOVES += ("append", "remove", "exchange", "resize")


def stock(case: Case) -> Make:
    def make(inner: torch.optim.Optimizer, loop: Loop) -> StockManual:
        if loop is case.loop and exact(case):
            return StockManual(inner, loop)
        return MasterCollector(inner, loop) if loop.masters else Collector(inner, loop)

    return make


class Lockstep:
    def __init__(self, case: Case, make: Make, exposes: bool = True) -> None:
        self.case, self.exposes = case, exposes
        self.stock = World(case, stock(case))
        self.subject = World(case, make)
        self.diverged = False
        self.zeroed = False  # p.grad may still hold zeros that `zero_grad(set_to_none=False)` has left
        self.rough = False  # p.grad may hold raw gradients until the next step
        self.recast = False  # what an update has left was cast with its parameters, from this dtype or that
        self.lingers = False  # the user put gradients beside used ones, which are not cleared

    def play(self, event: Event) -> None:
        unseen = (
            event.kind == "zero_grad" and event.get("model") and not (self.exposes or self.case.loop.counted)
        )
        if (
            unseen
            or not legal(self.case, self.stock, event)
            or (event.kind == "edit" and not self.editable())
            or (event.kind == "unscale" and self.refused())
        ):
            return
        self.note(event)
        dirty = getattr(self.stock.opt, "dirty", True) or event.kind == "closure"
        self.subject.perform(event)
        for mine, its in (
            (self.stock.opt, self.subject.owned),
            (self.stock.critic_opt, list(self.subject.critic.parameters()) if self.subject.critic else []),
        ):
            if mine is not None:
                mine.witness = [p.grad for p in its]
        self.stock.perform(event)
        self.compare(event)
        if event.kind in ("step", "closure", "discard") and dirty and not self.stock.opt.stale:
            self.rough = False

    def note(self, event: Event) -> None:
        odd = event.get("variant") in ("create_graph", "assign") or event.kind == "put"
        zeroed = event.kind == "zero_grad" and not event.get("set_to_none", True)
        self.rough = self.rough or odd or zeroed or event.kind in MOVES
        self.recast = self.stock.opt.stale and (self.recast or event.kind == "cast")
        if not (self.stock.opt.stale or self.stock.ignored):
            self.stock.written = self.stock.moved = False
        puts = event.kind == "put" or event.get("variant") == "assign"
        if puts and self.stock.opt.stale:
            self.lingers = True
        elif event.kind in (*BACKWARD, "zero_grad", "discard", "ignored") and not puts:
            self.lingers = False
        if event.kind == "ignored":
            self.stock.ignored = not event.get("zero")
        elif event.kind in (*BACKWARD, "zero_grad", "discard"):
            self.stock.ignored = False
        self.zeroed = zeroed or (self.zeroed and not self.stock.opt.stale)

    def editable(self) -> bool:
        return exact(self.case) or (self.exposes and self.plain())

    def refused(self) -> bool:
        """Whether autograd may have stored a float16 gradient, which torch's `unscale_` rejects."""
        stored = not self.plain() or getattr(self.stock.opt, "rounds", False)
        return self.case.model.dtype == "float16" and not self.case.loop.counted and stored

    def plain(self) -> bool:
        return not self.rough and not any(p._post_accumulate_grad_hooks for p in self.stock.owned)

    def compare(self, event: Event) -> None:
        stock, subject = self.stock, self.subject
        equal(stock.observed, subject.observed, "what hooks and calls showed", self.case)
        stock.observed.clear(), subject.observed.clear()
        equal(stock.params, subject.params, "parameter", self.case)
        if event.kind == "restore" or event.get("how") == "state_dict":
            stock.opt.has_updated = subject.opt.has_updated  # the contract does not say
        for name in ("num_updates", "num_skipped", "has_updated"):
            mine, its = getattr(stock.opt, name), getattr(subject.opt, name)
            if mine != int(its):
                raise Mismatch(f"{name} is {its} and must be {mine}")
        if stock.scaler is not None:
            kept = subject.scaler.state_dict()
            mine, its = stock.scaler.state_dict(), {name: kept[name] for name in ("scale", "_growth_tracker")}
            if mine != its:
                raise Mismatch(f"scaler is {its} and must be {mine}")
        if self.case.loop.counted:
            mine, its = stock.opt.window.count, subject.opt.micro_step
            if mine != its:
                raise Mismatch(f"micro_step is {its} and must be {mine}")
            if not stock.opt.dirty and subject.opt.will_update != stock.opt.will_update:
                raise Mismatch(f"will_update is {subject.opt.will_update}")
        its = subject.opt.optimizer.state_dict()
        if stock.opt.num_skipped or self.case.loop.masters:
            forget_unused(its, stock.opt.inner)
        equal(flat(stock.opt.inner.state_dict()), flat(its), "optimizer state", self.case)
        if event.kind in ("step", "closure", "flush") and stock.opt.has_updated:
            self.compare_update()
        self.compare_gradients(event)
        self.diverged = not all(bool((p.abs() < HUGE).all()) for p in stock.params)

    def compare_update(self) -> None:
        """Compare the master weights of parameters that have a gradient, and the gradient's norm."""
        stock, subject = self.stock, self.subject
        present = [i for i, p in enumerate(subject.owned) if p.grad is not None]
        if self.case.loop.masters:
            stock.opt.follow()
            mine, its = stock.opt.masters, masters_of(subject.opt)
            equal([mine[i] for i in present], [its[i] for i in present], "master", self.case)
        norm = getattr(subject.opt, "grad_norm", None)
        if norm is None or stock.opt.found or not present:
            return
        if self.case.loop.clips:
            must, rounding = stock.opt.norm, stock.opt.slack + 1e-6
        else:
            kind = self.case.loop.norm_type
            gradients = [dense(subject.owned[i].grad).flatten().double() for i in present]
            must = torch.linalg.vector_norm(torch.cat(gradients), kind).item()
            rounding = 1e-5 + max(torch.finfo(subject.owned[i].grad.dtype).eps for i in present)
        if must is not None and must < HUGE and abs(norm.item() - must) > rounding * must + 1e-6:
            raise Mismatch(f"grad_norm is {norm.item()} and must be {must}")

    def compare_gradients(self, event: Event) -> None:
        stock, subject = self.stock, self.subject
        known = {id(p) for p in (*stock.owned, *stock.removed)}
        strangers = [
            (a.grad, b.grad)
            for a, b in zip(stock.params, subject.params, strict=True)
            if id(a) not in known or exact(self.case)
        ]
        if stock.opt.found:  # it may be unscaled then or not
            strangers = [(shown(a), shown(b)) for a, b in strangers]
        equal([a for a, _ in strangers], [b for _, b in strangers], "p.grad", self.case)
        if exact(self.case) or not self.exposes:
            return
        opt = stock.opt
        if opt.stale and self.recast:
            return
        if opt.stale:
            equal(finals(stock), finals(subject), "final p.grad", self.case)
        elif self.lingers:
            return
        elif (
            self.case.loop.counted
            and event.kind in (*BACKWARD, "unscale", "edit", "ignored")
            and opt.dirty
            and self.plain()
        ):
            final = opt.will_update and self.case.loop.reduction != "normalized"
            self.check_visible(final)
        elif self.case.loop.counted and not opt.dirty and not self.rough:
            self.check_visible(False)
        elif not self.case.loop.counted and self.case.loop.reduction == "sum" and opt.dirty and self.plain():
            self.check_visible(True)

    def check_visible(self, expected: bool) -> None:
        """Check that `p.grad` of every parameter is None, or the final gradient if one is expected."""
        opt = self.stock.opt
        counts = expected and any(opt.preview(index)[0] is not None for index in range(len(opt.params)))
        if self.stock.ignored and not counts:
            return
        if expected is False and self.case.loop.reduction == "normalized" and opt.will_update and opt.dirty:
            return  # it may or may not be final yet: its weight can still be set
        for index, p in enumerate(self.subject.owned):
            total, scale = opt.preview(index) if expected else (None, 1.0)
            weightless = total is not None and not total.magnitude.any() and self.case.loop.weighs
            if self.zeroed and total is None and p.grad is not None and not dense(p.grad).any():
                continue
            if (p.grad is None) != (total is None) and not weightless:
                shown = "None" if p.grad is None else "there"
                raise Mismatch(f"p.grad of parameter {index} is {shown} and must not be")
            if p.grad is not None and total is not None:
                total.check(p.grad, scale, f"visible p.grad of parameter {index}")


def shown(gradient: Tensor | None) -> bool:
    return gradient is not None


def masters_of(opt: Any) -> list[Tensor]:
    """Return the current master weights. The wrapper's public methods would first update them."""
    return opt.masters if hasattr(opt, "masters") else [opt._masters._masters.get(s) for s in opt._slots]


def forget_unused(state: dict[str, Any], inner: torch.optim.Optimizer) -> None:
    """Remove state that is all zeros if the oracle's inner optimizer has none or has another dtype.

    A fused optimizer creates state in a first step even if that update is skipped. An optimizer that creates
    state when it receives a parameter uses the parameter's dtype, not the master weight's.
    """
    params = [p for group in inner.param_groups for p in group["params"]]
    for index, p in enumerate(params):
        entry = state["state"].get(index, {})
        tensors = {name: value for name, value in entry.items() if isinstance(value, Tensor)}
        if any(bool(value.any()) for value in tensors.values()):
            continue
        if p not in inner.state:
            state["state"].pop(index, None)
        else:
            state["state"][index] = {
                **entry,
                **{k: v.to(p.dtype) for k, v in tensors.items() if v.dtype in LOW},
            }


def flat(state: dict[str, Any]) -> list[Any]:
    """Return an inner optimizer's state and options in the order of its parameters."""
    found: list[Any] = []
    for index in sorted(state["state"]):
        for key in sorted(state["state"][index]):
            found += [f"{index}.{key}", state["state"][index][key]]
    return [*found, [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]]


def equal(mine: list[Any], its: list[Any], what: str, case: Case) -> None:
    if len(mine) != len(its):
        raise Mismatch(f"{what}: {len(its)} and must be {len(mine)}")
    for index, (a, b) in enumerate(zip(mine, its, strict=True)):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or a != b:
                shown = [tuple(x.shape) if isinstance(x, Tensor) else x for x in (a, b)]
                raise Mismatch(f"{what} {index} is {shown[1]} and must be {shown[0]}")
            continue
        loose = what.startswith("what hooks") and (a.dtype in LOW or not exact(case))
        a, b = dense(a), dense(b)
        if a.shape != b.shape or (a.dtype != b.dtype and not loose):
            raise Mismatch(
                f"{what} {index} is {b.dtype} {tuple(b.shape)} and must be {a.dtype} {tuple(a.shape)}"
            )
        if not loose and not torch.equal(a, b):
            wrong = ~((a == b) | (a.isnan() & b.isnan()))
            if wrong.any():
                raise Mismatch(f"{what} {index} {tuple(a.shape)} {difference(a, b, wrong)}")


def finals(world: World) -> list[Tensor | None]:
    """Return the gradients that an update left, in the parameters' dtype: p.grad may be a float32 sum.

    Gradients whose shape differs from the parameter's are left out, because they may stay or go.
    """
    fitting = [p.grad if p.grad is not None and p.grad.shape == p.shape else None for p in world.owned]
    return [
        None if gradient is None else gradient.to(p.dtype)
        for p, gradient in zip(world.owned, fitting, strict=True)
    ]


@contextmanager
def quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph=True.*")
        warnings.filterwarnings("ignore", message=".*leaves .* parameters .* unwritten.*")
        warnings.filterwarnings("ignore", message=".*gradient layout contract.*")
        warnings.filterwarnings("ignore", message=".*None of the inputs have requires_grad.*")
        yield
    torch.set_num_threads(threads)


def run(case: Case, make: Make, exposes: bool = True) -> None:
    """Raise an error at the first event after which the two sides differ."""
    with quiet():
        pair = Lockstep(case, make, exposes)
        for position, event in enumerate(case.events):
            if pair.diverged:
                break
            try:
                pair.play(event)
            except Exception as error:
                error.args = (f"at event {position} {event}: {type(error).__name__}: {error}",)
                raise
        pair.subject.opt.close()


def failure(case: Case, make: Make, exposes: bool = True) -> Exception | None:
    try:
        run(case, make, exposes)
    except Exception as error:
        return error
    return None


def manner(error: Exception | None) -> str | None:
    """Return an error's kind and text without its numbers."""
    if error is None:
        return None
    text = str(error).split("}): ", 1)[-1].split("most at")[0]
    return f"{type(error).__name__} {re.sub('[0-9]+', '', text)}"


def shrink(case: Case, make: Make, exposes: bool = True, budget: int = 400) -> Case:
    """Remove events greedily while the case fails in the same way, in at most `budget` runs."""
    way = manner(failure(case, make, exposes))
    chunk = max(1, len(case.events) // 2)
    while chunk and budget > 0:
        start = 0
        while start < len(case.events) and budget > 0:
            fewer = replace(case, events=case.events[:start] + case.events[start + chunk :])
            budget -= 1
            if manner(failure(fewer, make, exposes)) == way:
                case = fewer
            else:
                start += chunk
        chunk //= 2
    return case


def report(case: Case, make: Make, exposes: bool = True) -> str:
    small = shrink(case, make, exposes)
    lines = [
        f"seed {case.seed} fails; run it again with FUSEDACC_SEED={case.seed}",
        str(failure(small, make, exposes)),
    ]
    lines += [f"  {small.model}", f"  {small.optimizer}", f"  {small.loop}", "  events:"]
    return "\n".join(lines + [f"    {event}" for event in small.events])
