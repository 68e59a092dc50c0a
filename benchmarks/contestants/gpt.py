"""A GPT in bfloat16 with float32 sums, and the ways to train it that `suites/end_to_end.py` compares."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.demo.model import Block
from fusedacc.nn.functional import linear_cross_entropy

from .loops import BF16, GradDtype, InsideBackward, Loop, LoopVariant, MicroBatch, MixedAdd, Task, Wrapped
from .tokens import text_like


@dataclasses.dataclass(frozen=True)
class Size:
    """A GPT of `layers` blocks, and the length of its sequences. Heads have a width of 128."""

    layers: int
    width: int
    words: int
    context: int

    def __str__(self) -> str:
        return f"GPT of {self.layers} layers of width {self.width}, {self.words} words"


class HeadLoss(nn.Module):
    """Computes the mean cross-entropy of a linear head. fuses: without logits, by `linear_cross_entropy`."""

    fuses = False

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, words, bias=False)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        if self.fuses:
            return linear_cross_entropy(hidden, self.linear.weight, targets)
        return F.cross_entropy(self.linear(hidden).float().flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """Computes the loss of int64 tokens and targets [sequences, length]. The head's weight is its own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words, self.positions = (nn.Embedding(rows, size.width) for rows in (size.words, size.context))
        heads = max(1, size.width // 128)
        self.blocks = nn.Sequential(*(Block(size.width, heads) for _ in range(size.layers)))
        self.head = HeadLoss(size.width, size.words)
        for table in (self.words, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.blocks(hidden), targets)

    def compile_parts(self, backend: str) -> None:
        """Compile each block, and the head with its loss.

        All blocks share one graph, so this takes a fraction of the time that the whole model takes.
        """
        for part in (*self.blocks, self.head):
            part.compile(backend=backend, fullgraph=True, dynamic=False)


class Training(Task):
    """Windows of the GPT on a device.

    Args:
        template: the GPT that every way copies.
        context: the length of a sequence.
        tokens: the tokens of a micro-batch, a multiple of `context`.
        steps: micro-batches per window.
        backend: the backend of torch.compile; empty: eager.
    """

    def __init__(self, template: GPT, context: int, tokens: int, steps: int, backend: str = "") -> None:
        self.template = template
        self.context = context
        self.tokens = tokens
        self.steps = steps
        self.compiler = backend
        self.device = template.words.weight.device

    def model(self) -> nn.Module:
        model = copy.deepcopy(self.template)
        if self.compiler:
            model.compile_parts(self.compiler)
        return model

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return model(tokens, targets)

    def optimizer(self, parameters: list[nn.Parameter], fused: bool | None) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-5, fused=fused)

    def window(self) -> Sequence[MicroBatch]:
        """Return the micro-batches of a window: the same in every call, with words distributed as in text."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            shape = self.steps, self.tokens // self.context, self.context + 1
            words = self.template.words.num_embeddings
            drawn = text_like(shape[0] * shape[1] * shape[2], words, torch.device("cpu")).view(shape)
        return [(each[:, :-1], each[:, 1:]) for each in drawn.to(self.device)]


def template(size: Size, device: torch.device) -> GPT:
    """Return a new GPT in bfloat16."""
    torch.manual_seed(0)
    with device:
        return GPT(size).to(BF16)


class FusedHead(InsideBackward):
    """`model=`, and a head that computes the loss without logits."""

    def build(self, task: Task) -> nn.Module:
        model: Any = super().build(task)
        model.head.fuses = True
        return model


#: In the order of their importance. The first has exact sums, with which those of the others are compared.
REFERENCE = LoopVariant("PyTorch, grad_dtype=float32", GradDtype, competes=True)
HOOK = LoopVariant("PyTorch, add_ in a hook", MixedAdd, competes=True)
WRAPPED = LoopVariant("fusedacc", Wrapped)
INSIDE = LoopVariant("fusedacc, model=", InsideBackward)
FUSED = LoopVariant("fusedacc, model=, fused head", FusedHead)
INEXACT = LoopVariant("PyTorch, bfloat16 sums (inexact)", Loop, exact=False)
WAYS = (REFERENCE, HOOK, WRAPPED, INSIDE, FUSED, INEXACT)
