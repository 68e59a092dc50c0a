"""Pipeline schedules: one `schedule.step()` counts as one backward pass, whatever it does to p.grad."""

import contextlib
import gc
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import pipelines_setting
import pytest
import torch
import torch.distributed as dist
from pipelines_setting import (
    ALL_STAGES,
    CHUNKS,
    STAGES,
    assert_gradients,
    data,
    loss_of,
    one_process,
    parts,
    run_schedule,
    scheduled,
    wrap,
)
from ranks import on_each_rank, on_ranks
from ranks_setting import LOW, assert_close, assert_ranks_equal
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

import fusedacc
from fusedacc.distributed import pipelines
from fusedacc.kernels import native_module, torch_state


@contextlib.contextmanager
def counted_reductions(optimizer: fusedacc.AccumulatingOptimizer):
    found: list[int] = []
    optimizer._accumulation.ranks.parallel.reducer.announce = lambda: found.append(1)
    yield found


@contextlib.contextmanager
def imported_after(
    make: Callable[[], fusedacc.AccumulatingOptimizer],
) -> Iterator[fusedacc.AccumulatingOptimizer]:
    """Make an optimizer before torch's schedules are imported. `scheduled` uses the new import."""
    package = torch.distributed.pipelining
    with mock.patch.dict(sys.modules), mock.patch.object(package, "schedules"):
        del sys.modules[schedules.__name__]
        optimizer = make()
        with mock.patch.object(pipelines_setting, "schedules", importlib.import_module(schedules.__name__)):
            yield optimizer
            optimizer.close()


def attached_traits(attaches, **parameters):
    """Each pair of values occurs with an attached schedule and without."""
    return {name: (attaches, value) for name, value in parameters.items()}


@pytest.mark.usefixtures("group")
class TestOnOneRank:
    @pytest.mark.sweep(of=attached_traits)
    @pytest.mark.parametrize("kind", ALL_STAGES)
    @pytest.mark.parametrize("steps", [None, 1, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, LOW], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("with_ranks", [False, True])
    @pytest.mark.parametrize("scales", [True, False])
    @pytest.mark.parametrize("in_place", [True, False])
    @pytest.mark.parametrize("attaches", [True, False])
    def test_gradients_are_those_of_one_process(
        self, kind, steps, dtype, with_ranks, scales, in_place, attaches
    ):
        """In a manual loop with an attached schedule, two `schedule.step()`s add up."""
        net, each = parts(ALL_STAGES[kind], dtype), steps or (2 if attaches else 1)
        options = {"data_parallel": dist.group.WORLD} if with_ranks else {}
        optimizer, seen = wrap(net, steps, model=net if in_place else None, **options), []
        optimizer.optimizer.register_step_pre_hook(
            lambda inner, *_: seen.extend(p.grad.clone() for p in net.parameters())
        )
        schedule = scheduled(kind, net, scale_grads=scales)
        if attaches:
            optimizer.attach(schedule)
        with counted_reductions(optimizer) if with_ranks else contextlib.nullcontext([]) as reductions:
            for window in range(2):
                indices = range(window * each, (window + 1) * each)
                factor = (1 if steps else each) * (1 if scales else CHUNKS)
                wanted = [factor * gradient for gradient in one_process(net, indices)]
                for index in indices:
                    run_schedule(schedule, index, dtype)
                    if attaches and (steps is None or index == indices[-1]):
                        assert all(p.grad.dtype is torch.float32 for p in net.parameters())
                    if index == indices[-1]:
                        assert_gradients(net, wanted)
                        shown = [p.grad.clone() for p in net.parameters()]
                    elif steps and attaches:
                        assert all(p.grad is None for p in net.parameters())
                    if steps or index == indices[-1]:
                        optimizer.step(), optimizer.zero_grad()
                for gradient, exact in zip(seen[-len(shown) :], shown, strict=True):
                    assert torch.equal(gradient, exact.to(dtype))
        assert optimizer.num_updates == 2
        assert len(reductions) == ((2 if steps else 2 * each) if with_ranks else 0)

    def test_several_steps_in_a_micro_batch_add_up(self):
        """Neither the second step nor a backward between the two divides the gradients of the first."""
        net = parts(1)
        optimizer, schedule = wrap(net, 2), scheduled("ScheduleGPipe", net)
        wanted = [4 / 2 * gradient for gradient in one_process(net, range(4))]
        for micro_batch in ((0, 1, 2), (3,)):
            for index in micro_batch:
                if index == 1:
                    x, y = data(index)
                    loss_of(net[0](x), y).backward()
                else:
                    run_schedule(schedule, index)
            optimizer.step()
        assert_gradients(net, wanted)

    def test_two_optimizers_share_a_schedule(self):
        net = parts(2)
        both = [wrap(part, 2) for part in net]
        schedule = scheduled("ScheduleZBVZeroBubble", net)
        wanted = one_process(net, range(2))
        for index in range(2):
            run_schedule(schedule, index)
            if index:
                assert_gradients(net, wanted)
            for optimizer in both:
                optimizer.step()
        assert [optimizer.num_updates for optimizer in both] == [1, 1]

    @pytest.mark.parametrize("attaches", [True, False])
    def test_weights_of_micro_batches(self, attaches):
        net = parts(2)
        optimizer, schedule = wrap(net, 2, reduction="weighted"), scheduled("ScheduleZBVZeroBubble", net)
        if attaches:
            optimizer.attach(schedule)
        first, second = one_process(net, [0]), one_process(net, [1])
        forwards = []
        handle = net[0].register_forward_hook(lambda *_: forwards.append(1))
        with pytest.raises(RuntimeError, match="needs a weight before the backward"):
            run_schedule(schedule, 0)
        assert forwards == [], "before anything is sent"
        handle.remove()
        for index, weight in ((0, 3.0), (1, 1.0)):
            with optimizer.accumulate(weight=weight):
                run_schedule(schedule, index)
            if index:
                assert_gradients(net, [(3 * a + b) / 4 for a, b in zip(first, second, strict=True)])
            optimizer.step()

    @pytest.mark.parametrize("attaches", [True, False])
    def test_eval_is_no_micro_batch(self, attaches):
        net = parts(1)
        optimizer, schedule = wrap(net, 2), scheduled("ScheduleGPipe", net)
        if attaches:
            optimizer.attach(schedule)
        wanted = one_process(net, range(2))
        for index in range(2):
            x, y = data(index)
            assert_close(schedule.eval(x, target=y), net[0](x), 1e-6, "output")
            assert optimizer.has_partial_window == bool(index)
            run_schedule(schedule, index)
            assert optimizer.micro_step == index
            if index:
                assert_gradients(net, wanted)
            optimizer.step()
        assert optimizer.num_updates == 1

    @pytest.mark.parametrize(
        ("kind", "steps", "attaches"),
        [
            ("ScheduleGPipe", 2, False),
            ("ScheduleZBVZeroBubble", 2, False),
            ("ScheduleZBVZeroBubble", 2, True),
            ("ScheduleZBVZeroBubble", None, True),
        ],
    )
    def test_what_is_ignored_does_not_count(self, kind, steps, attaches):
        net = parts(STAGES[kind])
        optimizer, schedule = wrap(net, steps), scheduled(kind, net)
        if attaches:
            optimizer.attach(schedule)
        wanted = one_process(net, (0, 2))
        for index in range(3):
            if index == 1:
                with optimizer.ignore():
                    run_schedule(schedule, index)
                    assert_gradients(net, one_process(net, [1]))
            else:
                run_schedule(schedule, index)
                if steps and index == 0:
                    optimizer.step()
        assert_gradients(net, wanted if steps else [2 * gradient for gradient in wanted])

    @pytest.mark.parametrize(
        ("kind", "steps", "attaches"),
        [
            ("Schedule1F1B", 1, False),
            *itertools.product(["Schedule1F1B", "ScheduleZBVZeroBubble"], [None, 2], [True]),
        ],
    )
    def test_an_exception_taints_the_window(self, kind, steps, attaches):
        """Raise in a backward; with an attached schedule, in a loss function between backwards."""

        def fail_in_the_third() -> None:
            if len(calls) == 2:
                raise ArithmeticError("in the third micro-batch")

        def failing(output: Tensor, wanted: Tensor) -> Tensor:
            output.register_hook(lambda gradient: None if attaches else fail_in_the_third())
            output.register_hook(lambda gradient: calls.append(1))
            if attaches:
                fail_in_the_third()
            return loss_of(output, wanted)

        net, calls = parts(STAGES[kind]), []
        optimizer = wrap(net, steps, model=net)
        schedule = scheduled(kind, net, loss_fn=failing)
        if attaches:
            optimizer.attach(schedule)
        with pytest.raises(ArithmeticError if attaches else RuntimeError):
            run_schedule(schedule, 0)
        with pytest.raises(RuntimeError, match=r"discard\(\)"):
            optimizer.step()
        optimizer.discard()
        assert all(capture.postponed is None for capture in optimizer._pipeline_steps.captures())
        optimizer.close()
        optimizer, schedule = wrap(net, steps, model=net), scheduled(kind, net)
        if attaches:
            optimizer.attach(schedule)
        wanted = one_process(net, range(steps or 1))
        for index in range(steps or 1):
            run_schedule(schedule, index)
            if index + 1 < (steps or 1):
                optimizer.step()
        assert_gradients(net, wanted)

    def test_without_native_code_any_process_group_is_a_reducer(self, monkeypatch):
        monkeypatch.setattr(native_module, "has_post_hook", lambda leaf: True)
        monkeypatch.setenv("FUSEDACC_ENGINE", "0")
        self.test_gradients_are_those_of_one_process("ScheduleGPipe", 2, LOW, False, True, False, False)

    @pytest.mark.parametrize("steps", [1, 2])
    def test_schedules_that_are_imported_after_the_optimizer_was_made(self, steps):
        net = parts(1, LOW)
        with imported_after(lambda: wrap(net, steps)) as optimizer:
            schedule, seen = scheduled("ScheduleGPipe", net), []
            optimizer.optimizer.register_step_pre_hook(
                lambda inner, *_: seen.extend(p.grad.clone() for p in net.parameters())
            )
            wanted = one_process(net, range(steps))
            for index in range(steps):
                run_schedule(schedule, index, LOW)
                if index:
                    assert_gradients(net, wanted)
                optimizer.step()
        for gradient, each in zip(seen, wanted, strict=True):
            assert_close(gradient, each, 3e-2, steps)

    @pytest.mark.parametrize("has_schedule", [False, True])
    def test_an_import_and_a_schedule_that_does_not_run_change_nothing(self, has_schedule):
        net = parts(1)
        with imported_after(lambda: wrap(net, 1, data_parallel=dist.group.WORLD)) as optimizer:
            schedule = scheduled("ScheduleGPipe", net) if has_schedule else None
            x, y = data(0)
            with counted_reductions(optimizer) as reductions:
                loss_of(net[0](x), y).backward()
                assert len(reductions) == 1
            del schedule

    @pytest.mark.parametrize("closes", [True, False])
    def test_torchs_classes_are_given_back_with_the_last_wrapper(self, closes):
        kinds = schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti
        before = [kind.step for kind in kinds]
        first, second = wrap(parts(1), 1), wrap(parts(1), 1)
        first.close()
        assert all(kind.step is not step for kind, step in zip(kinds, before, strict=True))
        if closes:
            second.close()
        del second
        gc.collect()
        assert [kind.step for kind in kinds] == before

    @pytest.mark.parametrize("steps", [None, 2])
    def test_old_torch_cannot_split_custom_functions(self, steps, monkeypatch):
        """A schedule with W that is not attached then uses PyTorch's forward, and `explain()` says why."""
        monkeypatch.setattr(pipelines, "_nodes_have_metadata", lambda: False)
        net = parts(2)
        optimizer, schedule = wrap(net, steps, model=net), scheduled("ScheduleZBVZeroBubble", net)
        run_schedule(schedule, 0)
        assert "model= leaves gradients to autograd in a ScheduleZBVZeroBubble: " in optimizer.explain()
        assert not torch_state.no_python_functions
        if steps is None:
            assert_gradients(net, one_process(net, [0]))
        optimizer.discard()
        optimizer.attach(schedule)
        run_schedule(schedule, 1)
        assert "model= leaves" not in optimizer.explain()

    def test_explain_says_who_adds(self):
        net = parts(1)
        optimizer, schedule = wrap(net, 2, data_parallel=dist.group.WORLD), scheduled("ScheduleGPipe", net)
        assert "pipeline schedule" not in optimizer.explain()
        run_schedule(schedule, 0)
        assert "trained by a pipeline schedule" in optimizer.explain()


# Two ranks


def two_stages(kind: str, steps: int, dtype: torch.dtype) -> None:
    rank, many = dist.get_rank(), STAGES[kind] > 1
    net = parts(4 if many else 2, dtype)
    mine = ((rank, 3 - rank) if kind == "ScheduleZBVZeroBubble" else (rank, rank + 2)) if many else (rank,)
    own = nn.ModuleList(net[i] for i in mine)
    optimizer, schedule = wrap(own, steps), scheduled(kind, net, mine)
    for window in range(2):
        held = [None] * 2
        dist.all_gather_object(held, {i: net[i].state_dict() for i in mine})
        for state in held:
            for i, values in state.items():
                net[i].load_state_dict(values)
        indices = range(window * steps, (window + 1) * steps)
        wanted = one_process(net, indices)
        of_part = {id(p): gradient for p, gradient in zip(net.parameters(), wanted, strict=True)}
        for index in indices:
            run_schedule(schedule, index, dtype)
            if index == indices[-1]:
                assert_gradients(own, [of_part[id(p)] for p in own.parameters()], (kind, window))
            optimizer.step(), optimizer.zero_grad()


@pytest.mark.parametrize("kind", STAGES)
def test_stages_on_two_ranks(kind):
    on_ranks(2, two_stages, kind, 2, torch.float32)
    on_ranks(2, two_stages, kind, 1, LOW)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
@pytest.mark.parametrize("steps", [None, 1, 2])
@pytest.mark.parametrize("of_ddp", [False, True])
@on_each_rank(2)
def test_replicas_of_a_pipeline(kind: str, steps: int | None, of_ddp: bool) -> None:
    """Each rank has the whole pipeline, and the gradients are reduced over both ranks.

    Args:
        of_ddp: whether each stage is a DistributedDataParallel with a separate optimizer.
    """
    rank, net = dist.get_rank(), parts(STAGES[kind])
    alone = [dist.new_group([other]) for other in range(2)][rank]
    stages, optimizers = net, []
    if of_ddp:
        stages = nn.ModuleList(DistributedDataParallel(part) for part in net)
        optimizers = [wrap(stage, steps, data_parallel=stage) for stage in stages]
    else:
        optimizers = [wrap(net, steps, data_parallel=dist.group.WORLD)]
    schedule, each = scheduled(kind, stages, group=alone), steps or 1
    for window in range(2):
        indices = range(window * each, (window + 1) * each)
        wanted = one_process(net, indices, ranks=2)
        for index in indices:
            run_schedule(schedule, index, rank=rank)
            if index == indices[-1]:
                assert_gradients(net, wanted, (kind, window))
            for optimizer in optimizers:
                optimizer.step(), optimizer.zero_grad()
        assert_ranks_equal(net)
