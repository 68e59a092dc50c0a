"""An update that raises may be repeated, flushed or dropped."""

import pytest
import torch
from loops import LOW, Failure, assert_gradients, expected, fail, gradients, micro_batch, network, wrap


class Unlucky(torch.optim.SGD):
    """Its first step raises before it changes anything."""

    failed = False

    def step(self, closure=None):
        if not self.failed:
            self.failed = True
            raise ValueError("no luck")
        return super().step(closure)


def fail_once(optimizer, where: str) -> None:
    """Make a hook of the inner optimizer raise at the first update."""
    failures = [ValueError("no luck")]

    def hook(*_):
        if failures:
            raise failures.pop()

    getattr(optimizer, f"register_step_{where}_hook")(hook)


def unlucky(model, where: str, steps: int | None = 2):
    if where == "step":
        return wrap(model, steps, Unlucky)
    optimizer = wrap(model, steps)
    fail_once(optimizer, where)
    return optimizer


@pytest.mark.parametrize("retry", ["step", "flush"])
@pytest.mark.parametrize("where", ["step", "pre"])
def test_a_failed_update_can_be_repeated(where, retry):
    model = network()
    optimizer = unlucky(model, where)
    before, wanted = [p.detach().clone() for p in model.parameters()], expected(model, (0, 1), 0.5)
    micro_batch(model, optimizer, 0)
    with pytest.raises(ValueError, match="no luck"):
        micro_batch(model, optimizer, 1)
    assert (optimizer.num_updates, optimizer.has_updated) == (0, False)
    getattr(optimizer, retry)()
    assert (optimizer.num_updates, optimizer.micro_step, optimizer.has_updated) == (1, 0, True)
    assert_gradients(model, wanted)
    for p, start, gradient in zip(model.parameters(), before, wanted, strict=True):
        torch.testing.assert_close(p.detach(), start - 0.1 * gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("where", "steps", "clears"),
    [("step", 2, True), ("pre", 2, True), ("post", 2, True), ("pre", 1, False), ("pre", 2, False)],
)
def test_the_next_window_adds_to_the_gradient_of_a_failed_update_unless_it_is_cleared(where, steps, clears):
    model = network()
    optimizer = unlucky(model, where, steps)
    wanted = expected(model, range(2 * steps), 1 / steps)
    for seed in range(steps - 1):
        micro_batch(model, optimizer, seed)
    with pytest.raises(ValueError, match="no luck"):
        micro_batch(model, optimizer, steps - 1)
    if clears:
        optimizer.zero_grad()
        assert gradients(model) == [None] * 4
        assert optimizer.micro_step == 0
        wanted = expected(model, range(steps, 2 * steps), 1 / steps)
    for seed in range(steps, 2 * steps):
        micro_batch(model, optimizer, seed)
    assert (optimizer.num_updates, optimizer.micro_step) == (1, 0)
    assert_gradients(model, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_a_manual_loop_adds_to_the_gradient_of_a_failed_update(dtype):
    """As in stock, p.grad stays until zero_grad()."""
    model = network(dtype)
    optimizer = unlucky(model, "pre", None)
    singles = [expected(model, (seed,)) for seed in (0, 1)]
    with pytest.raises(ValueError, match="no luck"):
        micro_batch(model, optimizer, 0)
    micro_batch(model, optimizer, 1)
    assert optimizer.num_updates == 1
    assert_gradients(model, [a.float() + b.float() for a, b in zip(*singles, strict=True)])


def test_a_failing_closure_changes_nothing():
    model = network()
    optimizer = wrap(model, 2)
    wanted = expected(model, (0, 1), 0.5)
    micro_batch(model, optimizer, 0)

    with pytest.raises(Failure):
        optimizer.step(fail)
    assert optimizer.micro_step == 1
    micro_batch(model, optimizer, 1)
    assert optimizer.num_updates == 1
    assert_gradients(model, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [None, 2])
def test_an_update_that_has_scaled_its_gradients_cannot_be_repeated(steps, dtype):
    model = network(dtype)
    optimizer = wrap(model, steps, max_grad_norm=0.01, make=torch.optim.RMSprop)
    fail_once(optimizer, "pre")
    if steps:
        micro_batch(model, optimizer, 0)
    with pytest.raises(ValueError, match="no luck"):
        micro_batch(model, optimizer, 1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="had scaled its gradients"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.discard()
    for seed in range(steps or 1):
        micro_batch(model, optimizer, seed)
    assert not torch.equal(before[0], next(model.parameters()))
