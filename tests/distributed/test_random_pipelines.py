"""Random training under an attached schedule equals float64 gradients of one process.

`make test` runs the first few cases, FUSEDACC_FULL_TESTS=1 runs 500, FUSEDACC_SEED=17 that one alone.
"""

import contextlib
import math
import os
import random
from dataclasses import dataclass

import pytest
import sweeps
import torch
import torch.distributed as dist
from fsdp_setting import whole
from pipelines_setting import ALL_STAGES, mine_of, one_process, parts, run_schedule, scheduled
from ranks import mesh_of, on_ranks
from ranks_setting import LOW, assert_close
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import fusedacc

ONE = os.environ.get("FUSEDACC_SEED")
COUNT = 500 if sweeps.FULL else 14
#: Number of cases in one call of the ranks.
CHUNK = 10
WINDOWS, LEARNING_RATE = 2, 0.05


@dataclass(frozen=True)
class Case:
    """How a case trains.

    Attributes:
        line: the number of ranks of a pipeline.
        beside: how ranks with the same stages share data: "" (there are none), "replicas" or "fsdp".
        compute: FSDP2's `param_dtype`, or the parameters' dtype.
        apart: whether each stage has an optimizer.
        defers: whether FSDP2 reduces only once per window.
    """

    kind: str
    line: int
    beside: str
    chunks: int
    steps: int | None
    reduction: str
    dtype: torch.dtype
    compute: torch.dtype
    scales: bool
    in_place: bool
    apart: bool
    clip: float | None
    norm_type: float
    skips: bool
    masters: bool
    checkpointed: bool
    frozen: tuple[int, ...]
    defers: bool


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    line = draw.choice((2, 2, 4))
    beside = draw.choice(("", "replicas", "fsdp")) if line == 2 else ""
    dtype = draw.choice((torch.float32, LOW))
    steps = draw.choice((None, 1, 2, 3))
    weighs = steps is not None and beside == ""
    clip = draw.choice((None, 0.01))
    return Case(
        kind=draw.choice(list(ALL_STAGES)),
        line=line,
        beside=beside,
        chunks=2 * line * draw.choice((1, 2)),
        steps=steps,
        reduction=draw.choice(("mean", "sum", "weighted", "normalized")) if weighs else "mean",
        dtype=dtype,
        compute=draw.choice((dtype, LOW)) if beside == "fsdp" else dtype,
        scales=draw.random() < 0.7,
        in_place=draw.random() < 0.7,
        apart=draw.random() < 0.3,
        clip=clip,
        norm_type=draw.choice((2.0, math.inf)),
        skips=draw.random() < 0.3,
        masters=dtype is LOW and beside != "fsdp" and draw.random() < 0.3,
        checkpointed=draw.random() < 0.3,
        frozen=tuple(place for place in range(3) if draw.random() < 0.2),
        defers=beside == "fsdp" and steps is not None and draw.random() < 0.5,
    )


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def network(case: Case) -> nn.ModuleList:
    net = parts(case.line * ALL_STAGES[case.kind], case.dtype)
    if case.checkpointed:
        net = nn.ModuleList(Checkpointed(*part) for part in net)
    for part in net:
        for place, p in enumerate(part.parameters()):
            p.requires_grad_(place not in case.frozen)  # never all: the last bias is trained
    return net


class Training:
    """One rank's part of a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.handed = case, {}
        replicas = 1 if case.beside == "" else 2
        mesh = mesh_of((replicas, case.line), ("data", "pipeline"))
        group, data_group = mesh.get_group("pipeline"), mesh.get_group("data")
        self.replica, self.replicas = mesh.get_local_rank("data"), replicas
        self.net, self.whole = network(case), network(case)
        self.mine = mine_of(case.kind, dist.get_rank(group), case.line)
        own = nn.ModuleList(self.net[i] for i in self.mine)
        if case.beside == "fsdp":
            mixed = {} if case.compute is case.dtype else {"param_dtype": case.compute}
            policy = MixedPrecisionPolicy(**mixed, reduce_dtype=torch.float32, cast_forward_inputs=False)
            for stage in own:
                fully_shard(stage, mesh=mesh["data"], mp_policy=policy)
        self.schedule = scheduled(
            case.kind, self.net, self.mine, group=group, chunks=case.chunks, scale_grads=case.scales
        )
        self.optimizers = [self.optimizer(each, data_group) for each in (own if case.apart else [own])]

    def optimizer(self, own: nn.Module, data_group: dist.ProcessGroup) -> fusedacc.AccumulatingOptimizer:
        case = self.case
        inner = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=LEARNING_RATE)
        optimizer = fusedacc.AccumulatingOptimizer(
            inner,
            case.steps,
            reduction=case.reduction if case.steps else None,
            max_grad_norm=case.clip,
            norm_type=case.norm_type,
            skip_nonfinite=case.skips,
            master_weights=case.masters,
            model=own if case.in_place else None,
            data_parallel=data_group if case.beside == "replicas" else None,
        )
        optimizer.attach(self.schedule)
        inner.register_step_pre_hook(self.note)
        return optimizer

    def note(self, inner: torch.optim.Optimizer, *_: object) -> None:
        for group in inner.param_groups:
            for p in group["params"]:
                self.handed[id(p)] = whole(p.grad).clone()

    def share(self) -> None:
        """Copy the current parameters of all ranks into `whole`."""
        states: list = [None] * dist.get_world_size()
        own = {i: {name: whole(p).detach() for name, p in self.net[i].named_parameters()} for i in self.mine}
        dist.all_gather_object(states, own)
        for state in states:
            for i, values in state.items():
                self.whole[i].load_state_dict(values)

    def run(self) -> None:
        case, each = self.case, self.case.steps or 2
        weights = [1.0, 3.0, 2.0][:each]
        weighs = case.reduction in ("weighted", "normalized")
        for window in range(WINDOWS):
            self.share()
            indices = range(window * each, (window + 1) * each)
            wanted, norm = self.expected(indices, weights)
            for index, weight in zip(indices, weights, strict=True):
                with contextlib.ExitStack() as contexts:
                    for optimizer in self.optimizers if weighs else ():
                        contexts.enter_context(optimizer.accumulate(weight=weight))
                    for optimizer in self.optimizers if case.defers else ():
                        contexts.enter_context(optimizer.accumulate(self.net))
                    run_schedule(self.schedule, index, case.compute, self.replica, case.chunks)
                if case.steps or index == indices[-1]:
                    for optimizer in self.optimizers:
                        optimizer.step(), optimizer.zero_grad()
            self.compare(wanted, norm)
        for optimizer in self.optimizers:
            assert optimizer.num_updates == WINDOWS

    def expected(self, indices: range, weights: list[float]) -> tuple[dict[tuple, Tensor], Tensor]:
        """Return the gradients of one process, and their norm."""
        case = self.case
        factor = 1.0 if case.scales else float(case.chunks)
        by_weight = weights if case.reduction == "weighted" else [1.0] * len(weights)
        divisor = {"mean": len(weights), "sum": 1}.get(case.reduction, sum(weights)) if case.steps else 1
        sums: list = []
        for index, weight in zip(indices, by_weight, strict=True):
            found = one_process(self.whole, [index], self.replicas, case.compute, case.chunks)
            scaled = [weight * factor / divisor * gradient for gradient in found]
            sums = [a + b for a, b in zip(sums, scaled, strict=True)] if sums else scaled
        names = [(i, name) for i, part in enumerate(self.whole) for name, _ in part.named_parameters()]
        trained = [p.requires_grad for p in self.whole.parameters()]
        wanted = {name: g for name, g, on in zip(names, sums, trained, strict=True) if on}
        norms = torch.stack([g.norm(p=case.norm_type) for g in wanted.values()])
        return wanted, norms.norm(p=case.norm_type)

    def compare(self, wanted: dict[tuple, Tensor], norm: Tensor) -> None:
        case, most = self.case, 1e-5 if self.case.compute is torch.float32 else 4e-2
        clip = 1.0 if case.clip is None else min(1.0, case.clip / (norm.item() + 1e-6))
        if case.clip is not None or case.skips:
            for optimizer in self.optimizers:
                assert_close(optimizer.grad_norm, norm, most, "norm")
        for i in self.mine:
            for name, p in self.net[i].named_parameters():
                if not p.requires_grad:
                    assert p.grad is None
                    continue
                assert_close(self.handed.pop(id(p)), clip * wanted[i, name], 2 * most, (i, name))


def run_cases(seeds: list[int]) -> None:
    for seed in seeds:
        case = random_case(seed)
        try:
            Training(case).run()
        except BaseException as error:
            raise AssertionError(f"FUSEDACC_SEED={seed}: {case}") from error


def chunks() -> list[tuple[int, list[int]]]:
    """Return numbers of ranks, and the seeds of cases to run in one call."""
    seeds = [int(ONE)] if ONE else list(range(COUNT))
    found = []
    for ranks in (2, 4):
        fit = [seed for seed in seeds if ranks_of(random_case(seed)) == ranks]
        found += [(ranks, fit[at : at + CHUNK]) for at in range(0, len(fit), CHUNK)]
    return found


def ranks_of(case: Case) -> int:
    return case.line * (1 if case.beside == "" else 2)


@pytest.mark.parametrize(("ranks", "seeds"), chunks(), ids=lambda value: str(value)[:20])
def test_random_pipelines(ranks, seeds):
    on_ranks(ranks, run_cases, seeds)
