"""Random training on two ranks equals plain PyTorch in one process with the data of both ranks.

`make test` runs some of the first hundred cases, with every pair of options that occurs in them.
FUSEDACC_FULL_TESTS=1 runs 2,000, FUSEDACC_RANK_CASES=50 the first 50, FUSEDACC_SEED=17 that one alone.
"""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Iterator

import pytest
import sweeps
import torch
import torch.distributed as dist
from loops import failing
from rank_cases import INNER, Epoch, Loop, MicroBatch, random_epochs, random_loop, traits
from ranks import on_ranks
from ranks_setting import Net, assert_nets_close, assert_ranks_equal, small_buckets
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedacc

RANKS = 2
COUNT = os.environ.get("FUSEDACC_RANK_CASES")
ONE = os.environ.get("FUSEDACC_SEED")
#: Number of cases in one call of the ranks.
CHUNK = 20


def network(loop: Loop) -> Net:
    net = Net(loop.how, loop.dtype)
    net.norm.eval()
    return net


def losses(loop: Loop, model: nn.Module, batch: MicroBatch) -> Iterator[Tensor]:
    """Return the loss of each backward, multiplied by the weight if the reduction needs it."""
    for part in range(loop.several):
        generator = torch.Generator().manual_seed(10 * batch.number + part)
        output = model(torch.randn(6, 40, generator=generator), batch.uses_extra)
        loss = output.float().pow(2).mean() * (math.inf if batch.overflows else 1.0)
        yield loss * batch.weight if loop.reduction == "normalized" else loss


def split(loop: Loop, net: Net) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that train from the beginning, and those that are added later."""
    held = [p for name, p in net.named_parameters() if loop.held and name.startswith(loop.held + ".")]
    return [p for p in net.parameters() if not any(p is q for q in held)], held


def freeze(loop: Loop, net: Net, epoch: Epoch, number: int) -> None:
    """Freeze the parameters that this epoch does not train."""
    waits = {id(p) for p in split(loop, net)[1]} if loop.held_frozen and number < loop.added_after else ()
    for name, p in net.named_parameters():
        p.requires_grad_(name not in epoch.frozen and id(p) not in waits)


class Ours:
    """A rank's network and its wrapper."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.net, self.rank = loop, network(loop), dist.get_rank()
        self.epochs = random_epochs(loop, RANKS)
        freeze(loop, self.net, self.epochs[0], 0)
        self.parallel = self.net
        if loop.kind == "ddp":
            self.parallel = DistributedDataParallel(self.net, find_unused_parameters=not loop.overlaps)
        make, options = INNER[loop.inner]
        steps = loop.lengths[0] if len(loop.lengths) == 1 else loop.length
        self.optimizer = fusedacc.AccumulatingOptimizer(
            make(split(loop, self.net)[0], **options),
            steps if loop.counted else None,
            reduction=loop.reduction,
            max_grad_norm=None if loop.by_hand else loop.clip,
            skip_nonfinite=loop.skips,
            master_weights=loop.masters,
            model=self.net if loop.in_module else None,
            data_parallel=self.parallel if loop.kind == "ddp" else dist.group.WORLD,
            reduce_dtype=loop.wire,
        )
        self.scaler = fusedacc.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2, enabled=loop.scaled)

    def train(self) -> None:
        loop, optimizer = self.loop, self.optimizer
        for number, epoch in enumerate(self.epochs):
            freeze(loop, self.net, epoch, number)
            if loop.held and number == loop.added_after:
                held = split(loop, self.net)[1]
                for p in held:
                    p.grad = None  # it is not reduced
                optimizer.add_param_group({"params": held, "lr": 0.02})
            if epoch.thrown:
                self.throw_away(epoch.thrown[self.rank], epoch.fails[self.rank])
            begun = optimizer.num_updates, 0
            for batch in epoch.ranks[self.rank]:
                updates, index = begun
                last = index + 1 == loop.length(updates)
                self.backward(batch, last)
                self.end(last)
                begun = (updates + 1, 0) if last else (updates, index + 1)
            if loop.counted and loop.ends_in == "flush":
                if loop.scaled:
                    self.scaler.flush(optimizer), self.scaler.update()
                else:
                    optimizer.flush()
                optimizer.zero_grad()

    def throw_away(self, batches: list[MicroBatch], fails: bool) -> None:
        """Discard a window before its last `step()`, or after an exception in its last backward."""
        for index, batch in enumerate(batches):
            final = index == len(batches) - 1
            if final and fails:
                with failing(self.net.norm.bias):
                    self.backward(dataclasses.replace(batch, ignores=""), last=False)
            else:
                self.backward(batch, last=index + 1 == self.loop.lengths[0])
            if not final and self.loop.counted:
                self.end(last=False)
        self.optimizer.discard()

    def backward(self, batch: MicroBatch, last: bool) -> None:
        loop, optimizer = self.loop, self.optimizer
        if batch.ignores == "before":
            self.ignored(batch)
            if loop.counted:
                optimizer.zero_grad()
        weight = None if loop.late else batch.weight
        defers = not (last or loop.counted) and loop.kind == "ddp"
        with (
            optimizer.accumulate(weight=weight) if loop.weighs else contextlib.nullcontext() as micro,
            self.parallel.no_sync() if defers else contextlib.nullcontext(),
        ):
            for loss in losses(loop, self.parallel, batch):
                self.scaler.scale(loss).backward()
            if loop.late:
                micro.weight = batch.weight
        if batch.ignores == "after":
            self.ignored(batch)

    def ignored(self, batch: MicroBatch) -> None:
        with self.optimizer.ignore():
            for loss in losses(self.loop, self.parallel, batch):
                (7.0 * loss).backward()

    def end(self, last: bool) -> None:
        loop, optimizer, scaler = self.loop, self.optimizer, self.scaler
        if last and loop.by_hand:
            if loop.scaled:
                scaler.unscale_(optimizer)
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, loop.clip)
        if loop.counted or last:
            if loop.scaled:
                scaler.step(optimizer), scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()


class Stock:
    """Plain PyTorch with the data of all ranks, which sums each window's gradients in float64."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.net = loop, network(dataclasses.replace(loop, how=""))
        self.epochs = random_epochs(loop, RANKS)
        self.updates = self.skipped = 0
        self.masters = {
            p: nn.Parameter(p.detach().float()) if loop.masters else p for p in self.net.parameters()
        }
        make, options = INNER[loop.inner]
        self.inner = make([self.masters[p] for p in split(loop, self.net)[0]], **options)

    def train(self) -> None:
        loop = self.loop
        for number, epoch in enumerate(self.epochs):
            freeze(loop, self.net, epoch, number)
            if loop.held and number == loop.added_after:
                held = [self.masters[p] for p in split(loop, self.net)[1]]
                self.inner.add_param_group({"params": held, "lr": 0.02})
            begin = 0
            while begin < max(map(len, epoch.ranks)):
                end = begin + loop.length(self.updates)
                self.window([batch for each in epoch.ranks for batch in each[begin:end]])
                begin = end

    def window(self, batches: list[MicroBatch]) -> None:
        loop, sums = self.loop, {}
        known = {id(p) for group in self.inner.param_groups for p in group["params"]}
        trained = [p for p, own in self.masters.items() if p.requires_grad and id(own) in known]
        for batch in batches:
            if loop.weighs and not batch.weight:
                continue
            for loss in losses(loop, self.net, batch):
                found = torch.autograd.grad(loss, trained, allow_unused=True)
                for p, gradient in zip(trained, found, strict=True):
                    if gradient is not None:
                        scale = batch.weight if loop.reduction == "weighted" else 1.0
                        sums[p] = sums.get(p, 0) + scale * gradient.double()
        self.updates += 1
        total = sum(batch.weight for batch in batches) if loop.reduction != "sum" else RANKS
        if total:
            self.update({p: each / total for p, each in sums.items()})
        else:
            self.skipped += 1

    def update(self, finals: dict[nn.Parameter, Tensor]) -> None:
        """Clip and update, or skip the update if a gradient is not finite."""
        norm = torch.stack([each.norm() for each in finals.values()]).norm()
        if self.loop.drops and not norm.isfinite():
            self.skipped += 1
            return
        clip = self.loop.clip
        coefficient = 1.0 if clip is None else min(clip / (norm.item() + 1e-6), 1.0)
        for p, each in finals.items():
            own = self.masters[p]
            own.grad = (each * coefficient).to(own.dtype)
        self.inner.step(), self.inner.zero_grad()
        with torch.no_grad():
            for p, own in self.masters.items():
                p.copy_(own)


def run(seeds: list[int]) -> None:
    """Run cases on every rank. One rank compares the result with plain PyTorch."""
    for seed in seeds:
        loop = random_loop(seed)
        try:
            with small_buckets():
                ours = Ours(loop)
                ours.train()
        except Exception as error:
            raise AssertionError(loop) from error
        assert_ranks_equal(ours.net, loop)
        if dist.get_rank() != seed % RANKS:
            continue
        stock = Stock(loop)
        stock.train()
        counts = ours.optimizer.num_updates, int(ours.optimizer.num_skipped)
        assert counts == (stock.updates, stock.skipped), (counts, stock.updates, stock.skipped, loop)
        assert_nets_close(ours.net, stock.net, loop.tolerance, loop)


@functools.cache
def seeds() -> list[int]:
    if ONE is not None:
        return [int(ONE)]
    if COUNT or sweeps.FULL:
        return list(range(int(COUNT or 2000)))
    cases = [traits(random_loop(seed), RANKS) for seed in range(100)]
    return sweeps.thin([sorted(case.items()) for case in cases])


@pytest.mark.parametrize("part", range(4))
def test_random_training_on_two_ranks_equals_one_process(part):
    found = seeds()[part::4]
    for begin in range(0, len(found), CHUNK):
        on_ranks(RANKS, run, found[begin : begin + CHUNK])
