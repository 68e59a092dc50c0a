"""`optimizer.attach(schedule)`: one `schedule.step()` is one micro-batch, accumulated once and in place."""

import contextlib
import copy
import functools
import json
import math
import os
import signal
import tempfile
from unittest import mock

import pytest
import sweeps
import torch
import torch.distributed as dist
from pipelines_setting import (
    ALL_STAGES,
    CHUNKS,
    assert_gradients,
    data,
    loss_of,
    mine_of,
    one_process,
    parts,
    run_schedule,
    scheduled,
    stages_of,
    wrap,
)
from ranks import Pool, mesh_of, on_each_rank, on_ranks
from ranks_setting import LOW, assert_close, error_of, refused
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.pipelining import schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fusedacc

ZERO_BUBBLE = "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV", "csv"


def attached(kind: str, net: nn.ModuleList, steps: int | None, mine: tuple[int, ...] = (), **options):
    """Return an optimizer of `net` (or of the stages `mine`) with `model=`, and the attached schedule."""
    schedule_options = {name: options.pop(name) for name in ("group", "chunks") if name in options}
    own = nn.ModuleList(net[i] for i in mine) if mine else net
    optimizer = wrap(own, steps, **{"model": own} | options)
    schedule = scheduled(kind, net, mine, **schedule_options)
    optimizer.attach(schedule)
    return optimizer, schedule


def allocations(run, nbytes: int) -> int:
    """Return the number of allocations of at least that many bytes."""
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as seen:
        run()
    path = os.path.join(tempfile.gettempdir(), f"trace-{os.getpid()}.json")
    seen.export_chrome_trace(path)
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    os.unlink(path)
    sizes = [event["args"]["Bytes"] for event in events if event.get("name") == "[memory]"]
    return sum(size >= nbytes for size in sizes)


@pytest.mark.usefixtures("group")
class TestOnOneRank:
    @pytest.mark.parametrize("kind", ALL_STAGES)
    @pytest.mark.parametrize("steps", [None, 2])
    def test_sums_of_bfloat16_gradients_are_float32(self, kind, steps):
        """Sums of 16 equal micro-batches in bfloat16 would have errors of at least half a percent."""
        net, chunks = parts(ALL_STAGES[kind], LOW), 16
        optimizer, schedule = attached(kind, net, steps, chunks=chunks)
        x, y = data(0, LOW)
        x, y = x[:1].repeat(chunks, 1), y[:1].repeat(chunks, 1)
        for _ in range(steps or 1):
            schedule.step(x, target=y)
            optimizer.step() if steps and not optimizer.will_update else None
        alone = copy.deepcopy(net)
        for p in alone.parameters():
            p.grad = None
        output = x[:1]
        for part in alone:
            output = part(output)
        loss_of(output, y[:1]).backward()
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            assert_close(ours.grad, theirs.grad, 4e-3, kind)

    @pytest.mark.parametrize("kind", ALL_STAGES)
    @pytest.mark.parametrize("steps", [None, 2])
    def test_no_gradient_of_a_weight_is_allocated(self, kind, steps):
        """With `model=`, after the first micro-batch of a window, which allocates the sums."""
        torch.manual_seed(0)
        width = 128
        net = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
            for _ in range(ALL_STAGES[kind])
        )
        optimizer, schedule = attached(kind, net, steps)
        x = torch.randn(2 * CHUNKS, width)

        def run() -> None:
            schedule.step(x, target=x)

        for _ in range(3):
            run()
            optimizer.step()
        assert allocations(run, 4 * width * width // 10) == 0

    @pytest.mark.parametrize("kind", ZERO_BUBBLE)
    def test_products_are_done_at_w(self, kind):
        net = parts(ALL_STAGES[kind])
        optimizer, schedule = attached(kind, net, 1)
        run_schedule(schedule, 0)  # the first call infers shapes
        optimizer.step()
        order: list[str] = []
        capture = optimizer._capture
        compute = capture.compute_postponed
        capture.compute_postponed = lambda products: (order.append(f"W{len(products)}"), compute(products))
        with mock.patch("torch.autograd.grad", side_effect=AssertionError("a gradient is asked for")):
            run_schedule(schedule, 0)
        assert "W2" in order
        assert not any(stage.dw_runner for stage in stages_of(schedule))

    def test_flush_takes_the_mean_over_what_came(self):
        net = parts(2)
        optimizer, schedule = attached("ScheduleZBVZeroBubble", net, 3)
        wanted = one_process(net, range(2))
        for index in range(2):
            run_schedule(schedule, index)
            optimizer.step()
        optimizer.flush()
        assert_gradients(net, wanted)
        assert optimizer.num_updates == 1

    def test_losses_are_the_schedules(self):
        net = parts(1)
        optimizer, schedule = attached("ScheduleGPipe", net, 2)
        x, y = data(0)
        losses: list[Tensor] = []
        schedule.step(x, target=y, losses=losses)
        wanted = [loss_of(net[0](a), b) for a, b in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True)]
        assert torch.allclose(torch.stack(losses), torch.stack(wanted))
        optimizer.discard()

    @pytest.mark.parametrize("steps", [None, 2])
    def test_gradients_that_autograd_or_the_user_stores_are_divided_too(self, steps):
        """Autograd stores gradients for a post-accumulate hook. A user's `dw_builder` may store them too."""
        net = parts(2)
        wanted = one_process(net, range(2))
        called: list[int] = []
        net[0][0].weight.register_post_accumulate_grad_hook(lambda param: called.append(1))
        extra = net[1][2].bias

        def builder():
            def run() -> None:
                extra.grad = torch.ones_like(extra) if extra.grad is None else extra.grad + 1

            return run

        optimizer = wrap(net, steps, model=net)
        schedule = scheduled("ScheduleZBVZeroBubble", net, dw_builder=builder)
        optimizer.attach(schedule)
        for index in range(2):
            run_schedule(schedule, index)
            if steps and index == 0:
                optimizer.step()
        assert len(called) == 2 * CHUNKS
        wanted[7] = wanted[7] + 2  # two stages' runners add in each micro-batch, divided by their number
        wanted = wanted if steps else [2 * gradient for gradient in wanted]
        found = [p.grad for p in net.parameters()]
        for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert_close(ours, theirs, 1e-5, place)
        optimizer.close()
        assert all(stage.dw_builder is builder for stage in stages_of(schedule))

    def test_a_schedule_that_forgets_w_is_an_error(self):
        net = parts(2)
        optimizer, schedule = attached("ScheduleZBVZeroBubble", net, 1)
        left_out = mock.patch.object(type(stages_of(schedule)[0]), "backward_weight_one_chunk")
        with left_out, pytest.raises(RuntimeError, match="weight gradients are missing"):
            run_schedule(schedule, 0)
        with pytest.raises(RuntimeError, match=r"discard\(\)"):
            optimizer.step()
        optimizer.discard()
        run_schedule(schedule, 0)
        assert_gradients(net, one_process(net, [0]))

    def test_a_failure_before_anything_is_added_changes_nothing(self):
        net = parts(1)
        optimizer, schedule = attached("ScheduleGPipe", net, None)
        run_schedule(schedule, 0)
        before = [p.grad.clone() for p in net.parameters()]
        with pytest.raises(RuntimeError):
            schedule.step(data(0)[0][:, :2], target=data(0)[1])
        assert all(torch.equal(p.grad, held) for p, held in zip(net.parameters(), before, strict=True))
        optimizer.step()

    def test_refusals_change_nothing(self):
        net, others = parts(2), parts(1)
        optimizer = wrap(net, 2)
        schedule = scheduled("ScheduleZBVZeroBubble", net)
        held = [dict(stage.__dict__) for stage in stages_of(schedule)]
        refused(ValueError, "none of the optimizer's parameters", lambda: wrap(others, 2).attach(schedule))
        with_ddp = scheduled("ScheduleGPipe", nn.ModuleList([DistributedDataParallel(others[0])]))
        refused(ValueError, "that reduces its gradients itself", lambda: wrap(parts(1), 2).attach(with_ddp))
        assert [dict(stage.__dict__) for stage in stages_of(schedule)] == held
        optimizer.attach(schedule)
        refused(
            RuntimeError, "attached to a ScheduleZBVZeroBubble already", lambda: optimizer.attach(schedule)
        )
        run_schedule(schedule, 0)
        refused(RuntimeError, "in mid-window", lambda: optimizer.attach(schedule))
        optimizer.close()
        assert [dict(stage.__dict__).get("dw_builder") for stage in stages_of(schedule)] == [None, None]
        assert not any("scale_grads" in stage.__dict__ for stage in stages_of(schedule))
        refused(RuntimeError, "closed", lambda: optimizer.attach(schedule))

    def test_another_schedule_after_the_first_is_gone(self):
        net = parts(1)
        optimizer, schedule = attached("ScheduleGPipe", net, 1)
        del schedule
        schedule = scheduled("Schedule1F1B", net)
        optimizer.attach(schedule)
        run_schedule(schedule, 0)
        assert_gradients(net, one_process(net, [0]))

    def test_a_schedule_that_is_not_attached_is_as_before(self):
        """This also holds for a schedule that runs the stages of the attached one."""
        net = parts(1)
        optimizer, schedule = attached("ScheduleGPipe", net, 2)
        other = schedules.ScheduleGPipe(stages_of(schedule)[0], CHUNKS, loss_fn=loss_of)
        wanted = one_process(net, range(2))
        for index, each in enumerate((schedule, other)):
            run_schedule(each, index)
            if index == 0:
                optimizer.step()
        assert_gradients(net, wanted)

    @pytest.mark.parametrize("kind", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
    @pytest.mark.parametrize("steps", [None, 2])
    def test_one_optimizer_for_each_stage(self, kind, steps):
        """The norm is over both stages. The last optimizer to close restores the stages."""
        net, each = parts(2), steps or 1
        schedule = scheduled(kind, net)
        both = [wrap(part, steps, model=part, max_grad_norm=0.01) for part in net]
        for optimizer in both:
            optimizer.attach(schedule)
        for window in range(2):
            indices = range(each * window, each * (window + 1))
            wanted = one_process(net, indices)
            norm = torch.stack([gradient.norm() for gradient in wanted]).norm()
            before = [p.detach().clone() for p in net.parameters()]
            for index in indices:
                run_schedule(schedule, index)
                for optimizer in both[::-1] if window else both:
                    optimizer.step()
            for optimizer in both:
                assert_close(optimizer.grad_norm, norm, 1e-5, "norm")
                optimizer.zero_grad()
            for p, former, gradient in zip(net.parameters(), before, wanted, strict=True):
                assert_close(former - p, 0.5 * 0.01 / norm * gradient, 1e-3, "clipped")
        both[0].close()
        assert "scale_grads" in stages_of(schedule)[0].__dict__
        both[1].close()
        assert "scale_grads" not in stages_of(schedule)[0].__dict__

    def test_an_optimizer_that_has_skipped_an_update_takes_no_old_norm(self):
        net = parts(2)
        schedule = scheduled("ScheduleZBVZeroBubble", net)
        both = [wrap(part, None, max_grad_norm=1e9) for part in net]
        for optimizer in both:
            optimizer.attach(schedule)
        for index in range(2):
            wanted = one_process(net, [index])
            run_schedule(schedule, index)
            both[index].step()
            for optimizer in both:
                optimizer.zero_grad()
        assert_close(both[1].grad_norm, torch.stack([g.norm() for g in wanted]).norm(), 1e-5, "norm")

    def test_optimizers_of_a_rank_that_differ_are_refused(self):
        net = parts(2)
        schedule = scheduled("ScheduleZBVZeroBubble", net)
        wrap(net[0], 2).attach(schedule)  # the wrapper is freed at once
        first = wrap(net[0], 2)
        first.attach(schedule)
        said = error_of(ValueError, lambda: wrap(net[1], 3).attach(schedule))
        assert "gradient_accumulation_steps" in said

    def test_parameters_of_another_optimizer_are_divided_by_the_schedule(self):
        net = parts(2)
        schedule = scheduled("ScheduleZBVZeroBubble", net)
        optimizer = wrap(net[0], 1)
        optimizer.attach(schedule)
        run_schedule(schedule, 0)
        assert_gradients(net, one_process(net, [0]))

    def test_a_wrapper_that_is_gone_leaves_the_stages(self):
        net = parts(2)
        optimizer, schedule = attached("ScheduleZBVZeroBubble", net, 2)
        del optimizer
        assert not any("scale_grads" in stage.__dict__ for stage in stages_of(schedule))

    @pytest.mark.parametrize("kind", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
    def test_a_checkpoint_between_micro_batches(self, kind):
        """The restored window ends bitwise equal."""
        net = parts(ALL_STAGES[kind], LOW)
        twin = copy.deepcopy(net)
        optimizer, schedule = attached(kind, net, 2)
        run_schedule(schedule, 0, LOW)
        optimizer.step()
        saved = optimizer.state_dict()
        other, twins = attached(kind, twin, 2)
        other.load_state_dict(saved)
        for each, own in ((schedule, optimizer), (twins, other)):
            run_schedule(each, 1, LOW)
            own.step()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(p.grad, q.grad)

    def test_experts_and_embeddings_are_done_at_w_too(self):
        class First(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table, self.up = nn.Embedding(10, 6), nn.Linear(6, 6)

            def forward(self, x: Tensor) -> Tensor:
                return self.up(self.table(x.long()[:, 0].abs() % 10))

        torch.manual_seed(0)
        net = nn.ModuleList([First(), nn.Linear(6, 6)])
        optimizer, schedule = attached("ScheduleZBVZeroBubble", net, 2)
        wanted = one_process(net, range(2))
        for index in range(2):
            run_schedule(schedule, index)
            if index == 0:
                optimizer.step()
        assert_gradients(net, wanted)

    @pytest.mark.parametrize("scaled", [False, True])
    def test_nothing_is_left_of_an_update_that_is_not_finite(self, scaled):
        net = parts(2)
        optimizer, schedule = attached("ScheduleZBVZeroBubble", net, 1, skip_nonfinite=not scaled)
        scaler = fusedacc.amp.GradScaler("cpu", enabled=scaled)
        before = [p.detach().clone() for p in net.parameters()]
        x, y = data(0)
        scaler.scale(torch.ones(()))
        schedule.step(x * math.inf, target=y)
        scaler.step(optimizer) if scaled else optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
        assert int(optimizer.num_skipped) == 1

    def test_explain_says_where_gradients_are_added(self):
        net = parts(2)
        optimizer = wrap(net, 2, model=net)
        schedule = scheduled("ScheduleZBVZeroBubble", net)
        assert "schedule" not in optimizer.explain()
        optimizer.attach(schedule)
        table = optimizer.explain()
        for said in ("at W of the schedule", "inside schedule.step()", "gemm", "multi_tensor"):
            assert said in table
        optimizer, schedule = attached("ScheduleGPipe", parts(1), 2)
        assert "at W" not in optimizer.explain()
        assert "inside schedule.step()" in optimizer.explain()


# Several ranks


class Pipeline:
    """One rank's part of a model. Each rank also has a copy of the whole model, as in one process."""

    def __init__(self, kind: str, steps: int | None, dtype=torch.float32, group=None, **options) -> None:
        self.kind, self.steps, self.dtype, self.group = kind, steps, dtype, group
        self.rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.net = parts(ranks * ALL_STAGES[kind], dtype)
        self.mine = mine_of(kind, self.rank, ranks)
        self.own = nn.ModuleList(self.net[i] for i in self.mine)
        self.optimizer, self.schedule = attached(kind, self.net, steps, self.mine, group=group, **options)

    def step(self, index: int, rank: int = 0) -> None:
        run_schedule(self.schedule, index, self.dtype, rank)

    def share(self) -> None:
        """Give every rank a copy of the whole model's current parameters."""
        states = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(states, {i: self.net[i].state_dict() for i in self.mine}, group=self.group)
        for state in states:
            for i, values in state.items():
                self.net[i].load_state_dict(values)

    def of_mine(self, gradients: list[Tensor]) -> list[Tensor]:
        known = {id(p): gradient for p, gradient in zip(self.net.parameters(), gradients, strict=True)}
        return [known[id(p)] for p in self.own.parameters()]


def alike(kind: str, steps: int | None, dtype: torch.dtype, norm_type: float) -> None:
    """The norm and clipping are over all stages, and all ranks skip the same updates."""
    limit = 0.01
    line = Pipeline(kind, steps, dtype, max_grad_norm=limit, norm_type=norm_type, skip_nonfinite=True)
    each = steps or 1
    for window in range(3):
        line.share()
        indices = range(window * each, (window + 1) * each)
        wanted = one_process(line.net, indices)
        norm = torch.stack([g.norm(p=norm_type) for g in wanted]).norm(p=norm_type)
        before = [p.detach().clone() for p in line.own.parameters()]
        if window == 1 and line.rank == 1:  # only the last bias of the last stage
            handle = line.own[-1][2].bias.register_hook(lambda gradient: gradient * math.inf)
        for index in indices:
            line.step(index)
            line.optimizer.step()
        if window == 1:
            assert all(torch.equal(p, q) for p, q in zip(line.own.parameters(), before, strict=True))
            if line.rank == 1:
                handle.remove()
        else:
            most = 1e-5 if dtype is torch.float32 else 2e-2
            assert_close(line.optimizer.grad_norm, norm, most, "norm")
            for p, former, gradient in zip(line.own.parameters(), before, line.of_mine(wanted), strict=True):
                if dtype is torch.float32:
                    assert_close(p.grad, limit / norm * gradient, 1e-4, kind)
                    assert not torch.equal(p, former)
        line.optimizer.zero_grad()
    assert int(line.optimizer.num_skipped) == 1


@pytest.mark.parametrize("kind", ALL_STAGES)
def test_two_ranks_decide_alike(kind):
    on_ranks(2, alike, kind, 2, torch.float32, 2.0)
    on_ranks(2, alike, kind, None, LOW, math.inf)


@on_each_rank(2)
def test_ranks_that_differ_are_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    net = parts(2)
    schedule = scheduled("ScheduleGPipe", net, (rank,))
    optimizer = wrap(net[rank], 2, max_grad_norm=1.0 + rank)
    refused(ValueError, "differ in max_grad_norm", lambda: optimizer.attach(schedule))
    optimizer.close()
    assert "scale_grads" not in stages_of(schedule)[0].__dict__
    for reduction, weights in (("weighted", (1.0, 2.0)), ("normalized", (1.0 + rank, 2.0 - rank))):
        line = Pipeline("ScheduleGPipe", 2, reduction=reduction)
        weights = (1.0, 2.0) if rank == 0 else (2.0, 1.0)
        for index, weight in enumerate(weights):
            with line.optimizer.accumulate(weight=weight):
                line.step(index)
            act = line.optimizer.step
            refused(ValueError, "different weights", act) if index else act()
        line.optimizer.discard()
        for index in range(2):
            with line.optimizer.accumulate(weight=3.0):
                line.step(index)
            line.optimizer.step()
        assert line.optimizer.num_updates == 1


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@on_each_rank(2)
def test_a_stage_without_parameters() -> None:
    """A rank whose stage has no parameters takes part in the norm."""
    rank = dist.get_rank()
    net = nn.ModuleList([parts(1)[0], Doubling()])
    groups = list(net[0].parameters()) if rank == 0 else [{"params": []}]
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(groups, lr=0.5), 2, max_grad_norm=0.01)
    schedule = scheduled("ScheduleGPipe", net, (rank,))
    optimizer.attach(schedule)
    wanted = one_process(net, range(2))
    norm = torch.stack([gradient.norm() for gradient in wanted]).norm()
    for index in range(2):
        run_schedule(schedule, index)
        optimizer.step()
    assert_close(optimizer.grad_norm, norm, 1e-5, "norm")
    assert optimizer.num_updates == 1


def killed() -> None:
    """The other rank raises an exception, and its window is lost. No rank waits for the timeout."""
    line = Pipeline("Schedule1F1B", 2)
    line.step(0)
    line.optimizer.step()
    if line.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        line.step(1)
    if line.optimizer._window.tainted is not None:
        refused(RuntimeError, "discard()", line.optimizer.step)
    line.optimizer.discard()
    assert line.optimizer.num_updates == 0


def test_a_killed_rank_costs_a_window():
    assert Pool(2).run_last(killed, ()) == [0, -signal.SIGKILL]


# Pipelines with data parallelism, on four ranks


@functools.cache
def groups_of_four() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the group of this rank's pipeline, and the group of the ranks with the same stages."""
    rank = dist.get_rank()
    lines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return lines[rank // 2], replicas[rank % 2]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("of_ddp", [False, True])
@on_each_rank(4)
def test_pipelines_beside_replicas(kind: str, steps: int | None, of_ddp: bool) -> None:
    """Sums are reduced once per `schedule.step()`, and the norm is that of the mean over replicas.

    Args:
        of_ddp: whether the stages are DistributedDataParallels with an optimizer each. In a manual loop,
            their `no_sync()` defers the reduction to the last `schedule.step()`.
    """
    group, replicas = groups_of_four()
    number, rank, each = dist.get_rank() // 2, dist.get_rank(group), steps or 2
    net, mine = parts(2 * ALL_STAGES[kind]), mine_of(kind, rank, 2)
    own, parallel = nn.ModuleList(net[i] for i in mine), []
    wanted = one_process(net, range(each), ranks=2)
    wanted = wanted if steps else [each * gradient for gradient in wanted]
    norm = torch.stack([gradient.norm() for gradient in wanted]).norm()
    known = {id(p): gradient for p, gradient in zip(net.parameters(), wanted, strict=True)}
    stages, options = nn.ModuleList(net), {"max_grad_norm": 1e9}
    if of_ddp:
        for i in mine:
            stages[i] = DistributedDataParallel(net[i], process_group=replicas)
        parallel = [stages[i] for i in mine]
        optimizers = [wrap(p, steps, model=p.module, data_parallel=p, **options) for p in parallel]
    else:
        optimizers = [wrap(own, steps, model=own, data_parallel=replicas, **options)]
    schedule, reductions = scheduled(kind, stages, mine, group=group), []
    for optimizer in optimizers:
        optimizer.attach(schedule)
        optimizer._accumulation.ranks.parallel.reducer.announce = lambda: reductions.append(1)
    for index in range(each):
        with contextlib.ExitStack() as waits:
            for module in parallel if steps is None and index < each - 1 else ():
                waits.enter_context(module.no_sync())
            run_schedule(schedule, index, rank=number)
        if index == each - 1:
            assert_gradients(own, [known[id(p)] for p in own.parameters()], kind)
        if steps or index == each - 1:
            for optimizer in optimizers:
                optimizer.step()
    for optimizer in optimizers:
        assert_close(optimizer.grad_norm, norm, 1e-5, "norm")
    assert len(reductions) == len(optimizers) * (1 if steps or of_ddp else each)
    for p in own.parameters():
        held = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(held, p.detach(), group=replicas)
        assert torch.equal(*held)


foreach_reduce = _fsdp_param_group.foreach_reduce
MIXED = {"param_dtype": LOW, "reduce_dtype": torch.float32, "cast_forward_inputs": False}
SPLIT = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def of_dtensors(
    kind: str, steps: int | None, policy: dict | None, defers: bool = False, splits: bool = False
) -> None:
    """Stages over two ranks. FSDP2 reduces each parameter once per step, or once per window if it `defers`.

    Args:
        policy: FSDP2's mixed-precision policy. None: without FSDP2.
        splits: whether stages are tensor parallel.
    """
    shape = (2, 1 if policy is None else 2, 2 if splits else 1)
    mesh = mesh_of(shape, ("pipeline", "data", "tensor"))
    group, number = mesh.get_group("pipeline"), mesh.get_local_rank("data")
    rank, net = dist.get_rank(group), parts(2 * ALL_STAGES[kind])
    twin, mine = copy.deepcopy(net), mine_of(kind, rank, 2)
    own = nn.ModuleList(net[i] for i in mine)
    for stage in own:
        if splits:
            parallelize_module(stage, mesh["tensor"], SPLIT)
        if policy is not None:
            fully_shard(stage, mesh=mesh["data"], mp_policy=MixedPrecisionPolicy(**policy))
    optimizer = wrap(own, steps, model=own, max_grad_norm=1e9)
    schedule = scheduled(kind, net, mine, group=group)
    optimizer.attach(schedule)
    each, compute = steps or 2, (policy or {}).get("param_dtype", torch.float32)
    most = 1e-5 if compute is torch.float32 else 3e-2
    replicas = 1 if policy is None else 2
    wanted = one_process(twin, range(each), replicas)
    wanted = wanted if steps else [each * gradient for gradient in wanted]
    known = {id(p): gradient for p, gradient in zip(twin.parameters(), wanted, strict=True)}
    for index in range(each):
        counting = mock.patch.object(_fsdp_param_group, "foreach_reduce", wraps=foreach_reduce)
        with counting as reduced, optimizer.accumulate(own) if defers else contextlib.nullcontext():
            run_schedule(schedule, index, compute, number)
        kept = policy is None or (defers and index < each - 1)
        assert reduced.call_count == (0 if kept else len(mine))
        if index == each - 1:
            for i in mine:
                for p, q in zip(net[i].parameters(), twin[i].parameters(), strict=True):
                    assert_close(p.grad.full_tensor(), known[id(q)], most, (kind, i))
        if steps or index == each - 1:
            optimizer.step()
    norm = torch.stack([gradient.norm() for gradient in wanted]).norm()
    assert_close(optimizer.grad_norm, norm, most, "norm")
    if policy is not None:
        table = optimizer.explain()
        assert "unsharded, reduced by FSDP2" in table
        assert ("at W of the schedule" in table) == (kind in ZERO_BUBBLE)


@pytest.mark.sweep(pairs=False)
@pytest.mark.parametrize("kind", ["ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("policy", [{}, MIXED], ids=["float32", "bfloat16"])
def test_pipelines_beside_fsdp(kind, steps, policy):
    on_ranks(4, of_dtensors, kind, steps, policy)


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_fsdp_reduces_once_in_a_window_where_it_is_told_to(kind):
    on_ranks(4, of_dtensors, kind, 3, {}, True)
    on_ranks(4, of_dtensors, kind, 2, MIXED, True)


@pytest.mark.sweep(pairs=False)
@pytest.mark.parametrize("kind", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
@pytest.mark.parametrize("steps", [None, 2])
def test_pipelines_of_tensor_parallel_stages(kind, steps):
    on_ranks(4, of_dtensors, kind, steps, None, False, True)


@pytest.mark.parametrize("policy", [MIXED, {}] if sweeps.FULL else [MIXED])
def test_pipeline_with_fsdp2_and_tensor_parallelism(policy):
    """On eight ranks, FSDP2 reduces each part of a parameter once per window."""
    on_ranks(8, of_dtensors, "ScheduleZBVZeroBubble", 2, policy, True, True)
