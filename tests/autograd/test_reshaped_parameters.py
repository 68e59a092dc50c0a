"""A parameter whose shape changes through `.data` (as Transformers' `resize_token_embeddings` does it)."""

import functools
import itertools

import pytest
import torch
from loops import LOW, WAYS
from torch import Tensor, nn

import fusedacc

K = 2


class Tied(nn.Module):
    """An Embedding and a Linear that share a weight, and a bias. Gradients are small integers."""

    def __init__(self, dtype: torch.dtype, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, dtype=dtype)
        self.head = nn.Linear(4, 6, bias=False, dtype=dtype)
        self.bias = nn.Parameter(torch.zeros(4, dtype=dtype))
        with torch.no_grad():
            for weight in (self.embedding.weight, self.head.weight):
                weight.copy_(torch.arange(24).reshape(6, 4) % 3 - 1)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, number: int) -> Tensor:
        rows = self.embedding.num_embeddings
        tokens = torch.tensor([number % rows, (number + 1) % rows, rows - 1])
        x = torch.full((2, 4), 1.0 + number % 2, dtype=self.bias.dtype)
        return self.embedding(tokens).sum() + self.head(x).sum() + self.bias.sum()

    def resize(self, rows: int) -> None:
        """Keep the parameter and replace its memory, as Transformers' `_get_resized_embeddings` does."""
        for weight in {self.embedding.weight, self.head.weight}:
            data = torch.zeros(rows, 4, dtype=weight.dtype)
            kept = min(rows, weight.shape[0])
            data[:kept] = weight.detach()[:kept]
            weight.data = data
        self.embedding.num_embeddings = self.head.out_features = rows


def wrap(net: nn.Module, kind: str, make=torch.optim.SGD, lr: float = 0.5, **options):
    given = options | ({"model": net} if options.get("model") else {})
    inner = make(net.parameters(), lr=lr)
    return fusedacc.AccumulatingOptimizer(inner, K if kind == "counted" else None, **given)


def update(net: Tied, optimizer, first: int, counted: bool, zero_first: bool = False) -> None:
    if zero_first:
        optimizer.zero_grad()
    for number in range(first, first + K):
        loss = net(number)
        (loss if counted else loss / K).backward()
        if counted or number == first + K - 1:
            optimizer.step()
    if not zero_first:
        optimizer.zero_grad()


OPTIONS = {
    "plain": {},
    "model": {"model": True},
    "masters": {"master_weights": True},
    "model+masters": {"model": True, "master_weights": True},
}


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [[9], [4], [9, 4, 7]], ids=["grown", "shrunk", "grown and shrunk"])
@pytest.mark.parametrize("first", [0, 2], ids=["before the first update", "after two updates"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["counted", "manual"])
def test_training_equals_stock_after_a_resize_between_windows(monkeypatch, kind, way, tied, first, rows):
    dtype, options = WAYS[way]
    if way.startswith("python"):
        monkeypatch.setenv("FUSEDACC_ENGINE", "0")
    stock, ours = Tied(dtype, tied), Tied(dtype, tied)
    optimizers = torch.optim.SGD(stock.parameters(), lr=0.5), wrap(ours, kind, **options)
    for number in range(first + 2 * len(rows)):
        for net, optimizer in zip((stock, ours), optimizers, strict=True):
            if number >= first and (number - first) % 2 == 0:
                net.resize(rows[(number - first) // 2])
            update(net, optimizer, K * number, net is ours and kind == "counted")
        for want, got in zip(stock.parameters(), ours.parameters(), strict=True):
            assert got.shape == want.shape
            assert torch.equal(got, want)
            assert got.grad is None
    rows_of = optimizers[1].explain().splitlines()
    assert any(f"{ours.embedding.num_embeddings}x4" in row for row in rows_of)


@pytest.mark.parametrize(
    ("kind", "view", "clears"),
    [("counted", "", False), *itertools.product(["counted", "manual"], ["narrow", "held"], [True])],
)
def test_a_resize_drops_old_gradients_while_memory_is_still_referenced(kind, view, clears):
    """p.grad (if the loop never clears it), the new parameter or the user refers to old memory."""
    stock, ours = Tied(LOW), Tied(LOW)
    optimizers = (
        torch.optim.SGD(stock.parameters(), lr=0.5),
        wrap(ours, kind, **OPTIONS["model" if clears else "plain"]),
    )
    if not clears:
        optimizers[1].zero_grad = lambda: None
    held = []
    for number in range(3):
        for net, optimizer in zip((stock, ours), optimizers, strict=True):
            if number == 1:
                weight = net.embedding.weight
                held += [weight.data] if clears else []
                if view == "narrow":
                    weight.data = weight.data[:5]
                    net.embedding.num_embeddings = net.head.out_features = 5
                else:
                    net.resize(9)
            update(net, optimizer, K * number, net is ours and kind == "counted", zero_first=True)
        assert all(map(torch.equal, stock.parameters(), ours.parameters()))


@pytest.mark.parametrize("after", ["step", "backward"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_step_refuses_a_shape_that_changed_inside_a_window(options, after):
    net = Tied(LOW)
    optimizer = wrap(net, "counted", **options)
    net(0).backward()
    if after == "step":
        optimizer.step()
    net.resize(9)
    before = [p.detach().clone() for p in net.parameters()]
    if after == "step":
        net(1).backward()
    with pytest.raises(RuntimeError, match=r"' is of shape \(9, 4\) now.*\(6, 4\).*discard\(\)"):
        optimizer.step()
    assert optimizer.num_updates == 0
    assert all(torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))
    optimizer.discard()
    stock = Tied(LOW)
    stock.resize(9)
    update(stock, torch.optim.SGD(stock.parameters(), lr=0.5), 4, False)
    update(net, optimizer, 4, True)
    assert all(map(torch.equal, stock.parameters(), net.parameters()))


@pytest.mark.parametrize("kind", ["counted", "manual"])
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.SGD, momentum=0.5),
        torch.optim.AdamW,
        functools.partial(torch.optim.AdamW, fused=True),
    ],
    ids=["momentum", "AdamW", "fused"],
)
def test_state_of_the_old_shape_is_an_error_before_the_update_until_it_is_deleted(make, kind):
    """Stock fails during the update, and torch's fused kernels write beyond the end of the state."""
    net = Tied(torch.float32)
    optimizer = wrap(net, kind, make)
    update(net, optimizer, 0, kind == "counted")
    net.resize(9)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match=r"state '\w+' of parameter '0\.\d' is of shape \(6, 4\)"):
        update(net, optimizer, K, kind == "counted")
    assert all(torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))
    del optimizer.state[net.embedding.weight]
    optimizer.step()
    assert optimizer.num_updates == 2
    assert not torch.equal(net.embedding.weight, before[0])
    optimizer.zero_grad()
    update(net, optimizer, 2 * K, kind == "counted")
    assert optimizer.num_updates == 3


@pytest.mark.parametrize("way", ["cpu", "eager", "no engine"])
@pytest.mark.parametrize("kind", ["counted", "manual", "stock"])
def test_a_sum_has_the_strides_of_a_parameter_that_was_transposed_in_place(monkeypatch, kind, way):
    """A fused kernel takes the elements of the parameter and of p.grad in the order of their memory."""
    if way == "no engine":
        monkeypatch.setenv("FUSEDACC_ENGINE", "0")
    param = nn.Parameter(torch.zeros(3, 3))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
    if kind != "stock":
        steps = K if kind == "counted" else None
        backend = "eager" if way == "eager" else "auto"
        optimizer = fusedacc.AccumulatingOptimizer(optimizer, steps, reduction="sum", backend=backend)
    param.data = param.data.t()
    slopes = torch.arange(9.0).reshape(3, 3)
    for number in range(K):
        (param * slopes).sum().backward()
        if kind == "counted" or number == K - 1:
            optimizer.step()
    assert torch.equal(param, -K * slopes)
