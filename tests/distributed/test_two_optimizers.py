"""One optimizer reduces a DDP, and another optimizer may update the DDP's other parameters."""

import pytest
import torch
import torch.distributed as dist
from loops import network
from ranks import on_each_rank
from ranks_setting import assert_ranks_equal, error_of, small_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedacc

#: What happens to the other parameters, and whether that is an error.
OTHERS = {
    "of a bare optimizer": True,
    "with a closure": True,
    "of a wrapper without ranks": True,
    "of a wrapper that is closed": True,
    "in no optimizer": False,
    "wrapped with it": False,
    "wrapped with the group": False,
    "frozen": False,
    "ignored": False,
}


@pytest.mark.parametrize("others", OTHERS)
@on_each_rank(2)
def test_no_optimizer_updates_what_nothing_has_reduced(others: str) -> None:
    model = network()
    first, second = (list(layer.parameters()) for layer in (model[0], model[2]))
    if others == "ignored":
        names = ["2.weight", "2.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    parallel = DistributedDataParallel(model)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(first), 2, data_parallel=parallel)
    if others == "frozen":
        model[2].requires_grad_(False)
    make = torch.optim.LBFGS if others == "with a closure" else torch.optim.SGD
    given = {"wrapped with it": parallel, "wrapped with the group": dist.group.WORLD}.get(others)
    other = make([nn.Parameter(torch.zeros(1))] if others == "in no optimizer" else second)
    if given is not None or "wrapper" in others:
        # A counted loop without ranks already raises in its backward.
        other = fusedacc.AccumulatingOptimizer(other, None if given is None else 2, data_parallel=given)
    if others == "of a wrapper that is closed":
        other.attach(parallel)
        other.close()

    def act() -> None:
        if others == "with a closure":
            other.step(lambda: small_loss(parallel, 0).backward())
        for index in range(2):
            small_loss(parallel, index).backward()
            optimizer.step(), other.step()

    if OTHERS[others]:
        said = error_of(RuntimeError, act)
        assert "would update parameters '2.weight', '2.bias' with" in said, said
    else:
        act()
    if others != "ignored":
        assert_ranks_equal(model, others)
    for each in (optimizer, other):
        if isinstance(each, fusedacc.AccumulatingOptimizer):
            each.close()
    small_loss(parallel, 0).backward()
    torch.optim.SGD(second).step()
