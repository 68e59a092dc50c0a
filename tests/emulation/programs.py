"""Random training programs over several streams, with and without the wrapper.

A program trains a small model. Each forward, branch of a forward, backward and update is on a random stream,
and the program makes streams wait for each other as PyTorch requires. In some programs two callers run their
backwards on different streams at the same time. PyTorch orders these by the `AccumulateGrad` node of each
parameter. The seed determines everything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedacc
from fusedacc.accumulators import engine

STEPS = 3
MICRO_BATCHES = 7
CLIP = 0.5


class Net(nn.Module):
    """An embedding, a block and a head.

    The block may run as a branch on another stream, and may be checkpointed. The head's weight may be tied.
    """

    def __init__(self, tied: bool, checkpoints: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpoints = checkpoints

    def block(self, x):
        return self.norm(x + self.down(torch.tanh(self.up(x))))

    def forward(self, tokens, side=None):
        x = self.embedding(tokens)
        if side is not None:
            here = torch.cuda.current_stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                branch = self.block(x)
                x.record_stream(side)
            # Use the same weights on both streams, so that their gradients are added on two streams. Autocast
            # does not allow this: its cache gives a cast weight to any stream, without waiting for the cast.
            here_too = None if torch.is_autocast_enabled("cuda") else self.block(x)
            here.wait_stream(side)
            branch.record_stream(here)
            x = branch if here_too is None else here_too + branch
        if self.checkpoints is None:
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.checkpoints == "reentrant")
        return self.head(x)


@dataclass
class Program:
    """The choices that a program's seed determines."""

    seed: int
    tied: bool = False
    checkpoints: str | None = None
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    manual: bool = False
    weighted: bool = False
    with_model: bool = False
    fused: bool = False
    changes_streams: bool = True
    two_callers: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    large_bytes: int = 1
    bucket_bytes: int = 600

    @classmethod
    def random(cls, seed: int) -> Program:
        rng = random.Random(seed)
        program = cls(seed, tied=rng.random() < 0.4)
        program.checkpoints = rng.choice([None, None, "reentrant", "plain"])
        program.dtype = rng.choice([torch.float32, torch.bfloat16])
        program.autocast = program.dtype is torch.float32 and rng.random() < 0.4
        program.manual = rng.random() < 0.3
        program.weighted = not program.manual and rng.random() < 0.25
        program.with_model = rng.random() < 0.6
        program.fused = rng.random() < 0.5
        program.changes_streams = rng.random() < 0.7
        # With `model=` the sums of several parameters share a block of memory. Different streams may write to
        # its parts at the same time, but the device would report that, because it tracks order by block.
        program.two_callers = rng.random() < 0.4 and not program.with_model
        program.weighted = program.weighted and not program.with_model
        options = program.options
        if rng.random() < 0.5:
            options["max_grad_norm"] = CLIP
        if program.dtype is torch.bfloat16 and rng.random() < 0.5:
            options["master_weights"] = True
        if rng.random() < 0.3:
            options["skip_nonfinite"] = True
        if program.weighted:
            options["reduction"] = "weighted"
        if program.autocast and program.with_model and rng.random() < 0.5:
            options["keep_casts"] = True
        program.bucket_bytes = rng.choice([600, 25 * 2**20])
        return program

    @property
    def equals_stock(self) -> bool:
        """Whether plain PyTorch trains the same weights: `run` has no weighted mean or masters for it."""
        return self.dtype is torch.float32 and not self.autocast and not self.weighted

    def run(self, wraps: bool) -> list[torch.Tensor]:
        """Train with the wrapper or with plain PyTorch, on the same streams. Return the weights."""
        before = engine.LAUNCH_BYTES
        engine.LAUNCH_BYTES = self.bucket_bytes
        try:
            return self._train(wraps)
        finally:
            engine.LAUNCH_BYTES = before

    def _train(self, wraps: bool) -> list[torch.Tensor]:
        rng = random.Random(self.seed + 1)
        net = Net(self.tied, self.checkpoints).cuda().to(self.dtype)
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=self.fused)
        streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3))]
        torch.cuda.synchronize()
        made_on = rng.choice(streams[:2])
        if wraps:
            options = dict(self.options) | ({"model": net} if self.with_model else {})
            with torch.cuda.stream(made_on):
                optimizer = fusedacc.AccumulatingOptimizer(
                    optimizer, None if self.manual else STEPS, **options
                )
        self._last = streams[0]
        for number in range(MICRO_BATCHES):
            forward, backward, update, side = (
                rng.choice(streams) if self.changes_streams else streams[0] for _ in range(4)
            )
            branches = self.changes_streams and rng.random() < 0.5 and side is not forward
            losses = [self._forward(net, 2 * number, forward, side if branches else None)]
            if self.two_callers:
                losses.append(self._forward(net, 2 * number + 1, forward, None))
            self._backward(wraps, optimizer, losses, backward, rng)
            with self._next(update):
                if wraps and not self.manual:
                    optimizer.step()
                    optimizer.zero_grad()
                elif number % STEPS == STEPS - 1:
                    if not wraps and "max_grad_norm" in self.options:
                        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
            del losses
        torch.cuda.synchronize()
        return [parameter.detach().cpu() for parameter in net.parameters()]

    def _next(self, stream: torch.cuda.Stream) -> Any:
        """Make `stream` wait for the previous stream, and return a context in which `stream` is current."""
        stream.wait_stream(self._last)
        self._last = stream
        return torch.cuda.stream(stream)

    def _forward(self, net, seed: int, stream, side) -> torch.Tensor:
        tokens = torch.randint(0, 50, (4, 5), generator=torch.Generator().manual_seed(seed))
        with self._next(stream), torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            loss = net(tokens.cuda(), side).float().square().mean()
            # Divide by the number of callers. `_backward` or the wrapper divides by the micro-batches.
            return loss / (2 if self.two_callers else 1)

    def _backward(self, wraps: bool, optimizer: Any, losses: list[torch.Tensor], stream, rng) -> None:
        divides = not wraps and not self.manual
        with self._next(stream):
            if wraps and self.weighted:
                weight = torch.full((), 2.0, device="cuda") if rng.random() < 0.5 else 2.0
                with optimizer.accumulate(weight=weight):
                    self._backwards(losses)
            else:
                self._backwards([loss / STEPS for loss in losses] if divides else losses)

    def _backwards(self, losses: list[torch.Tensor]) -> None:
        """Run one backward, or two on streams that do not wait for each other."""
        if len(losses) == 1:
            losses[0].backward()
            return
        here = torch.cuda.current_stream()
        callers = [torch.cuda.Stream() for _ in losses]
        for caller in callers:
            caller.wait_stream(here)
        for caller, loss in zip(callers, losses, strict=True):
            with torch.cuda.stream(caller):
                loss.backward()
        for caller in callers:
            here.wait_stream(caller)
