"""`model=`: every use of autograd gives the same result as without it."""

import copy

import pytest
import torch
from loops import assert_same_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedacc
from fusedacc.kernels import native_module


class Net(nn.Module):
    """Map tokens to scores. The head may share the embedding's weight."""

    def __init__(self, tied: bool = True, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embedding = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def block(self, x):
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for _ in range(2):  # the same weights twice
            if self.how:
                x = checkpoint(self.block, x, use_reentrant=self.how == "reentrant")
            else:
                x = self.block(x)
        return self.head(x)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed: int = 0):
    return nn.functional.cross_entropy(model(tokens(seed)).flatten(0, 1), tokens(seed + 100).flatten())


def wrap(model, steps=None, **options):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return fusedacc.AccumulatingOptimizer(inner, steps, model=model, **options)


def pair(steps=None, **options):
    """Return a model whose modules accumulate, its wrapper, and the same model for plain PyTorch."""
    model = Net(**options)
    twin = copy.deepcopy(model)
    return model, wrap(model, steps), twin


def gradient_penalty(net) -> None:
    x = torch.linspace(-1, 1, 24).view(4, 6)
    point = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net.block(point).sum(), point, create_graph=True)
    (slope.square().sum() + net.block(x).sum()).backward()


def penalty_on_a_second_derivative(net) -> None:
    point = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
    (slope,) = torch.autograd.grad(net.block(point).square().sum(), point, create_graph=True)
    (curve,) = torch.autograd.grad(slope.square().sum(), point, create_graph=True)
    curve.square().sum().backward()


def frozen_and_trained_again(net) -> None:
    for trained in (False, True):
        net.up.weight.requires_grad_(trained)
        loss_of(net).backward()


def two_backwards_of_one_graph(net) -> None:
    loss = loss_of(net)
    loss.backward(retain_graph=True)
    loss.backward()


USES = {
    "three backwards": lambda net: [loss_of(net, seed).backward() for seed in range(3)],
    "gradient penalty": gradient_penalty,
    "penalty on a second derivative": penalty_on_a_second_derivative,
    "second derivatives": lambda net: sum(
        gradient.square().sum()
        for gradient in torch.autograd.grad(loss_of(net), list(net.parameters()), create_graph=True)
    ).backward(),
    "frozen and trained again": frozen_and_trained_again,
    "two backwards of one graph": two_backwards_of_one_graph,
    "some inputs": lambda net: loss_of(net).backward(inputs=[net.up.weight, net.down.bias]),
}


@pytest.mark.parametrize("how", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("use", USES)
def test_gradients_equal_plain_pytorchs(use, tied, how):
    if how == "reentrant" and use in ("second derivatives", "some inputs"):
        pytest.skip("torch refuses autograd.grad and inputs= with a re-entrant checkpoint")
    model, _optimizer, twin = pair(tied=tied, how=how)
    for net in (model, twin):
        USES[use](net)
    assert_same_gradients(model, twin)


def test_autograd_grad_by_the_weight_returns_a_plain_gradient_and_adds_nothing():
    model, _optimizer, twin = pair()
    for net in (model, twin):
        loss_of(net).backward()
    for weights in (["up.weight"], ["embedding.weight", "down.weight"]):
        ours = torch.autograd.grad(loss_of(model, 1), [model.get_parameter(name) for name in weights])
        theirs = torch.autograd.grad(loss_of(twin, 1), [twin.get_parameter(name) for name in weights])
        for got, want in zip(ours, theirs, strict=True):
            assert type(got) is torch.Tensor
            torch.testing.assert_close(got, want)
    assert_same_gradients(model, twin)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")  # torch warns once per process
def test_backward_with_create_graph():
    model, _optimizer, twin = pair(tied=False)
    loss_of(model).backward(create_graph=True)
    loss_of(twin).backward()
    assert_same_gradients(model, twin)
    assert model.up.weight.grad.grad_fn is not None
    for net in (model, twin):
        net.zero_grad()


def test_a_hook_on_the_weight_sees_and_changes_its_gradient():
    model, optimizer, twin = pair()
    seen = []
    for net in (model, twin):
        net.up.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
        loss_of(net).backward()
    torch.testing.assert_close(seen[0], seen[1])
    assert_same_gradients(model, twin)
    row = next(line for line in optimizer.explain().splitlines() if line.startswith("up.weight "))
    assert " multi_tensor " in row
    assert "a hook on the weight" in optimizer.explain()


@pytest.mark.parametrize("hooks", ["", "0"])  # native and Python hooks
@pytest.mark.parametrize("late", [False, True])
def test_a_post_accumulate_hook_finds_the_gradient(late, hooks, monkeypatch):
    """Register the hook before the forward, or after it, when the module is prepared to add by itself."""
    monkeypatch.setenv(native_module.VARIABLE, hooks)
    model, _optimizer, twin = pair(tied=False)
    seen, both = [], []
    for net in (model, twin):
        loss = loss_of(net) if late else None
        net.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        torch.autograd.graph.register_multi_grad_hook((net.head.weight, net.down.weight), both.append)
        (loss_of(net) if loss is None else loss).backward()
    torch.testing.assert_close(seen[0], seen[1])
    torch.testing.assert_close(both[0], both[1])
    assert_same_gradients(model, twin)


def test_a_weight_changed_between_forward_and_backward_raises_as_in_plain_pytorch():
    for net in pair(tied=False)[::2]:
        loss = loss_of(net)
        with torch.no_grad():
            net.down.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_evaluation_and_other_transforms_are_left_alone():
    model, _optimizer, twin = pair()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(0)), twin(tokens(0)))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens(0)), twin(tokens(0)))
    x = torch.randn(4, 6)
    weights = {name: value.detach() for name, value in twin.named_parameters()}
    for of in (
        lambda net: torch.func.grad(lambda v: net.block(v).sum())(x),
        lambda net: torch.func.vmap(net.block)(x),
        lambda net: torch.func.jacrev(net.block)(x[0]),
        lambda net: torch.func.jvp(net.block, (x,), (torch.ones_like(x),))[1],
        lambda net: torch.func.functional_call(net, {name: w * 2 for name, w in weights.items()}, tokens(1)),
        lambda net: torch.func.grad(lambda w: torch.func.functional_call(net, w, tokens(1)).sum())(weights),
        lambda net: torch.jit.trace(net.up, x)(x),
    ):
        torch.testing.assert_close(of(model), of(twin))
    assert all(p.grad is None for p in model.parameters())


def test_ignored_backwards_and_weight_zero():
    model, optimizer, twin = pair(steps=2)
    with optimizer.ignore():
        loss_of(model, 5).backward()
    loss_of(twin, 5).backward()
    assert_same_gradients(model, twin)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())

    model = Net()
    optimizer = wrap(model, 2, reduction="weighted")
    twin = copy.deepcopy(model)
    for seed, weight in ((0, 0), (1, 3.0)):
        with optimizer.accumulate(weight=weight):
            (loss_of(model, seed) * (float("nan") if weight == 0 else 1)).backward()
        if seed == 0:
            optimizer.step()
    loss_of(twin, 1).backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("autocast", [False, True])
def test_shapes_and_errors_equal_plain_pytorchs(autocast):
    model, _optimizer, twin = pair()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for shape in ((6,), (0, 6), (2, 0, 6), (2, 3, 6), (2, 1, 3, 6)):
            x = torch.randn(shape)
            outputs = [net.up(x) for net in (model, twin)]
            torch.testing.assert_close(*outputs)
            for output in outputs:
                output.float().sum().backward()
    assert_same_gradients(model, twin, rtol=0.02, atol=0.02)
    for bad in (torch.randn(2, 5), torch.randn(2, 6).double(), torch.tensor(1.0)):
        errors = []
        for net in (model, twin):
            with pytest.raises(Exception) as caught:  # noqa: PT011
                net.up(bad)
            errors.append((caught.type, str(caught.value)))
        assert errors[0] == errors[1]
    with pytest.raises(IndexError):
        model.embedding(torch.tensor([11]))
