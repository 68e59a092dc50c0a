"""If torch lacks a private name, PyTorch does the work, and `explain()` gives the reason."""

import contextlib

import pytest
import torch
from fsdp_setting import alone, loss_of, sharded, whole, wrap
from pipelines_setting import STAGES, assert_gradients, one_process, parts, run_schedule, scheduled
from pipelines_setting import wrap as wrap_stages
from ranks_setting import assert_close, lacking
from torch import nn

from fusedacc.distributed import pipelines
from fusedacc.kernels import torch_private

NAMES = [(kind, name) for kind, names in torch_private.ATTRIBUTES.items() for name in names]
K = 2
pytestmark = pytest.mark.usefixtures("group")


def names_of(*kinds: str) -> list:
    return [pytest.param(name, id=name) for kind, name in NAMES if kind.startswith(kinds)]


@pytest.fixture
def without():
    """Hide an attribute of objects from `torch_private`."""
    with contextlib.ExitStack() as hidden:
        yield lambda names: hidden.enter_context(lacking(torch_private, *names.split(" or ")))


def of_windows(model: nn.Module, counted: bool) -> str:
    """Train for two windows, compare with one process, and return the table of `explain()`."""
    optimizer = wrap(model, K if counted else None, model=model)
    reference, plain, seen = alone(0, 0)[0], 1 / K if counted else 1.0, []
    optimizer.optimizer.register_step_pre_hook(
        lambda *_: seen.append([whole(p.grad).clone() for p in model.parameters()])
    )
    for window in range(2):
        reference.load_state_dict({name: whole(p).detach() for name, p in model.named_parameters()})
        reference.zero_grad()
        for index in range(window * K, window * K + K):
            (loss_of(reference, index, 0) * plain).backward()
            if counted:
                with optimizer.accumulate(model):
                    loss_of(model, index).backward()
            else:
                model.set_requires_gradient_sync(index % K == K - 1)
                loss_of(model, index).backward()
            if counted and index % K < K - 1:
                optimizer.step(), optimizer.zero_grad()
        optimizer.step(), optimizer.zero_grad()
        low = next(model.parameters()).dtype != torch.float32
        for gradient, q in zip(seen[-1], reference.parameters(), strict=True):
            assert_close(gradient, q.grad, 3e-2 if low else 1e-6, "gradient")
    assert optimizer.num_updates == 2
    return optimizer.explain()


@pytest.mark.sweep(pairs=False)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("name", names_of("FSDP2", "unsharded FSDP2"))
def test_fsdp2_is_left_to_itself(name, counted, without):
    model = sharded()
    without(name)
    table = of_windows(model, counted)
    assert f"({torch.__version__}) has no " in table
    assert f"attribute {name}" in table


def test_bfloat16_shards_are_left_to_fsdp2(without):
    model = sharded(torch.bfloat16)
    without("fsdp_params")
    assert "attribute fsdp_params" in of_windows(model, True)


@pytest.mark.parametrize("reduction", ["weighted", "normalized"])
def test_weights_need_fsdp2s_names(reduction, without):
    model = sharded()
    without("mesh_info")
    with pytest.raises(ValueError, match=f"reduction={reduction!r} does .* attribute mesh_info, so weights"):
        wrap(model, K, reduction=reduction)


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B"])
@pytest.mark.parametrize("name", names_of("pipeline"))
def test_a_schedule_that_cannot_be_attached_is_counted(kind, name, without):
    net = parts(STAGES[kind])
    schedule, optimizer = scheduled(kind, net), wrap_stages(net, K, model=net)
    without(name)
    with pytest.raises(TypeError, match=rf"has no pipeline (schedule|stage) attribute {name}; allowed: "):
        optimizer.attach(schedule)
    wanted = one_process(net, range(K))
    for index in range(K):
        run_schedule(schedule, index)
        if index == K - 1:
            assert_gradients(net, wanted)
        optimizer.step()


@pytest.mark.parametrize("name", names_of("torch.distributed.pipelining"))
def test_schedules_that_cannot_be_seen(name, without):
    assert not pipelines._replaced
    without(name)
    net = parts(1)
    with pytest.warns(UserWarning, match=f"attribute {name}: fusedacc cannot see"):
        wrap_stages(net, K)
