"""A network, its optimizer (a wrapper or an oracle), and the actions of a user."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from loops import Failure, fail
from torch import Tensor

import fusedacc

from . import regrouping
from .changes import Changes
from .event import Event
from .models import Network, build, loss_of
from .oracle import Loop, dense
from .scaling import PlainScaler, spoilt


@dataclass(frozen=True)
class OptimizerSpec:
    name: str
    options: tuple[tuple[str, Any], ...]
    groups: int = 1

    def make(self, groups: list[list[Tensor]]) -> torch.optim.Optimizer:
        factory = getattr(torch.optim, self.name)
        return factory([{"params": group} for group in groups], **dict(self.options))


@dataclass(frozen=True)
class Case:
    seed: int
    model: Any
    optimizer: OptimizerSpec
    loop: Loop
    critic_loop: Loop
    events: tuple[Event, ...]


Make = Callable[[torch.optim.Optimizer, Loop], Any]


class World(Changes):
    """One side of a case. `observed` collects what hooks and calls return, for comparison."""

    def __init__(self, case: Case, make: Make) -> None:
        self.case, self.make = case, make
        self.model, self.critic = build(case.model)
        spare = {id(p) for i in case.model.spare for p in self.model.blocks[i].parameters()}
        owned = [p for p in self.model.parameters() if id(p) not in spare]
        half = (len(owned) + 1) // 2
        groups = [owned] if case.optimizer.groups == 1 else [owned[:half], owned[half:]]
        self.opt = make(case.optimizer.make(groups), case.loop)
        self.scaler = scaler_of(self.opt, case.loop)
        self.critic_opt = None
        if self.critic is not None:
            inner = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
            self.critic_opt = make(inner, case.critic_loop)
        self.observed: list[Tensor | None] = []
        self.handles: list[Any] = []
        self.saved: tuple[dict[str, Any], bytes, Any] | None = None
        self.saved_shapes: Any = None
        self.stash: Tensor | None = None  # a loss whose backward comes later
        self.stashed_at = 0
        self.written = False  # the user has written to a gradient that an update used
        self.ignored = False  # p.grad may show what does not count
        self.moved = False  # parameters have got new nodes since, under which autograd adds to it
        self.removed: list[Tensor] = []  # taken out of their groups by hand, which the wrapper sees later
        self.keeps_graphs = False  # a gradient may still hold the graph that it was made with

    # What the comparison reads.

    @property
    def params(self) -> list[Tensor]:
        return list(self.model.parameters())

    @property
    def groups(self) -> list[list[Tensor]]:
        groups = getattr(self.opt, "groups", None)
        return [group["params"] for group in self.opt.param_groups] if groups is None else groups

    @property
    def owned(self) -> list[Tensor]:
        return [p for group in self.groups for p in group]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.head.bias.dtype

    @property
    def shapes(self) -> Any:
        """The shapes of all parameters, and by group."""
        return [[tuple(p.shape) for p in group] for group in (self.params, *self.groups)]

    # Forward and backward.

    def loss(self, event: Event, model: Network | None = None) -> Tensor:
        model = self.model if model is None else model
        inputs = model.inputs(event.get("seed"))
        output = model(inputs, event.get("depth", 9), event.get("mode"))
        return loss_of(output, event.get("seed"), event.get("loss", "mean"))

    def backward(self, event: Event) -> None:
        variant = event.get("variant", "plain")
        loss = self.stash if variant == "stashed" else self.loss(event)
        self.stash = None
        if event.get("nan"):
            loss = loss * float("nan")
        if event.get("bad") and event.get("index") is None:
            loss = loss * float(event.get("bad"))
        if variant == "penalty":
            leaves = [p for p in self.params if p.requires_grad]
            gradients = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            loss = loss + 0.01 * sum(g.pow(2).sum() for g in gradients if g is not None)
        loss = self.scaled(loss)
        self.begin()
        if variant == "inputs":
            picked = [
                p for i, p in enumerate(self.params) if p.requires_grad and i % 2 == event.get("seed") % 2
            ]
            loss.backward(inputs=[*picked, self.model.head.bias])
        elif variant == "create_graph":
            loss.backward(create_graph=True)
            self.keeps_graphs = True
        elif variant == "retain":
            loss.backward(retain_graph=True)
            self.finished(True)
            self.begin()
            loss.backward()
        elif variant == "assign":
            for p, gradient in zip(self.owned, self.gradients(loss, self.owned), strict=True):
                if gradient is not None:
                    p.grad = gradient.clone()  # one of stride 0 could not be added to
        elif variant == "thread":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(loss.backward).result()
        elif variant == "adversarial":
            with self.critic_opt.ignore():
                score = self.critic(self.model(self.model.inputs(event.get("seed")), 9, None))
                self.scaled(score.mean()).backward()
        else:
            loss.backward()
        several = event.get("mode") == "reentrant" or variant in ("assign", "create_graph")
        self.finished(several, by_hand=variant == "assign")

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    @contextmanager
    def spoiling(self, event: Event) -> Iterator[None]:
        """Put an inf or nan into the gradients of one parameter, if the event asks for it."""
        index = event.get("index")
        p = None if index is None else self.params[index % len(self.params)]
        if p is None or not p.requires_grad:
            yield
            return
        handle = p.register_hook(lambda gradient: spoilt(gradient, float(event.get("bad"))))
        try:
            yield
        finally:
            handle.remove()

    @staticmethod
    def gradients(loss: Tensor, params: list[Tensor]) -> list[Tensor | None]:
        leaves = [p for p in params if p.requires_grad]
        found = iter(torch.autograd.grad(loss, leaves, allow_unused=True))
        return [next(found) if p.requires_grad else None for p in params]

    def begin(self) -> None:
        """Tell an optimizer without hooks that a backward begins."""
        if hasattr(self.opt, "before_backward"):
            self.opt.before_backward()

    def finished(self, several: bool, by_hand: bool = False) -> None:
        """Oracles collect after each backward."""
        if hasattr(self.opt, "after_backward"):
            self.opt.after_backward(several, by_hand)

    def context(self, event: Event) -> AbstractContextManager[Any]:
        if not self.case.loop.needs_context and not event.get("accumulate"):
            return nullcontext()
        return self.opt.accumulate() if event.get("late") else self.opt.accumulate(weight=event.get("weight"))

    def perform(self, event: Event) -> None:
        torch.manual_seed(0)
        getattr(self, f"do_{event.kind}")(event)

    # The user's actions

    def do_backward(self, event: Event) -> None:
        with self.context(event) as micro_batch, self.spoiling(event):
            for _ in range(event.get("calls", 1)):
                self.backward(event)
            if event.get("late"):
                micro_batch.weight = event.get("weight")

    def do_closure(self, event: Event) -> None:
        def closure() -> Tensor:
            if event.get("zero"):
                self.opt.zero_grad()
            self.do_backward(event)
            return torch.tensor(float(event.get("seed")))

        self.observed.append(self.opt.step(closure))

    def do_raising(self, event: Event) -> None:
        """Raise in a backward. If `early`, before any gradient arrives, so that it can be repeated."""
        loss = self.scaled(self.loss(event))
        if not event.get("early"):
            self.begin()
        handle = (loss if event.get("early") else self.model.front.weight).register_hook(fail)
        try:
            with self.context(event):
                loss.backward()
        except Failure:
            self.observed.append(torch.ones(()))
        else:
            self.observed.append(torch.zeros(()))
        handle.remove()
        if not event.get("early"):
            self.opt.discard()

    def do_unscale(self, event: Event) -> None:
        self.scaler.unscale_(self.opt)

    def do_step(self, event: Event) -> None:
        if self.scaler is None:
            self.opt.step()
            return
        self.scaler.step(self.opt)
        if self.opt.has_updated or not event.get("late_update"):
            self.scaler.update()

    def do_zero_grad(self, event: Event) -> None:
        if event.get("model"):
            self.model.zero_grad()
            if hasattr(self.opt, "after_backward"):
                self.opt.zero_grad()
        else:
            self.opt.zero_grad(set_to_none=event.get("set_to_none", True))

    def do_flush(self, event: Event) -> None:
        if self.scaler is None:
            self.opt.flush()
            return
        self.scaler.flush(self.opt)
        self.scaler.update()

    def do_discard(self, event: Event) -> None:
        self.opt.discard()

    def do_ignored(self, event: Event) -> None:
        if self.case.loop.counted:  # what is spent goes
            self.begin()
        with self.opt.ignore():
            self.loss(event).backward()
        if event.get("zero"):
            self.opt.zero_grad()

    def do_critic(self, event: Event) -> None:
        if event.get("zero"):  # else what the generator's pass has left is still there
            self.critic_opt.zero_grad()
        with torch.no_grad():
            sample = self.model(self.model.inputs(event.get("seed")), 9, None)
        loss = self.critic(sample).pow(2).mean()
        if hasattr(self.critic_opt, "before_backward"):
            self.critic_opt.before_backward()
        loss.backward()
        if hasattr(self.critic_opt, "after_backward"):
            self.critic_opt.after_backward(False)
        self.critic_opt.step()

    def do_grad(self, event: Event) -> None:
        self.observed += self.gradients(self.loss(event), self.params)

    def do_stash(self, event: Event) -> None:
        self.stash, self.stashed_at = self.loss(event), self.opt.num_updates

    def do_hook(self, event: Event) -> None:
        p = self.params[event.get("index") % len(self.params)]
        if not p.requires_grad:
            return
        actions: dict[str, Callable[[Any], Any]] = {
            "scale": lambda g: g * 1.5,
            "keep": lambda g: self.observed.append(g),
            "post_see": lambda q: self.observed.append(q.grad.detach().clone()),
            "post_halve": halve,
        }
        action = event.get("action")
        if action.startswith("post"):
            self.handles.append(p.register_post_accumulate_grad_hook(actions[action]))
        else:
            self.handles.append(p.register_hook(actions[action]))

    def do_unhook(self, event: Event) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def do_freeze(self, event: Event) -> None:
        """Freeze or unfreeze a block or a parameter. The front and the last bias always train."""
        self.moved = self.moved or bool(event.get("on"))
        if event.get("one"):
            kept = {id(self.model.front.weight), id(self.model.head.bias)}
            params = [p for p in self.params if id(p) not in kept]
            params[event.get("index") % len(params)].requires_grad_(event.get("on", False))
            return
        blocks = self.model.blocks
        blocks[event.get("index") % len(blocks)].requires_grad_(event.get("on", False))

    def do_cast(self, event: Event) -> None:
        self.stash = None
        self.moved = True
        self.model.to(getattr(torch, event.get("dtype")))
        if self.critic is not None:
            self.critic.to(getattr(torch, event.get("dtype")))

    def do_swap(self, event: Event) -> None:
        """Give a parameter new storage through `.data`."""
        p = self.params[event.get("index") % len(self.params)]
        p.data = p.data.clone()

    def do_write(self, event: Event) -> None:
        """Write to every second element of a parameter."""
        self.stash = None
        p = self.params[event.get("index") % len(self.params)]
        with torch.no_grad():
            p.mul_(0.5 + 0.5 * (torch.arange(p.numel()) % 2).reshape(p.shape))

    def do_rate(self, event: Event) -> None:
        for group in self.opt.param_groups:
            group["lr"] *= 0.5

    def do_add_group(self, event: Event) -> None:
        known = {id(p) for p in self.owned}
        new = [p for p in self.params if id(p) not in known]
        for p in new:
            p.grad = None
        if new:
            self.opt.add_param_group({"params": new})

    def do_set_grad(self, event: Event) -> None:
        p = self.owned[event.get("index") % len(self.owned)]
        if not (p.grad is not None and p.grad.is_sparse):
            p.grad = None if event.get("none") else torch.full_like(p, 0.25)

    def do_model_copy(self, event: Event) -> None:
        """Train a deep copy of the model, which must change only its own `p.grad`."""
        twin = copy.deepcopy(self.model)
        for _ in range(2):
            self.loss(event, twin).backward()
        self.observed += [None if p.grad is None else dense(p.grad) for p in twin.parameters()]

    def do_inspect(self, event: Event) -> None:
        repr(self.opt)
        if hasattr(self.opt, "explain"):
            str(self.opt.explain())
            _ = (self.opt.accumulator_bytes, self.opt.micro_step, self.opt.will_update)

    # Copies, files and restarts.

    def do_copy(self, event: Event) -> None:
        self.stash = None
        how = event.get("how")
        if how == "state_dict":
            model, opt = self.restarted(event.get("late", False))
        elif how == "deepcopy":
            model, opt = copy.deepcopy((self.model, self.opt))
        else:
            model, opt = pickle.loads(pickle.dumps((self.model, self.opt)))
        if event.get("keep", True):
            self.model, self.opt, self.handles = model, opt, []
            if self.scaler is not None:
                before, self.scaler = self.scaler, scaler_of(opt, self.case.loop)
                self.scaler.load_state_dict(before.state_dict())

    def restarted(self, late: bool) -> tuple[Network, Any]:
        """Return a model and an optimizer from files. If `late`, freeze parameters only after loading."""
        file = io.BytesIO()
        state = self.opt.state_dict()
        torch.save({"model": self.model.state_dict(), "optimizer": state}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=not hasattr(self.opt, "after_backward"))
        model, _ = build(self.case.model)
        regrouping.fit(model, self.model)
        model.to(self.dtype).load_state_dict(loaded["model"])

        def freeze() -> None:
            for new, old in zip(model.parameters(), self.params, strict=True):
                new.requires_grad_(old.requires_grad)

        if not late:
            freeze()
        twin = {id(old): new for old, new in zip(self.params, model.parameters(), strict=True)}
        groups = [[twin[id(p)] for p in group] for group in self.groups]
        opt = self.make(self.case.optimizer.make(groups), self.case.loop)
        opt.load_state_dict(loaded["optimizer"])
        freeze()
        return model, opt

    def do_save(self, event: Event) -> None:
        file = io.BytesIO()
        torch.save(self.opt.state_dict(), file)
        scaler = None if self.scaler is None else self.scaler.state_dict()
        self.saved = copy.deepcopy(self.model.state_dict()), file.getvalue(), scaler
        self.saved_shapes = self.shapes

    def do_restore(self, event: Event) -> None:
        self.stash = None
        model, optimizer, scaler = self.saved
        self.model.load_state_dict(model)
        stock = hasattr(self.opt, "after_backward")
        self.opt.load_state_dict(torch.load(io.BytesIO(optimizer), weights_only=not stock))
        if self.scaler is not None:
            self.scaler.load_state_dict(scaler)


def scaler_of(opt: Any, loop: Loop) -> Any:
    """Return a new scaler: a real one for the wrapper, and a plain one for an oracle."""
    scaling = loop.scaling
    if scaling is None:
        return None
    if not isinstance(opt, fusedacc.AccumulatingOptimizer):
        return PlainScaler(scaling, opt)
    kind = torch.amp.GradScaler if scaling.kind == "torch" else fusedacc.amp.GradScaler
    return kind("cpu", init_scale=scaling.init_scale, growth_interval=scaling.growth_interval)


def halve(p: Tensor) -> None:
    if not p.grad.requires_grad:
        p.grad.mul_(0.5)
