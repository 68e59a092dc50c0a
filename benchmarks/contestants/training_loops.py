"""The ways to train that suites/training.py compares. Each is the demo's loop, cut at its phases."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fusedacc
from examples.demo.loops import Batches, Config

from ..harness.peak_by_kind import Look, peak_by_kind
from .stock import adder, sum_in

PHASES = ("forward", "backward", "accumulate", "update")
#: Called with a phase's name, gives the context that the phase runs in.
Phase = Callable[[str], contextlib.AbstractContextManager]
F32, BF16 = torch.float32, torch.bfloat16


def unobserved(name: str) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


class Loop:
    """Plain torch: autograd sums in p.grad, in the parameters' dtype.

    Args:
        fused: one kernel for the whole update; else AdamW as torch gives it.
    """

    def __init__(self, config: Config, fused: bool) -> None:
        self.config, self.model = config, self.build(config)
        self.parameters = list(self.model.parameters())
        self.inner = torch.optim.AdamW(self.parameters, lr=1e-3, fused=fused or None)

    def build(self, config: Config) -> nn.Module:
        """The model, as this loop has it."""
        return config.model()

    def update(self, batches: Batches, phase: Phase = unobserved) -> Tensor:
        """One update; returns the micro-batches' mean loss, float32 []."""
        losses = []
        for inputs, targets in batches:
            with phase("forward"):
                loss = self.config.loss(self.model, inputs, targets)
            with phase("backward"):
                self.backward(loss)
            with phase("accumulate"):
                self.accumulate()
            losses.append(loss.detach())
        with phase("update"):
            self.step()
        return torch.stack(losses).mean()

    def backward(self, loss: Tensor) -> None:
        (loss / self.config.steps).backward()

    def accumulate(self) -> None:
        """What the loop itself does after each backward."""

    def step(self) -> None:
        self.inner.step()
        self.inner.zero_grad()

    def sums(self) -> Sequence[Tensor]:
        """Tensors beside p.grad that gradients are summed in."""
        return ()

    def held(self) -> dict[str, list[Tensor]]:
        """By kind, the tensors that outlive a phase."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        state = [t for of_one in self.inner.state.values() for t in of_one.values() if torch.is_tensor(t)]
        return {"weights": self.parameters, "gradients": [*gradients, *self.sums()], "optimizer": state}


class ByHand(Loop):
    """bfloat16 parameters, float32 sums, as people write it."""

    def __init__(self, config: Config, fused: bool) -> None:
        super().__init__(config, fused)
        self.accumulators = [torch.zeros_like(p, dtype=F32) for p in self.parameters]

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def accumulate(self) -> None:
        for parameter, total in zip(self.parameters, self.accumulators, strict=True):
            total += parameter.grad.float() / self.config.steps
            parameter.grad = None

    def step(self) -> None:
        for parameter, total in zip(self.parameters, self.accumulators, strict=True):
            parameter.grad = total.to(BF16)
            total.zero_()
        super().step()

    def sums(self) -> Sequence[Tensor]:
        return self.accumulators


class MixedAdd(ByHand):
    """The same sums, each gradient added by one mixed `add_` as soon as autograd has stored it."""

    def __init__(self, config: Config, fused: bool) -> None:
        super().__init__(config, fused)
        for parameter, total in zip(self.parameters, self.accumulators, strict=True):
            parameter.register_post_accumulate_grad_hook(adder(total))

    def backward(self, loss: Tensor) -> None:
        (loss / self.config.steps).backward()

    def accumulate(self) -> None:
        """The hooks have."""


class GradDtype(Loop):
    """bfloat16 parameters, and float32 sums that autograd keeps in p.grad; cast at the update."""

    def __init__(self, config: Config, fused: bool) -> None:
        super().__init__(config, fused)
        sum_in(self.parameters, F32)

    def step(self) -> None:
        sum_in(self.parameters, BF16)
        super().step()
        sum_in(self.parameters, F32)


class Wrapped(Loop):
    """fusedacc, counted: the loss is not divided."""

    def __init__(self, config: Config, fused: bool) -> None:
        super().__init__(config, fused)
        self.optimizer = fusedacc.AccumulatingOptimizer(
            self.inner, gradient_accumulation_steps=config.steps, backend=config.backend, **self.options()
        )

    def options(self) -> dict[str, Any]:
        """The wrapper's, beside these."""
        return {}

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def accumulate(self) -> None:
        if not self.optimizer.will_update:
            self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sums(self) -> Sequence[Tensor]:
        slots = self.optimizer._slots
        return [t for slot in slots for t in (slot.accumulator, slot.buffer) if t is not None]


class InsideBackward(Wrapped):
    """Linear and Embedding layers add to the sums inside their backward, and write no weight gradient."""

    def options(self) -> dict[str, Any]:
        return {"model": self.model}


class KeptCasts(InsideBackward):
    """The same, where autocast's casts of the weights are made once a window."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "keep_casts": True}


class NothingAccumulated(Loop):
    """The same forward and backward through `torch.autograd.grad`, no update: what no way saves."""

    def backward(self, loss: Tensor) -> None:
        torch.autograd.grad(loss / self.config.steps, self.parameters)

    def step(self) -> None:
        """None."""


@dataclasses.dataclass(frozen=True)
class Way:
    """`competes`: among the best that stock has, which fusedacc is held against. `exact`: its sums are those
    of the others bit for bit, and not up to the rounding of products."""

    name: str
    kind: type[Loop]
    fused: bool = True
    competes: bool = False
    exact: bool = True

    def make(self, config: Config) -> Loop:
        return self.kind(config, self.fused)

    def peak(self, config: Config, data: Sequence[Batches]) -> dict[str, int]:
        """Bytes by kind at the peak, from the making of the loop through an update for each of `data`."""
        return peak_by_kind(functools.partial(self.watch, config, data), config.device)

    def watch(self, config: Config, data: Sequence[Batches], look: Look) -> None:
        """Trains, and looks where the tensors lie after every phase and inner update."""
        loop = self.make(config)
        hook = loop.inner.register_step_post_hook(lambda *_: look(loop.held()))

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            yield
            look(loop.held())

        look(loop.held())
        for of_one_update in data:
            loop.update(of_one_update, phase)
        hook.remove()  # it refers to the loop, whose memory must go with the last name of it


BASELINE = Way("no accumulation, no update", NothingAccumulated)
UNFUSED = Way("fusedacc", Wrapped, fused=False)
INSIDE = Way("fusedacc, model=, fused AdamW", InsideBackward, exact=False)
KEPT = Way("fusedacc, model= keep_casts, fused AdamW", KeptCasts, exact=False)
OURS = (Way("fusedacc, fused AdamW", Wrapped), INSIDE, UNFUSED)
OF_FLOAT32 = (Way("stock", Loop, fused=False), Way("stock, fused AdamW", Loop, competes=True), *OURS)
#: By dtype. The first is stock as people write it.
WAYS = {
    "float32": OF_FLOAT32,
    "bfloat16": (
        Way("stock, by hand", ByHand, fused=False),
        Way("stock, grad_dtype, fused AdamW", GradDtype, competes=True),
        Way("stock, mixed add_ in a hook, fused AdamW", MixedAdd, competes=True),
        *OURS,
    ),
    "autocast": (*OF_FLOAT32, KEPT),
}
