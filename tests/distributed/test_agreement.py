"""Ranks start from the same parameters, and mismatched reductions are errors."""

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from broken_backends import self_tests
from ranks import on_each_rank, on_ranks
from ranks_setting import assert_ranks_equal
from ranks_setting import given as given_to
from torch import nn

import fusedacc
from fusedacc.kernels import library, registry, selftest

LOW: dict[str, Any] = {"accumulate_dtype": torch.bfloat16}
#: Options of the two ranks, and a part of the error message.
APART: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "rounding": (LOW | {"rounding": "stochastic", "seed": 5}, LOW, "'stochastic'", "'nearest'"),
    "accumulate_dtype": ({}, LOW, "torch.float32", "torch.bfloat16"),
    "reduce_dtype": ({}, {"reduce_dtype": torch.bfloat16}, "None", "torch.bfloat16"),
    "parameters": ({}, {"leaves": 1}, "2 with 15 elements", "1 with 12 elements"),
    "gradient_accumulation_steps": ({}, {"gradient_accumulation_steps": 3}, "2", "3"),
    "reduction": ({"reduction": "mean"}, {"reduction": "sum"}, "'mean'", "'sum'"),
    "max_grad_norm": ({}, {"max_grad_norm": 0.01}, "None", "0.01"),
    "norm_type": ({"norm_type": 2.0}, {"norm_type": torch.inf}, "2.0", "inf"),
    "skip_nonfinite": ({}, {"skip_nonfinite": True}, "False", "True"),
    "master_weights": ({}, {"master_weights": True}, "False", "True"),
}


def made_apart() -> list[torch.Tensor]:
    """Return the parameters that a rank made, and its parameters after the wrapper was made."""
    torch.manual_seed(dist.get_rank())
    net = nn.Linear(4, 3)
    before = net.weight.detach().clone()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    fusedacc.AccumulatingOptimizer(inner, 2, data_parallel=dist.group.WORLD).close()
    assert_ranks_equal(net)
    return [before, net.weight.detach()]


def test_every_rank_gets_the_parameters_of_the_first():
    (first, of_first), (second, of_second) = on_ranks(2, made_apart)
    assert not torch.equal(first, second)
    assert torch.equal(first, of_first)
    assert torch.equal(first, of_second)


@on_each_rank(3)
def test_reductions_that_do_not_belong_together_are_an_error_on_every_rank() -> None:
    """Each rank has made one more reduction than the one before, so rank 1 has made the mean of all."""
    net = nn.Linear(4, 3)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 1, data_parallel=dist.group.WORLD)
    optimizer._accumulation.ranks.parallel.reducer._number += dist.get_rank()
    with pytest.raises(RuntimeError, match="not at the same reduction"):
        net(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"discard\(\)"):
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("ddp", name) for name in APART] + [("group", name) for name in ("rounding", "max_grad_norm")],
)
@on_each_rank(2)
def test_ranks_are_given_the_same(name: str, kind: str) -> None:
    """Every rank raises an error that names the difference, and a later wrapper trains."""
    *given, first, second = APART[name]
    options, said = dict(given[dist.get_rank()]), (first, second)[dist.get_rank()]
    net = nn.Linear(4, 3)
    torch.nn.init.constant_(net.weight, float(dist.get_rank()))
    called, parallel = given_to(net, kind)
    before, params = net.weight.detach().clone(), list(net.parameters())
    inner = torch.optim.SGD(params[: options.pop("leaves", 2)], lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, **{"gradient_accumulation_steps": 2} | options)
    seed = optimizer._accumulators.noise.own_seed
    with pytest.raises(ValueError, match=rf"differ in {name}: rank {dist.get_rank()} has {said}; allowed"):
        optimizer.attach(parallel)
    assert torch.equal(net.weight, before)
    assert optimizer._accumulators.noise.own_seed == seed
    optimizer.close()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.1), 1, data_parallel=parallel)
    called(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
    optimizer.step()
    assert optimizer.num_updates == 1
    assert_ranks_equal(net)


def fails_on_one_rank(folder: Path, backend: str) -> tuple[str, str]:
    """Return the backend and the warning or error. The first backend fails its self-test on rank 1."""
    net = nn.Linear(4, 3)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(self_tests(folder / str(dist.get_rank()), "cpu"))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        optimizer = fusedacc.AccumulatingOptimizer(inner, 2, backend=backend)
        if dist.get_rank() == 1:  # as the self-test on the rank's own GPU would have stored
            selftest.exclude("cpu", net.weight.device, "addition: 3 of 9 elements are wrong")
        try:
            optimizer.attach(dist.group.WORLD)
        except RuntimeError as error:
            return "", str(error)
        chosen = registry.select(net.weight.device, torch.float32, torch.float32)
        return chosen.backend.name, " ".join(str(each.message) for each in caught)


@pytest.mark.skipif(library.load_error() is not None, reason=f"no backend but eager: {library.load_error()}")
def test_a_backend_that_fails_on_one_rank(tmp_path):
    """With backend="auto" no rank uses it. If the user has chosen it, every rank raises an error."""
    (first, said), (second, _) = on_ranks(2, fails_on_one_rank, tmp_path / "auto", "auto")
    assert first == second == "eager"
    assert "the self-test of 'cpu' has failed on cpu" in said
    assert "on rank 1: addition: 3 of 9 elements are wrong. Backend 'eager' is used instead" in said
    for _, said in on_ranks(2, fails_on_one_rank, tmp_path / "cpu", "cpu"):
        assert "backend='cpu' cannot run float32 into float32 on cpu: its self-test has failed: " in said
