"""The loops of suites/models.py, which run windows on gradients that are made without a forward pass.

Every parameter has a node whose backward makes its gradient by one write (`torch.full` in the dtype of the
weight-gradient product). The nodes form a chain, so the backward delivers gradients one after the other, the
last parameter first. On CUDA a node serves a group of consecutive parameters of up to 32 MiB, so that
Python's time does not count. Values depend on the parameter and the micro-batch, so that sums can be checked.

Settings: "autocast": float32 weights whose bfloat16 casts get the gradients, so that autograd casts these
back. "bfloat16": bfloat16 weights, gradients and Adam states, float32 sums, cast at the update.
"""

import contextlib
import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import loops

SETTINGS = ("float32", "autocast", "bfloat16")
#: The column `dtypes` of a setting.
DTYPES = {
    "float32": "float32 into float32",
    "autocast": "autocast bfloat16 into float32",
    "bfloat16": "bfloat16 into float32",
}
GROUP_BYTES = 32 * 2**20
#: Gradients are clipped to this norm.
MAX_NORM = 1.0


class Source(nn.Module):
    """Parameters. A call returns a scalar whose backward gives each of them a gradient.

    `scale` multiplies the gradients. `drop` makes them and gives none. `phase` is entered to make them.
    """

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype, group_bytes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in weights)
        self.dtype = dtype
        self.cast = weights[0].dtype != dtype
        self.scale = 1.0
        self.drop = False
        self.micro_batches = 0
        self.phase: Callable[[str], contextlib.AbstractContextManager] | None = None
        self.start = torch.zeros((), device=weights[0].device)
        self.groups: list[dict[int, nn.Parameter]] = []
        filled = math.inf
        for index, parameter in enumerate(self.weights):
            size = parameter.numel() * dtype.itemsize
            if filled + size > group_bytes:
                self.groups.append({})
                filled = 0
            self.groups[-1][index] = parameter
            filled += size

    def forward(self) -> Tensor:
        self.micro_batches += 1
        chain = self.start
        for group in self.groups:
            used = [parameter.to(self.dtype) for parameter in group.values()] if self.cast else group.values()
            chain = _Node.apply(chain, self, group, *used)
        return chain

    def gradients(self, group: dict[int, nn.Parameter]) -> list[Tensor]:
        with contextlib.nullcontext() if self.phase is None else self.phase("weight gradients"):
            return [
                torch.full(parameter.shape, self.value(index), dtype=self.dtype, device=parameter.device)
                for index, parameter in group.items()
            ]

    def value(self, index: int) -> float:
        """Return the value of every element of a parameter's gradient in this micro-batch."""
        # 1/128 times at most 19: exact in bfloat16, and never 0.
        return ((3 * index + 5 * self.micro_batches) % 17 - 7.5) / 64 * self.scale


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Tensor, source: Source, group: dict, *parameters: Tensor) -> Tensor:
        ctx.source = source
        ctx.group = group
        return chain.view_as(chain)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.source.gradients(ctx.group)
        return grad, None, None, *([None] * len(gradients) if ctx.source.drop else gradients)


class Memory(loops.Task):
    """Weights, Adam's two states and float32 sums that several loops use in turn.

    At the beginning of a window the sums hold those of another loop. `clip`: clip gradients to norm 1 before
    the update. `kind`: the optimizer's class, which takes `lr` and `fused`.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        setting: str,
        device: torch.device | str,
        steps: int = 8,
        clip: bool = True,
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        self.setting = setting
        self.device = torch.device(device)
        self.steps = steps
        self.max_grad_norm = MAX_NORM if clip else None
        self.kind = kind
        dtype = loops.BF16 if setting == "bfloat16" else loops.F32
        # Different values, so that weight decay differs.
        values = (0.01 * (index % 7 - 3) for index in range(len(shapes)))
        self.weights = [torch.full(shape, next(values), dtype=dtype, device=device) for shape in shapes]
        self._moments: list[tuple[Tensor, Tensor]] = []
        self._sums: list[Tensor] = []

    def model(self) -> Source:
        dtype = loops.F32 if self.setting == "float32" else loops.BF16
        return Source(self.weights, dtype, GROUP_BYTES if self.device.type == "cuda" else 0)

    def loss(self, model: nn.Module, *micro_batch: Any) -> Tensor:
        return model()

    def optimizer(self, parameters: list[nn.Parameter], fused: bool | None) -> torch.optim.Optimizer:
        optimizer = self.kind(parameters, lr=1e-3, fused=fused)
        if self.kind is torch.optim.AdamW:
            if not self._moments:
                self._moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in self.weights]
            loops.share_moments(optimizer, self._moments)
        return optimizer

    def sums(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        self._sums = self._sums or super().sums(self.weights)
        return self._sums


class Optimi(loops.Loop):
    """torch-optimi's gradient release: gradients go into Adam's states."""

    @classmethod
    def obstacle(cls) -> str:
        try:
            importlib.import_module("optimi")
        except ImportError as error:
            return f"torch-optimi is not installed ({error})"
        return ""

    def make_optimizer(self, fused: bool) -> torch.optim.Optimizer:
        optimi = importlib.import_module("optimi")
        optimizer = optimi.AdamW(self.parameters, lr=1e-3, gradient_release=True)
        optimi.prepare_for_gradient_release(self.model, optimizer)
        return optimizer

    def micro_batch(self, micro_batch: loops.MicroBatch, is_last: bool) -> Tensor:
        self.inner.optimizer_accumulation = not is_last
        return super().micro_batch(micro_batch, is_last)

    def step(self) -> None:
        """Do nothing: the last backward has updated."""

    def close(self) -> None:
        importlib.import_module("optimi").remove_gradient_release(self.model)
        super().close()


class Floor(loops.Loop):
    """Makes the gradients and drops them."""

    def prepare(self) -> None:
        self.model.drop = True

    def step(self) -> None:
        """Do nothing."""


class Linears(loops.InsideBackward):
    """`model=` on Linear layers whose inputs need no gradient.

    Of the micro-batches only the casts of the weights and the additions to the sums count. The reads of the
    products do not, because the other loops have no products.
    """

    tokens = 16

    def build(self, task: Memory) -> nn.Module:
        self.source = task.model()
        layers = nn.ModuleList()
        self.inputs = []
        for weight in self.source.weights:
            outputs, inputs = weight.shape
            layer = nn.Linear(inputs, outputs, bias=False, device="meta")
            layer.weight = weight
            layers.append(layer)
            self.inputs.append(torch.ones(self.tokens, inputs, dtype=self.source.dtype, device=weight.device))
        return layers

    def micro_batch(self, micro_batch: loops.MicroBatch, is_last: bool) -> Tensor:
        self.source.micro_batches += 1
        autocast = torch.autocast(self.task.device.type, loops.BF16, enabled=self.task.setting == "autocast")
        with self.phase("forward"), autocast:
            outputs = [layer(x) for layer, x in zip(self.model, self.inputs, strict=True)]
        # Each token has a share of the gradient of the other loops.
        value = [self.source.value(index) / self.tokens for index in range(len(outputs))]
        gradients = [torch.full_like(output, v) for output, v in zip(outputs, value, strict=True)]
        with self.phase("accumulate"):
            torch.autograd.backward(outputs, gradients)
        return self.source.start


class LinearsKeptCasts(Linears, loops.KeptCasts):
    """The same, with each weight cast once per window."""


@dataclasses.dataclass(frozen=True)
class WindowVariant:
    """A way to run a window. `keeps`: bytes per element that it holds from window to window, by setting.

    role: "as written", "best stock", "stock", "ours" (", manual loop", ", model="), "inexact" or "floor".
    """

    name: str
    kind: type[loops.Loop]
    role: str
    note: str
    settings: tuple[str, ...] = SETTINGS
    fused: bool = True
    keeps: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def make(self, memory: Memory) -> loops.Loop:
        loop = self.kind(memory, self.fused)
        if isinstance(loop.model, Source) and loop.divides:
            loop.model.scale = 1 / memory.steps
        return loop


_FLOAT32_WEIGHTS = ("float32", "autocast")
_BFLOAT16_WEIGHTS = ("bfloat16",)
VARIANTS = (
    WindowVariant(
        "stock as written",
        kind=loops.Loop,
        role="as written",
        note="loss / k, clip_grad_norm_, AdamW with torch's default",
        settings=_FLOAT32_WEIGHTS,
        fused=False,
    ),
    WindowVariant(
        "stock by hand",
        kind=loops.ByHand,
        role="as written",
        note="acc += p.grad.float() / k after each backward, AdamW with torch's default",
        settings=_BFLOAT16_WEIGHTS,
        fused=False,
    ),
    WindowVariant(
        "stock grad_dtype",
        kind=loops.GradDtype,
        role="stock",
        note="p.grad_dtype = torch.float32, loss / k, cast at the update, AdamW(fused=True)",
        settings=_BFLOAT16_WEIGHTS,
    ),
    WindowVariant(
        "stock fused AdamW",
        kind=loops.Loop,
        role="best stock",
        note="loss / k, clip_grad_norm_, AdamW(fused=True)",
        settings=_FLOAT32_WEIGHTS,
    ),
    WindowVariant(
        "stock mixed add_",
        kind=loops.MixedAdd,
        role="best stock",
        note="hook: acc.copy_(p.grad) in the first micro-batch, then acc.add_(p.grad); loss / k, "
        "AdamW(fused=True)",
        settings=_BFLOAT16_WEIGHTS,
    ),
    WindowVariant(
        "fusedacc",
        kind=loops.Wrapped,
        role="ours",
        note="counted loop around AdamW(fused=True), max_grad_norm",
        keeps={"bfloat16": 4},
    ),
    WindowVariant(
        "fusedacc manual loop",
        kind=loops.Manual,
        role="ours, manual loop",
        note="loss / k, AdamW(fused=True) wrapped without a count, max_grad_norm",
        keeps={"bfloat16": 4},
    ),
    WindowVariant(
        "stock bfloat16 sums",
        kind=loops.Loop,
        role="inexact",
        note="inexact: .grad += gradient in bfloat16; loss / k, AdamW(fused=True)",
        settings=_BFLOAT16_WEIGHTS,
    ),
    WindowVariant(
        "torch-optimi",
        kind=Optimi,
        role="inexact",
        note="inexact: gradients go into Adam's states, each rounded there; it cannot clip",
        keeps={"float32": 8, "autocast": 8, "bfloat16": 6},
    ),
    WindowVariant(
        "floor", kind=Floor, role="floor", note="the gradients are made and dropped: no sums, no update"
    ),
)
_INSIDE = "counted loop around AdamW(fused=True), max_grad_norm, model=: weights of Linear layers"
#: Only the bytes of these are counted.
COUNTED_ONLY = (
    WindowVariant("fusedacc model=", kind=Linears, role="ours, model=", note=_INSIDE),
    WindowVariant(
        "fusedacc keep_casts=",
        kind=LinearsKeptCasts,
        role="ours, model=, keep_casts=",
        note="as fusedacc model=, with keep_casts=True",
        settings=("autocast",),
    ),
)


def need(setting: str, of: Sequence[WindowVariant]) -> int:
    """Return the bytes per element that these variants need in turns on one `Memory`."""
    # Weights and two states; then sums, or gradients of the update, and foreach's temporary.
    base = {"float32": 12 + 8, "autocast": 12 + 8, "bfloat16": 6 + 4 + 4}[setting]
    shared = 4 if any(issubclass(variant.kind, loops.WithSums) for variant in of) else 0
    return base + shared + sum(each.keeps.get(setting, 0) for each in of if not each.kind.obstacle())


#: The parts of a window in order (see `part_of`). "forward": casts of the weights; "weight gradients":
#: writing them; "cast": of each into float32; "accumulate": adding or storing, and dividing if that is a
#: separate pass; "first touch": zeroing sums; "update: cast": of sums to the weights' dtype.
PARTS = (
    *("forward", "weight gradients", "cast", "accumulate", "first touch"),
    *("update: cast", "update: clip", "update: optimizer"),
)
#: Operators that read sums for their norm in step().
NORMS = ("fusedacc::norm_partials", "fusedacc::finish_norm", "triton::norm_partials")


def part_of(phase: str, op: str) -> str:
    """Return which of PARTS an operator in a phase of a loop belongs to."""
    if phase in ("backward", "accumulate"):
        return "cast" if op == "aten::_to_copy" else "accumulate"
    if phase == "update: optimizer" and op in NORMS:
        return "update: clip"
    if phase == "update: optimizer" and op.startswith(("fusedacc::", "triton::")):
        return "update: cast"  # step() makes the inner optimizer's gradients
    return phase


def moved(loop: loops.Loop, phase: str, op: str, found: dict[str, Any]) -> int:
    """Return the bytes that count of an operator in a phase, from a meter's `by_phase_and_op`."""
    if not isinstance(loop, Linears):
        return found["total_bytes"]
    if phase == "accumulate":
        return found["by_kind"].get("gradients", 0)
    casts = phase == "forward" and op == "aten::_to_copy"
    return found["total_bytes"] if casts or phase.startswith("update") else 0
