"""Backwards inside `ignore()` have no effect on the accumulated gradients, wherever they come."""

import threading
from contextlib import nullcontext

import pytest
import torch
from loops import LOW, scalar, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedacc
from fusedacc.accumulators import p_grad

#: Seconds that a thread waits for another one before the test fails.
PATIENCE = 120


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.block, self.down = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x, reentrant=True):
        x = self.up(x)
        x = checkpoint(self.block, x, use_reentrant=True) if reentrant else self.block(x)
        return self.down(x).pow(2).mean()


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize("before", [True, False])
def test_an_ignored_backward_with_a_nested_backward_has_no_effect(before, micro):
    model = Net()
    optimizer = wrap(model, 2)
    wanted = [p.detach().clone() for p in model.parameters()]
    for seed in (0, 1):
        loss = model(inputs(seed), reentrant=False) / 2
        for each, gradient in zip(wanted, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            each.sub_(gradient, alpha=0.1)
    for seed in (0, 1):
        if before and seed == micro:
            with optimizer.ignore():
                model(inputs(7)).backward()
            optimizer.zero_grad()
        model(inputs(seed)).backward()
        if not before and seed == micro:
            with optimizer.ignore():
                model(inputs(7)).backward()
        optimizer.step(), optimizer.zero_grad()
    for p, each in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.detach(), each)


class Script:
    """Two parameters, of which only the first gets gradients that count, and one method for each letter.

    Args:
        steps: as for the wrapper.
        how: gradients are "taken" by the hooks, "stored" by autograd, or "weighted".
    """

    def __init__(self, steps: int | None, how: str) -> None:
        self.params = self.first, self.second = [nn.Parameter(torch.ones(2, dtype=LOW)) for _ in range(2)]
        self.reduction = "weighted" if how == "weighted" else "sum"
        inner = torch.optim.SGD(self.params, lr=1.0, weight_decay=0.5)
        self.optimizer = fusedacc.AccumulatingOptimizer(inner, steps, reduction=self.reduction)
        if how == "stored":
            self.first.register_post_accumulate_grad_hook(lambda _: None)
        self.seen: list = []

    def see(self, *values: torch.Tensor | None) -> None:
        self.seen.append([None if value is None else value.detach().clone() for value in values])

    def i(self) -> None:
        """Run an ignored backward."""
        with self.optimizer.ignore():
            (100.0 * (self.first + self.second)).sum().backward()

    def f(self) -> None:
        """Run an ignored backward that fails after the second parameter's gradient has arrived."""
        handle = self.first.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            self.i()
        handle.remove()

    def b(self) -> None:
        weighted = self.reduction == "weighted"
        with self.optimizer.accumulate(weight=2.0) if weighted else nullcontext():
            (3.0 * self.first).sum().backward()
            self.see(self.first.grad, self.second.grad)

    def c(self) -> None:
        """Clip."""
        self.see(nn.utils.clip_grad_norm_(self.params, 1e3))

    def s(self) -> None:
        self.optimizer.step()
        self.see(*self.params)

    def z(self) -> None:
        self.optimizer.zero_grad()

    def n(self) -> None:
        """Set the gradients to zero."""
        self.optimizer.zero_grad(set_to_none=False)

    def p(self) -> None:
        """Assign p.grad."""
        self.first.grad = torch.full((2,), 7.0, dtype=LOW)

    def run(self, letters: str) -> list:
        for letter in letters:
            getattr(self, letter)()
        return self.seen


#: Orders of calls in a manual loop: ignored backwards come first, between micro-batches and after an update.
MANUAL = [
    *("ibbs", "iibbs", "bibs", "bbics", "ibibics", "fbbs", "bfbcs", "is", "bsibbs", "bszibbs", "bsnibbs"),
    *("bnibs", "pibbs", "bpibs", "izbs", "ibsiibs"),
]
COUNTED = [
    *("ibsbs", "bisbs", "bsibs", "bsbics", "ibsibics", "fbsbs", "bsbfcs", "iss", "bsbsibsbs", "bsbszibsbs"),
    *("bsbsnibsbs", "bszibsbs", "bsbsizbsbs"),
]
BY_HAND = ("pisbs", "bspisbs", "bsbspisbs")
ORDERS = [(None, order, "taken") for order in MANUAL]
ORDERS += [(2, order, "taken") for order in (*COUNTED, *BY_HAND)]
ORDERS += [(None, order, "stored") for order in MANUAL if "p" not in order]
ORDERS += [(None, order, "weighted") for order in MANUAL if "p" not in order and order != "is"]
ORDERS += [(2, order, how) for order in COUNTED for how in ("stored", "weighted") if order != "iss"]


@pytest.mark.parametrize(("steps", "order", "how"), ORDERS)
def test_training_continues_as_without_ignored_backwards(steps, order, how):
    """Compare p.grad after each backward that counts, norms, and parameters after each update."""
    seen = Script(steps, how).run(order)
    wanted = Script(steps, how).run(order.replace("i", "").replace("f", ""))
    torch.testing.assert_close(seen, wanted, rtol=0, atol=0)


def test_step_and_zero_grad_inside_ignore_use_the_gradients_that_count():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    (3.0 * weight).backward()
    with optimizer.ignore():
        (100.0 * weight).backward()
        assert weight.grad == 100.0
        with optimizer.ignore():
            (100.0 * weight).backward()
        optimizer.step()
        assert (weight.item(), weight.grad.item()) == (-3.0, 3.0)
        (100.0 * weight).backward()
        optimizer.zero_grad()
        (100.0 * weight).backward()
    (5.0 * weight).backward()
    optimizer.step()
    assert weight.item() == -8.0


@pytest.mark.parametrize("steps", [None, 1])
@pytest.mark.parametrize("before", [False, True])
def test_a_backward_that_began_before_ignore_in_another_thread_counts(steps, before):
    early, late = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([early, late], lr=1.0), steps)
    if before and steps is None:
        (early + late).backward()
    reached, entered = threading.Event(), threading.Event()

    def wait(gradient: torch.Tensor) -> None:
        reached.set()
        assert entered.wait(PATIENCE)

    held = late.exp()  # made first, so its backward runs last
    held.register_hook(wait)
    thread = threading.Thread(target=(held + 3.0 * early.sin()).backward)
    thread.start()
    assert reached.wait(PATIENCE)
    with optimizer.ignore():
        entered.set()
        thread.join(PATIENCE)
    optimizer.step()
    more = 1.0 if before and steps is None else 0.0
    assert (early.item(), late.item()) == (-3.0 - more, -1.0 - more)


@pytest.mark.parametrize("steps", [None, 2])
def test_gradients_count_after_an_exception_at_the_beginning_of_ignore(steps, monkeypatch):
    weight, optimizer = scalar(steps)
    weight.backward()
    with monkeypatch.context() as patch:
        patch.setattr(p_grad, "Former", interrupted)
        with pytest.raises(KeyboardInterrupt), optimizer.ignore():
            pass
    if steps is not None:
        optimizer.step(), optimizer.zero_grad()
    weight.backward()
    optimizer.step()
    assert weight.item() == (-1 if steps else -2)


def interrupted(*arguments):
    raise KeyboardInterrupt
