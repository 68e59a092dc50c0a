"""Random training on two ranks equals stock training in one process on the data of both.

The number of cases: FUSEDACC_RANK_CASES (200; 2,000 with FUSEDACC_FULL_TESTS=1). One alone: FUSEDACC_SEED=17.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
from dataclasses import dataclass

import pytest
import sweeps
import torch
import torch.distributed as dist
from ranks import on_ranks
from ranks_setting import LOW, Net, assert_close, assert_ranks_equal, small_buckets
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedacc

RANKS = 2
COUNT = int(os.environ.get("FUSEDACC_RANK_CASES") or (2000 if sweeps.FULL else 200))
ONE = os.environ.get("FUSEDACC_SEED")
#: Cases that the ranks run in one go.
CHUNK = 20
INNER = (
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.Adagrad, {"lr": 0.05}),
)


@dataclass(frozen=True)
class Loop:
    """How a case trains."""

    seed: int
    steps: int
    counted: bool
    reduction: str
    kind: str
    dtype: torch.dtype
    inner: int
    clip: float | None
    skips: bool
    in_module: bool
    private: bool
    several: int
    how: str
    ends_in: str

    @property
    def weighs(self) -> bool:
        return self.reduction in ("weighted", "normalized")


@dataclass(frozen=True)
class MicroBatch:
    """One rank's."""

    number: int
    weight: float
    uses_extra: bool
    overflows: bool


def random_loop(seed: int) -> Loop:
    rng = random.Random(seed)
    counted, steps = rng.random() < 0.8, rng.choice([1, 2, 3, 4])
    dtype = rng.choice([torch.float32, torch.float32, LOW])
    return Loop(
        seed=seed,
        steps=steps,
        counted=counted,
        reduction=rng.choice(["mean", "mean", "sum", "weighted", "normalized"]) if counted else "sum",
        kind=rng.choice(["ddp", "ddp", "group"]),
        dtype=dtype,
        # Adam divides a gradient by its own size: the rounding of a tiny one in 16 bits would be all of it.
        inner=0 if dtype is LOW else rng.randrange(len(INNER)),
        clip=rng.choice([None, None, 0.1, 10.0]),
        skips=rng.random() < 0.3,
        in_module=rng.random() < 0.4,
        private=counted and rng.random() < 0.2,
        # How many backwards there are is learnt from a micro-batch that is not the window's last.
        several=rng.choice([1, 1, 2]) if steps > 1 else 1,
        how=rng.choice(["", "", "as usual", "reentrant"]),
        ends_in=rng.choice(["flush", "flush", "step"]),
    )


def random_epochs(loop: Loop) -> list[list[list[MicroBatch]]]:
    """For each epoch and rank its micro-batches; epochs that end in flush() differ in length."""
    rng = random.Random(loop.seed + 1)
    epochs, number = [], 0
    for _ in range(3):
        ragged = loop.counted and loop.ends_in == "flush"
        common = loop.steps * rng.choice([1, 2])
        ranks = []
        for _ in range(RANKS):
            batches = []
            for _ in range(rng.randint(0, 2 * loop.steps) if ragged else common):
                weight = rng.choice([0.0, 1.0, 2.5, 7.0]) if loop.weighs else 1.0
                overflows = loop.skips and weight > 0 and rng.random() < 0.1
                batches.append(MicroBatch(number, weight, rng.random() < 0.2, overflows))
                number += 1
            ranks.append(batches)
        epochs.append(ranks)
    return epochs


def network(loop: Loop) -> Net:
    net = Net(loop.how, loop.dtype)
    net.norm.eval()
    return net


def losses(loop: Loop, model: nn.Module, batch: MicroBatch) -> list[Tensor]:
    """Of each backward; as the reduction wants them."""
    found = []
    for part in range(loop.several):
        generator = torch.Generator().manual_seed(10 * batch.number + part)
        output = model(torch.randn(6, 40, generator=generator), batch.uses_extra)
        loss = output.float().pow(2).mean() * (math.inf if batch.overflows else 1.0)
        found.append(loss * batch.weight if loop.reduction == "normalized" else loss)
    return found


def make_inner(loop: Loop, net: nn.Module) -> torch.optim.Optimizer:
    make, options = INNER[loop.inner]
    return make(net.parameters(), **options)


def ours(loop: Loop) -> tuple[Net, int]:
    """The network trained on this rank, and the number of updates."""
    net, rank = network(loop), dist.get_rank()
    parallel = DistributedDataParallel(net, find_unused_parameters=True) if loop.kind == "ddp" else net
    optimizer = fusedacc.AccumulatingOptimizer(
        make_inner(loop, net),
        loop.steps if loop.counted else None,
        reduction=loop.reduction,
        max_grad_norm=loop.clip,
        skip_nonfinite=loop.skips,
        private_gradients=loop.private,
        model=net if loop.in_module else None,
        data_parallel=parallel if loop.kind == "ddp" else dist.group.WORLD,
    )
    for ranks in random_epochs(loop):
        for index, batch in enumerate(ranks[rank]):
            last = (index + 1) % loop.steps == 0
            defers = not (last or loop.counted) and loop.kind == "ddp"
            with (
                optimizer.accumulate(weight=batch.weight) if loop.weighs else contextlib.nullcontext(),
                parallel.no_sync() if defers else contextlib.nullcontext(),
            ):
                for loss in losses(loop, parallel, batch):
                    loss.backward()
            if loop.counted or last:
                optimizer.step(), optimizer.zero_grad()
        if loop.counted and loop.ends_in == "flush":
            optimizer.flush(), optimizer.zero_grad()
    optimizer.close()
    return net, optimizer.num_updates


def one_process(loop: Loop) -> tuple[Net, int]:
    """What stock makes of the data of all ranks; each window's gradients are added up in float64."""
    net = network(dataclasses.replace(loop, how=""))
    inner, parameters, updates = make_inner(loop, net), list(net.parameters()), 0
    for ranks in random_epochs(loop):
        for begin in range(0, max(map(len, ranks)), loop.steps):
            batches = [batch for each in ranks for batch in each[begin : begin + loop.steps]]
            sums: dict[int, Tensor] = {}
            for batch in batches:
                if loop.weighs and not batch.weight:
                    continue
                for loss in losses(loop, net, batch):
                    found = torch.autograd.grad(loss, parameters, allow_unused=True)
                    for index, gradient in enumerate(found):
                        if gradient is not None:
                            scale = batch.weight if loop.reduction == "weighted" else 1.0
                            sums[index] = sums.get(index, 0) + scale * gradient.double()
            updates += 1
            total = sum(batch.weight for batch in batches) if loop.reduction != "sum" else RANKS
            if total:
                update(loop, inner, parameters, {index: each / total for index, each in sums.items()})
    return net, updates


def update(loop: Loop, inner: torch.optim.Optimizer, parameters: list, finals: dict[int, Tensor]) -> None:
    """Stock's: clipped, and left out where it is not finite."""
    norm = torch.stack([each.norm() for each in finals.values()]).norm()
    if loop.skips and not norm.isfinite():
        return
    coefficient = 1.0 if loop.clip is None else min(loop.clip / (norm.item() + 1e-6), 1.0)
    for index, each in finals.items():
        parameters[index].grad = (each * coefficient).to(parameters[index].dtype)
    inner.step(), inner.zero_grad()


def run(seeds: list[int]) -> None:
    """On every rank: these cases, one after the other."""
    for seed in seeds:
        loop = random_loop(seed)
        with small_buckets():
            net, updates = ours(loop)
        wanted, wanted_updates = one_process(loop)
        assert updates == wanted_updates, loop
        for (name, p), q in zip(net.named_parameters(), wanted.parameters(), strict=True):
            assert_close(p, q, 5e-2 if loop.dtype is LOW else 2e-4, (loop, name))
        assert_ranks_equal(net, loop)


SEEDS = range(COUNT) if ONE is None else [int(ONE)]


@pytest.mark.parametrize("begin", range(0, len(SEEDS), CHUNK))
def test_random_training_on_two_ranks_equals_one_process(begin):
    on_ranks(RANKS, run, list(SEEDS[begin : begin + CHUNK]))
