"""Wrapped against stock training, step by step, for each of torch's optimizers in both loops."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedacc

K, UPDATES = 4, 3

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "sgd-nesterov": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adamw-for-loop": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=1.0),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
}


class Net(nn.Module):
    """A shared layer, an unused one and a frozen one beside the ordinary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.shared = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.shared(self.embed(tokens)))
        return self.head(self.norm(self.shared(x) + self.frozen(x)))


def network(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def micro_batches(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, 11, (5, 2), generator=generator),
            torch.randint(0, 3, (5, 2), generator=generator),
        )
        for _ in range(count)
    ]


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, **options) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, -2).float(), targets.flatten(), **options)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def assert_same(mine: list, its: list) -> None:
    for a, b in zip(mine, its, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert torch.equal(a, b), (a - b).abs().max()


def assert_same_state(stock: torch.optim.Optimizer, wrapped: torch.optim.Optimizer) -> None:
    mine, its = stock.state_dict()["state"], wrapped.state_dict()["state"]
    assert mine.keys() == its.keys()
    for index, entries in mine.items():
        assert entries.keys() == its[index].keys()
        assert_same(
            [torch.as_tensor(v) for v in entries.values() if v is not None],
            [torch.as_tensor(v) for v in its[index].values() if v is not None],
        )


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_manual_loop_is_bit_equal_to_stock(make):
    stock, wrapped = network(), network()
    bare = make(stock.parameters())
    optimizer = fusedacc.AccumulatingOptimizer(make(wrapped.parameters()))
    for index, (tokens, targets) in enumerate(micro_batches(K * UPDATES)):
        for model in (stock, wrapped):
            (loss_of(model, tokens, targets) / K).backward()
        assert_same(gradients(stock), gradients(wrapped))
        if (index + 1) % K == 0:
            bare.step(), optimizer.step()
            assert_same(gradients(stock), gradients(wrapped))
            assert_same(list(stock.parameters()), list(wrapped.parameters()))
            assert_same_state(bare, optimizer.optimizer)
            bare.zero_grad(), optimizer.zero_grad()
    assert optimizer.num_updates == UPDATES


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_counted_loop_follows_stock(make, reduction):
    """Each update's gradient is stock's within rounding; from the same gradient the update is bit-equal."""
    stock, wrapped = network(), network()
    bare = make(stock.parameters())
    optimizer = fusedacc.AccumulatingOptimizer(make(wrapped.parameters()), K, reduction=reduction)
    scale = 1 / K if reduction == "mean" else 1.0
    for index, (tokens, targets) in enumerate(micro_batches(K * UPDATES)):
        loss_of(wrapped, tokens, targets).backward()
        (loss_of(stock, tokens, targets) * scale).backward()
        last = (index + 1) % K == 0
        assert optimizer.will_update == last
        if last:
            for p, q in zip(stock.parameters(), wrapped.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                if p.grad is not None:
                    torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=20 * K * 2**-24)
                    p.grad.copy_(q.grad)
            bare.step(), bare.zero_grad()
        else:
            assert all(g is None for g in gradients(wrapped))
        optimizer.step()
        assert optimizer.has_updated == last
        if last:
            assert_same(list(stock.parameters()), list(wrapped.parameters()))
            assert_same_state(bare, optimizer.optimizer)
        optimizer.zero_grad()
    assert optimizer.num_updates == UPDATES


def test_counted_sum_of_float32_is_bit_equal():
    stock, wrapped = network(), network()
    bare = torch.optim.SGD(stock.parameters(), lr=0.05, momentum=0.9)
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    optimizer = fusedacc.AccumulatingOptimizer(inner, K, reduction="sum")
    for index, (tokens, targets) in enumerate(micro_batches(K * UPDATES)):
        for model in (stock, wrapped):
            loss_of(model, tokens, targets).backward()
        optimizer.step(), optimizer.zero_grad()
        if (index + 1) % K == 0:
            bare.step(), bare.zero_grad()
            assert_same(list(stock.parameters()), list(wrapped.parameters()))


def test_lbfgs_runs_its_closure_in_a_manual_loop():
    batches = micro_batches(K)
    results = []
    for wrap in (False, True):
        model = network()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        if wrap:
            optimizer = fusedacc.AccumulatingOptimizer(optimizer)
        losses = []

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            total = torch.zeros(())
            for tokens, targets in batches:
                loss = loss_of(model, tokens, targets) / K
                loss.backward()
                total += loss.detach()
            return total

        losses = [optimizer.step(closure) for _ in range(3)]
        results.append((losses, list(model.parameters())))
    assert results[0][0][-1] < results[0][0][0]
    assert_same(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1])


@pytest.mark.parametrize("steps", [None, K])
def test_sparse_adam_gets_sparse_gradients(steps):
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, 20, (6,), generator=generator) for _ in range(K * 2)]
    tables, kinds = [], []
    for wrap in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(20, 5, sparse=True)
        bare = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        bare.register_step_pre_hook(lambda o, *_: kinds.append(o.param_groups[0]["params"][0].grad.is_sparse))
        optimizer = fusedacc.AccumulatingOptimizer(bare, steps, reduction="sum") if wrap else bare
        for index, rows in enumerate(batches):
            table(rows).pow(2).sum().backward()
            if (wrap and steps) or (index + 1) % K == 0:
                optimizer.step(), optimizer.zero_grad()
        tables.append(table.weight.detach())
    assert kinds == [True] * 4
    torch.testing.assert_close(tables[1], tables[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [None, K])
def test_clipping_the_visible_gradient_acts_as_in_stock(dtype, steps):
    stock, wrapped = network(dtype), network(dtype)
    bare = torch.optim.SGD(stock.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1), steps)
    for index, (tokens, targets) in enumerate(micro_batches(K * 2)):
        (loss_of(wrapped, tokens, targets) / (1 if steps else K)).backward()
        (loss_of(stock, tokens, targets) / K).backward()
        last = (index + 1) % K == 0
        if last:
            mine = nn.utils.clip_grad_norm_(stock.parameters(), 0.01)
            its = nn.utils.clip_grad_norm_(wrapped.parameters(), 0.01)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(its.float(), mine.float(), rtol=20 * eps, atol=0.0)
            bare.step(), bare.zero_grad()
        if last or steps:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(stock.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=8 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps * 0.01)


def test_autocast_trains_as_stock():
    """Float32 parameters under bfloat16 autocast: gradients reach them in float32, bit for bit."""
    stock, wrapped = network(), network()
    bare = torch.optim.AdamW(stock.parameters(), lr=0.01)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.AdamW(wrapped.parameters(), lr=0.01))
    for index, (tokens, targets) in enumerate(micro_batches(K * UPDATES)):
        for model in (stock, wrapped):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, tokens, targets)
            loss.backward()
        if (index + 1) % K == 0:
            for o in (bare, optimizer):
                o.step(), o.zero_grad()
    assert_same(list(stock.parameters()), list(wrapped.parameters()))


def test_torch_grad_scaler_works_in_a_manual_loop():
    stock, wrapped = network(), network()
    bare = torch.optim.SGD(stock.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    for model, o in ((stock, bare), (wrapped, optimizer)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for index, (tokens, targets) in enumerate(micro_batches(K * 2)):
            scaler.scale(loss_of(model, tokens, targets)).backward()
            if (index + 1) % K == 0:
                scaler.step(o)
                scaler.update()
                o.zero_grad()
    assert_same(list(stock.parameters()), list(wrapped.parameters()))


def test_learning_rate_schedulers_step_on_updates():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0 / (update + 1))
    for _ in range(6):
        (weight * 1.0).backward()
        optimizer.step()
        if optimizer.has_updated:
            scheduler.step()
        optimizer.zero_grad()
    assert weight.item() == pytest.approx(-(1 + 1 / 2 + 1 / 3))


def test_the_wrapper_leaves_a_copy_of_the_model_alone():
    model = network()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), K)
    twin = copy.deepcopy(model)
    tokens, targets = micro_batches(1)[0]
    loss_of(twin, tokens, targets).backward()
    stock = network()
    loss_of(stock, tokens, targets).backward()
    assert_same(gradients(stock), gradients(twin))
    assert optimizer.micro_step == 0
