"""torch's optimizers with `capturable=True` and `differentiable=True`; `test_optim_db.py` has the others."""

import inspect
from collections.abc import Callable

import pytest
import torch
from loops import identical, network

import fusedacc

K, UPDATES = 4, 6
KINDS = {name: kind for name, kind in inspect.getmembers(torch.optim, inspect.isclass) if name != "Optimizer"}


def train(wrap: Callable | None, steps: int | None, name: str, options: dict, device: str = "cpu"):
    """Return weights and inner state after some updates. If `wrap` is None, use the bare optimizer."""
    model = network().to(device)
    inner = optimizer = KINDS[name](model.parameters(), **options)
    if wrap is not None:
        optimizer = wrap(inner, steps)
    for seed in range(K * UPDATES):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(device)
        (model(x).pow(2).mean() / (K if steps is None else 1)).backward()
        if steps is not None or (seed + 1) % K == 0:
            optimizer.step(), optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], inner.state_dict()["state"]


CAPTURABLE = [name for name, kind in KINDS.items() if "capturable" in inspect.signature(kind).parameters]


@pytest.mark.cuda
@pytest.mark.parametrize("steps", [None, K])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", CAPTURABLE)
def test_capturable_equals_stock(name, foreach, steps):
    options = {"lr": 0.01, "capturable": True, "foreach": foreach}
    wanted = train(None, None, name, options, "cuda")
    assert identical(train(fusedacc.AccumulatingOptimizer, steps, name, options, "cuda"), wanted)


DIFFERENTIABLE = [
    name for name, kind in KINDS.items() if "differentiable" in inspect.signature(kind).parameters
]


def unrolled(wrapped: bool, steps: int | None, name: str, leaf: bool, graph: bool) -> list:
    """Differentiate through updates, which torch allows for non-leaves and frozen leaves.

    Returns:
        The parameter, and its derivatives by its source and by the factor of its gradients.
    """
    source = torch.linspace(1.0, 2.0, 5, requires_grad=True)
    factor = torch.full((5,), 0.5, requires_grad=True)
    param = source.detach().clone() if leaf else source * 1.0
    optimizer = KINDS[name]([param], lr=0.1, differentiable=True)
    if wrapped:
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, steps)
    for index in range(3):
        gradient = factor * (index + 1)
        param.grad = gradient if graph else gradient.detach()
        optimizer.step()
        param.grad = None
    if param.requires_grad and name == "SGD":  # the others overwrite state that their own graph needs
        param.sum().backward()
    return [param.detach(), source.grad, factor.grad]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
class TestDifferentiable:
    """`differentiable=True`: updates with a graph."""

    @pytest.mark.parametrize("leaf", [True, False])
    @pytest.mark.parametrize("steps", [None, 1])
    def test_updates_with_plain_gradients_equal_stock(self, steps, leaf):
        for name in DIFFERENTIABLE:
            wanted, found = (unrolled(wrapped, steps, name, leaf, graph=False) for wrapped in (False, True))
            for mine, its in zip(found, wanted, strict=True):
                assert (mine is None and its is None) or torch.equal(mine, its), name

    @pytest.mark.parametrize("leaf", [True, False])
    def test_a_manual_loop_differentiates_through_the_gradients(self, leaf):
        wanted, found = (unrolled(wrapped, None, "SGD", leaf, graph=True) for wrapped in (False, True))
        assert torch.equal(found[2], wanted[2])
        assert wanted[2].count_nonzero()
        for mine, its in zip(found[:2], wanted[:2], strict=True):
            assert (mine is None and its is None) or torch.equal(mine, its)

    def test_a_counted_loop_refuses_gradients_with_a_graph(self):
        with pytest.raises(RuntimeError, match=r"differentiable=True.*manual loop"):
            unrolled(True, 1, "SGD", True, graph=True)

    @pytest.mark.parametrize("steps", [None, 1])
    def test_a_backward_through_a_non_leaf_parameter_works_as_in_stock(self, steps):
        source = torch.ones(3, requires_grad=True)
        param = source * 2.0
        inner = torch.optim.SGD([param], lr=0.1, differentiable=True)
        optimizer = fusedacc.AccumulatingOptimizer(inner, steps)
        assert "not a leaf" in optimizer.explain()
        (param * 3.0).sum().backward()
        assert torch.equal(source.grad, torch.full((3,), 6.0))
        optimizer.step()
        assert optimizer.micro_step == 0

    @pytest.mark.parametrize("steps", [1, 2])
    def test_a_non_leaf_parameter_with_a_gradient_can_be_cleared_and_loaded(self, steps):
        param = torch.ones(3, requires_grad=True).clone()
        param.retain_grad()
        inner = torch.optim.SGD([param], lr=0.1, differentiable=True)
        optimizer = fusedacc.AccumulatingOptimizer(inner, steps)
        (param * 3.0).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad(set_to_none=False)
        assert param.grad is None or not param.grad.any()
