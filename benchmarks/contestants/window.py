"""A window: `steps` micro-batches whose gradients are summed, and the update; and what its parts are called.

Gradients are provided (synthetic_gradients.py has how, and the settings), so no activations are needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from .stock import share_moments
from .synthetic_gradients import BF16, F32, GROUP_BYTES, SETTINGS, Memory, Source

#: Gradients are clipped to this norm.
MAX_NORM = 1.0


class Window:
    """One way to run a window on the weights in `memory`. A subclass is a way; `run()` runs a window.

    Args:
        memory: weights, and what the ways share; each way has Parameters of its own on the same weights.
        steps: micro-batches per window.
        clip: whether gradients are clipped to norm 1 before the update.
        backend: fusedacc's.
        optimizer: a class with `lr` and `fused`.
    """

    name = ""
    settings: tuple[str, ...] = SETTINGS
    #: "as written", "best stock", "stock", "ours", "ours, manual loop", "ours, model=", "inexact" or "floor".
    role = "stock"
    note = ""
    #: Bytes per element that the way itself holds from window to window, by setting.
    keeps: ClassVar[dict[str, int]] = {}
    fused: bool | None = True
    divides = True

    def __init__(
        self,
        memory: Memory,
        steps: int,
        clip: bool = True,
        backend: str = "auto",
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1; got {steps}")
        self.memory, self.steps, self.clip, self.backend = memory, steps, clip, backend
        self.parameters = [nn.Parameter(weight) for weight in memory.weights]
        device = self.parameters[0].device
        gradient_dtype = F32 if memory.setting == "float32" else BF16
        self.source = Source(self.parameters, gradient_dtype, GROUP_BYTES if device.type == "cuda" else 0)
        self.source.scale = 1 / steps if self.divides else 1.0
        self.phase: Callable[[str], contextlib.AbstractContextManager] = _no_phase
        self.optimizer = self.make_optimizer(optimizer)
        self.prepare()

    def make_optimizer(self, kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        optimizer = kind(self.parameters, lr=1e-3, fused=self.fused)
        if kind is torch.optim.AdamW:
            share_moments(optimizer, self.memory.moments())
        return optimizer

    def prepare(self) -> None:
        """Hooks, wrappers."""

    @classmethod
    def obstacle(cls) -> str:
        """Why this way cannot run here; empty if it can."""
        return ""

    def run(self) -> None:
        for _ in range(self.steps):
            self.backward()
        self.update()

    def backward(self) -> None:
        with self.phase("forward"):
            loss = self.source.loss()
            if self.divides:
                loss = loss / self.steps
        with self.phase("accumulate"):
            loss.backward()

    def update(self) -> None:
        self.clip_gradients()
        with self.phase("update: optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def clip_gradients(self) -> None:
        if self.clip:
            with self.phase("update: clip"):
                nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)

    @contextlib.contextmanager
    def counting(self, phase: Callable[[str], contextlib.AbstractContextManager]) -> Iterator[None]:
        """Context in which `phase(name)` is entered around what `part_of` tells apart."""
        self.phase = self.source.phase = phase
        try:
            yield
        finally:
            self.phase, self.source.phase = _no_phase, None

    @staticmethod
    def moved(phase: str, op: str, found: dict[str, Any]) -> int:
        """Bytes that count, of what a meter's `by_phase_and_op` has found of an operator in a phase."""
        return found["total_bytes"]

    def close(self) -> None:
        """Lets go of hooks and gradients."""
        for parameter in self.parameters:
            parameter.grad = None


def _no_phase(name: str) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


#: The parts of a window in order, as `part_of` makes them of a meter's phases and operators. "forward": casts
#: of the weights; "weight gradients": the provided gradients are written; "cast": each of them into float32;
#: "accumulate": added or stored, and divided where that is a pass of its own; "first touch": sums set to
#: zero; "update: cast": sums into gradients of the weights' dtype; "update: clip"; "update: optimizer".
PARTS = (
    "forward",
    "weight gradients",
    "cast",
    "accumulate",
    "first touch",
    "update: cast",
    "update: clip",
    "update: optimizer",
)


#: What reads sums for their norm inside step().
NORMS = ("fusedacc::norm_partials", "fusedacc::finish_norm", "triton::norm_partials")


def part_of(phase: str, op: str) -> str:
    """The part that an operator belongs to in a phase of `Window.counting`."""
    if phase == "accumulate" and op == "aten::_to_copy":
        return "cast"
    if phase == "update: optimizer" and op in NORMS:
        return "update: clip"
    if phase == "update: optimizer" and op.startswith(("fusedacc::", "triton::")):
        return "update: cast"  # step() makes the inner optimizer's gradients
    return phase
