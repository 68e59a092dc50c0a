"""`weight[e]` in a window's first micro-batch: used experts are written, unused ones are set to zero."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from experts_models import EXPERTS, INNER, WIDTH, Mixture, batch, loss_of
from loops import Failure, fail, with_backward, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedacc.traffic import TrafficMeter


class Stack(nn.Module):
    """Applies experts of a stacked weight, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(EXPERTS, 4, 4))

    def forward(self, x, order, dense=False):
        for expert in order:
            x = torch.tanh(x @ self.weight[expert])
        return x + self.weight.sum() if dense else x


@pytest.fixture(autouse=True)
def new_memory_holds_nan():
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    yield
    torch.use_deterministic_algorithms(False)


def pair(steps=None, **options):
    """Return a stack, its wrapper in the second window, and the same stack for plain PyTorch."""
    model = Stack()
    twin = copy.deepcopy(model)
    optimizer = wrap(model, steps, model=model, lr=0.0, **options)
    for index in range(steps or 1):
        run(model, [index])
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, twin


def x_of(index=0, requires_grad=False):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(3, 4, generator=generator).requires_grad_(requires_grad)


def run(model, *orders, **options):
    """Run one forward for each order, and the backward of the sum of their outputs."""
    sum(model(x_of(i), order, **options).pow(2).sum() for i, order in enumerate(orders)).backward()


def assert_equal(model, twin):
    assert torch.equal(model.weight.grad, twin.weight.grad)


def assert_close(model, twin):
    torch.testing.assert_close(model.weight.grad, twin.weight.grad)


ORDERS = {
    "one": [[2]],
    "none but the ends": [[0, EXPERTS - 1]],
    "all": [list(range(EXPERTS))],
    "twice in a forward": [[3, 1, 3]],
    "several forwards before the backward": [[0, 2], [2, 5], [4]],
}


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
def test_old_values_in_memory_do_not_change_gradients(orders):
    model, _optimizer, twin = pair()
    for check in (assert_equal, assert_close, assert_close):
        for each in (model, twin):
            run(each, *orders)
        check(model, twin)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_runs_the_forward_again(reentrant):
    model, _optimizer, twin = pair()
    for check in (assert_equal, assert_close):
        for each in (model, twin):
            y = checkpoint(each, x_of(0, True), [1, 3], use_reentrant=reentrant)
            each(y, [3, 5]).pow(2).sum().backward()
        check(model, twin)


@pytest.mark.parametrize("order", [[2, 0], []], ids=["and experts", "alone"])
def test_the_whole_weight_is_used_with_its_experts(order):
    model, _optimizer, twin = pair()
    for _ in range(2):
        for each in (model, twin):
            run(each, order, dense=True)
        assert_close(model, twin)


def test_an_expert_is_added_to_a_sum_that_waits_for_its_scale():
    """A mean's first gradient becomes the sum, and is multiplied by the scale later."""
    model = Stack()
    twin = copy.deepcopy(model)
    optimizer = wrap(model, 4, model=model, lr=0.0)
    for _ in range(2):
        for micro_batch in range(4):
            for each, share in ((model, 1), (twin, 4)):
                if micro_batch == 0:
                    (torch.bmm(x_of().expand(EXPERTS, 3, 4), each.weight).pow(2).sum() / share).backward()
                else:
                    (each(x_of(), [micro_batch]).pow(2).sum() / share).backward()
            if micro_batch == 3:
                assert_close(model, twin)
            optimizer.step(), optimizer.zero_grad()
        twin.weight.grad = None


def interrupted(model):
    hidden = with_backward(model(x_of(0, True), [1]), fail)
    with pytest.raises(Failure):
        model(hidden, [4, 2]).pow(2).sum().backward()


@pytest.mark.parametrize("steps", [None, 2])
def test_a_failed_backward_is_reported(steps):
    model, optimizer, _ = pair(steps)
    interrupted(model)
    with pytest.raises(RuntimeError, match="an exception has interrupted a backward"):
        optimizer.step()
    model.zero_grad()
    optimizer.discard()
    twin = copy.deepcopy(model)
    for _ in range(steps or 1):
        run(model, [3])
        if steps:
            optimizer.step()
    run(twin, [3])
    assert model.weight.grad is not None
    assert_equal(model, twin)


def test_a_backward_after_a_failed_one_adds_nothing_of_it():
    model, _optimizer, twin = pair()
    interrupted(model)
    for each in (model, twin):
        run(each, [2, 5])
    assert_equal(model, twin)


def test_a_hook_in_the_backward_sees_the_partial_sum():
    """It sees the sum of the last product's expert, and zeros for later experts."""
    model, optimizer, twin = pair()
    seen = []

    def look(gradient):
        assert model.weight.grad is None
        optimizer.state_dict()
        seen.append(model.weight.grad.clone())

    for each in (model, twin):
        hidden = each(x_of(), [1])
        if each is model:
            hidden.register_hook(look)
        each(hidden, [4]).pow(2).sum().backward()
    (sum_then,) = seen
    assert torch.equal(sum_then[4], twin.weight.grad[4])
    assert not sum_then[[0, 1, 2, 3, 5]].any()
    assert_equal(model, twin)


def test_a_gradient_that_a_hook_puts_into_p_grad_is_added_to():
    model, _optimizer, _ = pair()
    twin = copy.deepcopy(model)
    for each in (model, twin):
        hidden = each(x_of(), [1, 2])

        def put(gradient, each=each):
            each.weight.grad = torch.ones_like(each.weight)

        hidden.register_hook(put)
        each(hidden, [4, 2]).pow(2).sum().backward()
    assert_close(model, twin)


def test_backwards_of_several_threads():
    for _ in range(5):
        model, _optimizer, twin = pair()
        orders = [[1, 2], [2, 3], [0], [5, 1]]
        losses = [model(x_of(i), order).pow(2).sum() for i, order in enumerate(orders)]
        with ThreadPoolExecutor(len(orders)) as pool:
            list(pool.map(torch.Tensor.backward, losses))
        run(twin, *orders)
        assert_close(model, twin)


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_windows_of_weighted_micro_batches(max_grad_norm):
    """Check the norm, clipping and an update when new memory holds NaN."""
    results, options = [], {"reduction": "weighted", "max_grad_norm": max_grad_norm}
    for holds_nan in (False, True):
        torch.use_deterministic_algorithms(holds_nan)
        model = Mixture("loop")
        optimizer = wrap(model, 3, torch.optim.AdamW, lr=1e-3, model=model, **options)
        for index in range(7):
            with optimizer.accumulate(weight=index + 1):
                loss_of(model, index).backward()
            optimizer.step(), optimizer.zero_grad()
        optimizer.flush()
        results.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all()


def test_bytes_of_a_windows_first_micro_batch():
    """A gradient is read and its part of the sum written. Other parts are set to zero, and no sum is read."""
    model = Mixture("loop")
    optimizer = wrap(model, 8, model=model, reduction="mean")
    _, experts = batch(0)
    used = experts.unique().numel()
    model(*batch(0))  # the wrapper first learns which code uses the experts
    with TrafficMeter(optimizer) as meter:
        loss_of(model, 0).backward()
    counted = meter.as_dict()["by_op"]
    added, zeroed = counted["fusedacc::scale_accumulate_"], counted["aten::_foreach_zero_"]
    parts = 2 * used * WIDTH * INNER * 4
    assert zeroed["written_bytes"] == 2 * (EXPERTS - used) * WIDTH * INNER * 4
    assert added["calls"] >= 2 * used
    biases = 4 * sum(p.numel() for name, p in model.named_parameters() if "bias" in name)
    assert parts <= added["written_bytes"] <= parts + biases
    assert parts <= added["read_bytes"] <= parts + biases
    assert not meter.uncounted
