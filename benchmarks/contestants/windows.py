"""The ways to run a window. A new competitor is a subclass of `Window` in `WAYS`.

`Linears` alone has layers and makes its gradients by products, which `model=` adds into the accumulators.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import fusedacc

from .stock import sum_in
from .synthetic_gradients import BF16, F32
from .window import MAX_NORM, Window


class AsWritten(Window):
    name, settings, role = "stock as written", ("float32", "autocast"), "as written"
    note = "loss / k, clip_grad_norm_, AdamW with torch's default"
    fused = None


class Fused(Window):
    name, settings, role = "stock fused AdamW", ("float32", "autocast"), "best stock"
    note = "loss / k, clip_grad_norm_, AdamW(fused=True)"


class WithSums(Window):
    """float32 sums beside bfloat16 weights: at the update they become `p.grad`, in bfloat16."""

    settings = ("bfloat16",)

    def update(self) -> None:
        with self.phase("update: cast"):
            for parameter, total in zip(self.parameters, self.memory.sums(), strict=True):
                parameter.grad = total.to(parameter.dtype)
        super().update()


class ByHand(WithSums):
    name, role = "stock by hand", "as written"
    note = "acc += p.grad.float() / k after each backward, AdamW with torch's default"
    fused = None
    divides = False

    def run(self) -> None:
        with self.phase("first touch"):
            for total in self.memory.sums():
                total.zero_()
        for _ in range(self.steps):
            self.backward()
            with self.phase("accumulate"):
                for parameter, total in zip(self.parameters, self.memory.sums(), strict=True):
                    total += parameter.grad.float() / self.steps
                    parameter.grad = None
        self.update()


class GradDtype(Window):
    name, settings = "stock grad_dtype", ("bfloat16",)
    note = "p.grad_dtype = torch.float32, loss / k, cast at the update, AdamW(fused=True)"

    def run(self) -> None:
        sum_in(self.parameters, F32)
        super().run()

    def update(self) -> None:
        with self.phase("update: cast"):
            sum_in(self.parameters, BF16)
        super().update()


class MixedAdd(WithSums):
    name, role = "stock mixed add_", "best stock"
    note = (
        "hook: acc.copy_(p.grad) in the first micro-batch, then acc.add_(p.grad); loss / k, AdamW(fused=True)"
    )

    def prepare(self) -> None:
        self.first = True
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self.adder(total))
            for parameter, total in zip(self.parameters, self.memory.sums(), strict=True)
        ]

    def adder(self, total: Tensor) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            if self.first:
                total.copy_(parameter.grad)
            else:
                total.add_(parameter.grad)
            parameter.grad = None

        return add

    def run(self) -> None:
        for step in range(self.steps):
            self.first = step == 0
            self.backward()
        self.update()

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        super().close()


class NarrowSums(Window):
    name, settings, role = "stock bfloat16 sums", ("bfloat16",), "inexact"
    note = "inexact: .grad += gradient in bfloat16; loss / k, AdamW(fused=True)"


class Optimi(Window):
    name, role = "torch-optimi", "inexact"
    note = "inexact: gradients go into Adam's states, each rounded there; it cannot clip"
    keeps: ClassVar[dict[str, int]] = {"float32": 8, "autocast": 8, "bfloat16": 6}

    @classmethod
    def obstacle(cls) -> str:
        try:
            importlib.import_module("optimi")
        except ImportError as error:
            return f"torch-optimi is not installed ({error})"
        return ""

    def make_optimizer(self, kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        optimi = importlib.import_module("optimi")
        optimizer = optimi.AdamW(self.parameters, lr=1e-3, gradient_release=True)
        self.module = nn.ParameterList(self.parameters)
        optimi.prepare_for_gradient_release(self.module, optimizer)
        return optimizer

    def run(self) -> None:
        for step in range(self.steps):
            self.optimizer.optimizer_accumulation = step < self.steps - 1
            self.backward()

    def close(self) -> None:
        importlib.import_module("optimi").remove_gradient_release(self.module)
        super().close()


class Floor(Window):
    name, role = "floor", "floor"
    note = "the gradients are made and dropped: no sums, no update"

    def prepare(self) -> None:
        self.source.drop = True

    def update(self) -> None:
        pass


class Fusedacc(Window):
    name, role = "fusedacc", "ours"
    note = "counted loop around AdamW(fused=True), max_grad_norm"
    keeps: ClassVar[dict[str, int]] = {"bfloat16": 4}
    divides = False

    def prepare(self) -> None:
        self.wrapper = self.wrap(self.steps)

    def wrap(self, steps: int | None) -> fusedacc.AccumulatingOptimizer:
        return fusedacc.AccumulatingOptimizer(
            self.optimizer, steps, max_grad_norm=MAX_NORM if self.clip else None, backend=self.backend
        )

    def run(self) -> None:
        for _ in range(self.steps):
            self.backward()
            with self.phase("update: optimizer"):
                self.wrapper.step()
                self.wrapper.zero_grad()

    def close(self) -> None:
        self.wrapper.close()
        super().close()


class Manual(Fusedacc):
    name, role = "fusedacc manual loop", "ours, manual loop"
    note = "loss / k, AdamW(fused=True) wrapped without a count, max_grad_norm"
    divides = True

    def prepare(self) -> None:
        self.wrapper = self.wrap(None)

    def run(self) -> None:
        for _ in range(self.steps):
            self.backward()
        with self.phase("update: optimizer"):
            self.wrapper.step()
            self.wrapper.zero_grad()


class Linears(Fusedacc):
    """On the weights of Linear layers, each with an input of its own, which needs no gradient.

    What the products read is not counted, as the other ways have no products: of the micro-batches only casts
    of the weights and what is added to the sums.
    """

    name, role = "fusedacc model=", "ours, model="
    note = "counted loop around AdamW(fused=True), max_grad_norm, model=: weights of Linear layers"
    tokens = 16
    keeps_casts = False

    def prepare(self) -> None:
        self.layers = nn.ModuleList()
        self.inputs = []
        for weight in self.parameters:
            outputs, inputs = weight.shape
            layer = nn.Linear(inputs, outputs, bias=False, device="meta")
            layer.weight = weight
            self.layers.append(layer)
            self.inputs.append(torch.ones(self.tokens, inputs, dtype=self.source.dtype, device=weight.device))
        super().prepare()

    def wrap(self, steps: int | None) -> fusedacc.AccumulatingOptimizer:
        return fusedacc.AccumulatingOptimizer(
            self.optimizer,
            steps,
            max_grad_norm=MAX_NORM if self.clip else None,
            model=self.layers,
            keep_casts=self.keeps_casts,
            backend=self.backend,
        )

    def backward(self) -> None:
        self.source.micro_batches += 1
        device, autocast = self.parameters[0].device.type, self.memory.setting == "autocast"
        with self.phase("forward"), torch.autocast(device, BF16, enabled=autocast):
            outputs = [layer(x) for layer, x in zip(self.layers, self.inputs, strict=True)]
        # Each token has its share of the gradient that is provided in the other ways.
        value = [self.source.value(index) / self.tokens for index in range(len(outputs))]
        gradients = [torch.full_like(output, v) for output, v in zip(outputs, value, strict=True)]
        with self.phase("accumulate"):
            torch.autograd.backward(outputs, gradients)

    @staticmethod
    def moved(phase: str, op: str, found: dict[str, Any]) -> int:
        if phase == "accumulate":
            return found["by_kind"].get("gradients", 0)
        casts = phase == "forward" and op == "aten::_to_copy"
        return found["total_bytes"] if casts or phase.startswith("update") else 0


class KeptCasts(Linears):
    """The same, where each weight is cast once a window."""

    name, settings, role = "fusedacc keep_casts=", ("autocast",), "ours, model=, keep_casts="
    note = "as fusedacc model=, with keep_casts=True"
    keeps_casts = True


WAYS: tuple[type[Window], ...] = (
    AsWritten,
    ByHand,
    GradDtype,
    Fused,
    MixedAdd,
    Fusedacc,
    Manual,
    NarrowSums,
    Optimi,
    Floor,
)


#: Of these only bytes are counted.
COUNTED_ONLY: tuple[type[Window], ...] = (Linears, KeptCasts)


def ways(setting: str) -> list[type[Window]]:
    """The ways of a setting, in order of the tables."""
    return [way for way in WAYS if setting in way.settings]


def need(setting: str, of: list[type[Window]]) -> int:
    """Bytes per element that these ways take in turns on one `Memory`, with a pass's temporaries."""
    # Weights, two states; then sums, or gradients of the update, and foreach's temporary.
    base = {"float32": 12 + 8, "autocast": 12 + 8, "bfloat16": 6 + 4 + 4}[setting]
    shared = 4 if any(issubclass(way, WithSums) for way in of) else 0
    return base + shared + sum(way.keeps.get(setting, 0) for way in of if not way.obstacle())
