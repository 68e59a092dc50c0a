"""The wrapper follows edits of `param_groups` by the user as stock does."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from loops import LOW, WAYS
from torch import Tensor, nn

import fusedacc
from fusedacc.accumulators.reduction import WEIGHING

K = 4


class Net(nn.Module):
    """Gradients are small integers, independent of the weights, so every sum is exact in every dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3, bias=False, dtype=dtype)
        self.b = nn.Linear(4, 3, bias=False, dtype=dtype)
        for layer in (self.a, self.b):
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sum() + 2 * self.b(x).sum()


def batch(number: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(8).reshape(2, 4) * (number + 1)) % 5 - 2).to(dtype)


def append(net: Net, optimizer) -> None:
    optimizer.param_groups[0]["params"].append(net.b.weight)


def append_group(net: Net, optimizer) -> None:
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    optimizer.param_groups.append(group | {"params": [net.b.weight]})


def assign_groups(net: Net, optimizer) -> None:
    group = dict(optimizer.param_groups[0], params=[net.b.weight, net.a.weight])
    optimizer.param_groups = [group]


def replace(net: Net, optimizer) -> None:
    """Replace a parameter as Gaussian splatting's densification does."""
    old, params = net.a.weight, optimizer.param_groups[0]["params"]
    state = optimizer.state.pop(old, None)
    net.a.weight = nn.Parameter(old.detach() + 1)
    if state is not None:
        optimizer.state[net.a.weight] = state
    params[[param is old for param in params].index(True)] = net.a.weight


def grow(net: Net, optimizer) -> None:
    """Replace a parameter with one that has more rows."""
    old, params = net.a.weight, optimizer.param_groups[0]["params"]
    optimizer.state.pop(old, None)
    net.a.weight = nn.Parameter(torch.cat([old.detach(), old.detach()]))
    params[[param is old for param in params].index(True)] = net.a.weight


def remove(net: Net, optimizer) -> None:
    optimizer.param_groups[0]["params"][:] = [net.b.weight]


#: Edits of an optimizer of the first weight, and of one of both weights.
EDITS_OF_ONE, EDITS_OF_BOTH = (append, append_group, assign_groups), (replace, grow, remove)
#: The call after which the edit comes: (update, micro-batch, "backward" or "step").
MOMENTS = {
    "between windows": (0, K - 1, "step"),
    "after a first backward": (1, 0, "backward"),
    "between micro-batches": (1, 1, "step"),
    "before the update": (1, K - 1, "backward"),
}


def train(net: Net, optimizer, edit: Callable, moment: tuple, loop: str, clip: float | None = None) -> list:
    """Run three updates in a "counted", "manual" or "stock" loop.

    Returns:
        The weights after each update and, if stock or the wrapper clips, the norms.
    """
    seen: list[Tensor] = []
    for update in range(3):
        for micro in range(K):
            loss = net(batch(K * update + micro, net.a.weight.dtype))
            (loss if loop == "counted" else loss / K).backward()
            if moment == (update, micro, "backward"):
                edit(net, optimizer)
            if clip and loop == "stock" and micro == K - 1:
                params = [p for group in optimizer.param_groups for p in group["params"]]
                seen.append(nn.utils.clip_grad_norm_(params, clip).double())
            if loop == "counted" or micro == K - 1:
                optimizer.step(), optimizer.zero_grad()
            if moment == (update, micro, "step"):
                edit(net, optimizer)
        seen += [optimizer.grad_norm] if clip and loop != "stock" else []
        seen += [net.a.weight.detach().clone(), net.b.weight.detach().clone()]
    return seen


def made(dtype: torch.dtype, both: bool, loop: str, **options):
    """Return a network and an optimizer of both weights or of the first."""
    net = Net(dtype)
    inner = torch.optim.SGD(net.parameters() if both else [net.a.weight], lr=0.5)
    if loop == "stock":
        return net, inner
    given = options | ({"model": net} if "model" in options else {})
    return net, fusedacc.AccumulatingOptimizer(inner, K if loop == "counted" else None, **given)


@pytest.mark.sweep
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("edit", [*EDITS_OF_ONE, *EDITS_OF_BOTH])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["counted", "manual"])
def test_training_with_edited_groups_equals_stock(monkeypatch, kind, way, edit, moment):
    dtype, options = WAYS[way]
    if way.startswith("python"):
        monkeypatch.setenv("FUSEDACC_ENGINE", "0")
    both = edit in EDITS_OF_BOTH
    stock, ours = (
        train(*made(dtype, both, loop, **options), edit, MOMENTS[moment], loop) for loop in ("stock", kind)
    )
    assert all(map(torch.equal, stock, ours))


@pytest.mark.parametrize("kind", ["counted", "manual"])
@pytest.mark.parametrize("edit", [append, replace])
def test_an_inserted_parameter_is_hooked_clipped_and_cleared(kind, edit):
    net, optimizer = made(torch.float32, edit is replace, kind, max_grad_norm=1.0)
    moment = (1, 1, "backward")
    wanted = train(*made(torch.float32, edit is replace, "stock"), edit, moment, "stock", clip=1.0)
    found = train(net, optimizer, edit, moment, kind, clip=1.0)
    torch.testing.assert_close(found, wanted, check_dtype=False)
    assert (net.a.weight.grad, net.b.weight.grad) == (None, None)
    rows = optimizer.explain().splitlines()
    assert sum("multi_tensor" in row for row in rows) == 2


@pytest.mark.parametrize("reduction", WEIGHING)
@pytest.mark.parametrize("steps", [K, None], ids=["counted", "manual"])
def test_gradients_stored_for_an_inserted_parameter_are_weighted(steps, reduction):
    net = Net(torch.float32)
    inner = torch.optim.SGD([net.a.weight], lr=1.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, reduction=reduction)
    weights, sums = [1.0, 3.0, 4.0, 8.0], torch.zeros(3, 4)
    for number, weight in enumerate(weights):
        with optimizer.accumulate(weight=weight):
            if number == 2:
                net.b.weight.grad = None  # drop the gradients from before the insertion
                append(net, optimizer)
            x = batch(number, torch.float32)
            net(x).backward()
        if number >= 2:
            sums += (weight if reduction == "weighted" else 1.0) * 2 * x.sum(0).expand(3, 4)
        if steps:
            optimizer.step()
    if not steps:
        optimizer.step()
    assert torch.equal(net.b.weight.detach(), -sums / sum(weights))


@pytest.mark.parametrize("steps", [2, None], ids=["counted", "manual"])
def test_an_inserted_parameter_of_another_live_wrapper_is_refused(steps):
    first, second = Net(LOW), Net(LOW)
    other = fusedacc.AccumulatingOptimizer(torch.optim.SGD(second.parameters(), lr=1.0), steps)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(first.parameters(), lr=1.0), steps)
    first(batch(0, LOW)).backward()
    optimizer.param_groups[0]["params"].append(second.a.weight)
    with pytest.raises(ValueError, match="another live AccumulatingOptimizer"):
        optimizer.step()
    assert (optimizer.num_updates, optimizer.micro_step) == (0, 0)
    assert not first.a.weight.any()
    other.close()
    optimizer.step()
    assert optimizer.micro_step == (1 if steps else 0)


def test_an_inserted_object_that_is_no_tensor_is_refused_with_its_place():
    net = Net(torch.float32)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), 2)
    optimizer.param_groups[0]["params"].append(3)
    net(batch(0, torch.float32)).backward()
    with pytest.raises(TypeError, match=r"param_groups\[0\] holds '0.2' of type int"):
        optimizer.step()


@pytest.mark.parametrize("steps", [2, None], ids=["counted", "manual"])
def test_a_removed_parameter_is_restored_and_freed(steps):
    net = Net(LOW)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), steps, model=net)
    net(batch(0, LOW)).backward()
    optimizer.step()
    assert net.b.weight.grad_dtype is None
    remove(net, optimizer)
    net(batch(1, LOW)).backward()
    optimizer.step()
    assert net.a.weight.grad_dtype is LOW
    assert "forward" not in net.a.__dict__
    assert "forward" in net.b.__dict__
    assert net.a.weight.grad.dtype is LOW
    fusedacc.AccumulatingOptimizer(torch.optim.SGD([net.a.weight], lr=0.5), 2).close()
    gone = weakref.ref(net.a.weight)
    net.a = nn.Identity()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("steps", [2, None], ids=["counted", "manual"])
def test_copies_and_checkpoints_keep_accumulators_with_their_parameters_after_an_insertion(steps):
    first, second = Net(torch.float32), nn.Parameter(torch.zeros(2))
    inner = torch.optim.SGD([{"params": [first.a.weight]}, {"params": [second]}], lr=1.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 4 if steps else None)
    optimizer.param_groups[0]["params"].append(first.b.weight)
    (first(batch(0, torch.float32)) + second.sum()).backward()
    if steps:
        optimizer.step()
    saved = optimizer.state_dict()
    shapes = [tuple(entry["fusedacc_sum"].shape) for _, entry in sorted(saved["state"].items())]
    assert shapes == [(3, 4), (3, 4), (2,)]
    twin = copy.deepcopy(optimizer)
    twin.load_state_dict(saved)
    if steps:
        twin.flush()
        optimizer.flush()
        for one, other in zip(optimizer._slots, twin._slots, strict=True):
            assert torch.equal(one.param, other.param)
            assert one.param.any()


@pytest.mark.parametrize("steps", [1, 2, None])
def test_groups_that_are_not_in_a_list_train(steps):
    net = Net(torch.float32)
    inner = torch.optim.SGD(net.parameters(), lr=0.5)
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, reduction="sum")
    inner.param_groups = tuple(inner.param_groups)
    for number in range(4):
        net(batch(number, torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    total = sum(batch(number, torch.float32).sum(0) for number in range(4))
    assert torch.equal(net.a.weight, (-0.5 * total).expand(3, 4))
