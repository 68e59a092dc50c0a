"""`main_grad=True`: modules of other libraries add to the sums by themselves."""

import copy
import gc
import io
import pickle

import pytest
import torch
from main_grad_modules import PROTOCOLS, AddingLinear
from torch import Tensor, nn
from torch.nn import functional as F

import fusedacc
from fusedacc.kernels import native_module

#: The protocols that work without any attribute but `main_grad`, and that with it.
ALL = list(PROTOCOLS)
WITHOUT_P_GRAD = [name for name in ALL if name != "quack"]
LOW = torch.bfloat16


@pytest.fixture(params=["engine", "no engine"])
def engine(request, monkeypatch):
    if request.param == "no engine":
        monkeypatch.setenv(native_module.VARIABLE, "0")


class Net(nn.Module):
    """`first` and `last` add by themselves; autograd adds the gradients of `norm` and of the biases."""

    def __init__(self, protocol: str | None = "megatron", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind = nn.Linear if protocol is None else AddingLinear
        options = {} if protocol is None else {"protocol": protocol}
        self.first, self.norm, self.last = kind(4, 6, **options), nn.LayerNorm(6), kind(6, 3, **options)
        self.never = nn.Linear(2, 2)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def batch(index: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(index), dtype=torch.float64).to(dtype)


def loss_of(net: nn.Module, index: int) -> Tensor:
    return net(batch(index, net.norm.weight.dtype)).square().mean() * (1.0 + index)


def inner_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)


def wrap(net: nn.Module, steps=None, **options) -> fusedacc.AccumulatingOptimizer:
    return fusedacc.AccumulatingOptimizer(inner_of(net), steps, main_grad=True, **options)


def scalar(steps=None, **options) -> tuple[AddingLinear, fusedacc.AccumulatingOptimizer]:
    """Return a layer whose weight's gradient is the sum of its inputs, and its optimizer of rate 1."""
    layer = AddingLinear(1, 1, bias=False, protocol="apex").double()
    nn.init.zeros_(layer.weight)
    inner = torch.optim.SGD(layer.parameters(), lr=1.0)
    return layer, fusedacc.AccumulatingOptimizer(inner, steps, main_grad=True, **options)


def add(layer: AddingLinear, value: float) -> None:
    """Run a backward pass with this gradient."""
    layer(torch.full((1, 1), value, dtype=layer.weight.dtype)).sum().backward()


def plain(windows: list[list[tuple[int, float]]], clip: float | None = None) -> Net:
    """Train plain PyTorch in float64. windows: for each update, losses by number and their factors."""
    net = Net(None)
    inner = inner_of(net)
    for window in windows:
        for index, factor in window:
            (loss_of(net, index) * factor).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        inner.step()
        inner.zero_grad()
    return net


def assert_equal(net: nn.Module, wanted: nn.Module, most: float = 1e-12) -> None:
    for (name, p), q in zip(net.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(
            p.double(), q.double(), rtol=most, atol=most, msg=lambda m, n=name: f"{n}: {m}"
        )


def attributes(module: nn.Module) -> list[str]:
    """Return the names of the parameters' attributes, but for those of graphs that ask for sinks."""
    names = [name for p in module.parameters() for name in p.__dict__]
    return [name for name in names if not name.startswith("_accumulating_")]


# What modules add counts


@pytest.mark.parametrize("protocol", ALL)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_manual_loop_trains_as_plain_pytorch(protocol, clip, engine):
    net = Net(protocol)
    optimizer = wrap(net, max_grad_norm=clip)
    for update in range(4):
        for index in range(3 * update, 3 * update + 3):
            loss_of(net, index).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(net, plain([[(i, 1.0) for i in range(3 * u, 3 * u + 3)] for u in range(4)], clip))


@pytest.mark.parametrize("protocol", ALL)
@pytest.mark.parametrize("reduction", ["mean", "sum", "normalized"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.sweep
def test_a_counted_loop_trains_as_plain_pytorch(protocol, reduction, clip, engine):
    net = Net(protocol)
    optimizer = wrap(net, 3, reduction=reduction, max_grad_norm=clip)
    weights = [1.0 + index % 4 for index in range(11)]
    windows = [range(3), range(3, 6), range(6, 9), range(9, 11)]
    for index in range(11):
        with optimizer.accumulate(weight=weights[index] if reduction == "normalized" else None):
            loss_of(net, index).backward()
        optimizer.step()
    optimizer.flush()
    factors = {
        "mean": [1 / len(window) for window in windows],
        "sum": [1.0] * 4,
        "normalized": [1 / sum(weights[i] for i in window) for window in windows],
    }[reduction]
    wanted = plain([[(i, f) for i in w] for w, f in zip(windows, factors, strict=True)], clip)
    assert optimizer.num_updates == 4
    assert_equal(net, wanted)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("steps", [None, 1, 4])
def test_sums_of_16_bit_parameters_are_float32(masters, steps, engine):
    net = Net("transformer_engine", LOW)
    optimizer = wrap(net, steps, master_weights=masters)
    assert net.first.weight.main_grad.dtype == torch.float32
    wanted = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in net.named_parameters()}
    twin = Net(None, LOW)
    twin.load_state_dict(net.state_dict())
    for index in range(4):
        loss_of(net, index).backward()
        loss_of(twin, index).backward()
        for name, p in twin.named_parameters():
            wanted[name] += 0 if p.grad is None else p.grad.double()
        twin.zero_grad()
        if steps == 4 and index < 3:
            optimizer.step()
        if steps == 1:
            break
    for name, p in net.named_parameters():
        if name.startswith("never"):
            assert p.grad is None
        else:
            assert p.grad is p.main_grad
            divisor = 4 if steps == 4 else 1
            torch.testing.assert_close(p.grad.double(), wanted[name] / divisor, rtol=2e-2, atol=2e-2)
    before = [p.clone() for p in net.parameters()]
    optimizer.step()
    assert not torch.equal(before[0], net.first.weight)


@pytest.mark.parametrize("flagged", [False, True])
def test_both_uses_of_a_tied_weight_count(flagged, engine):
    """A module adds the gradient of one use, and autograd that of the other."""
    head = AddingLinear(4, 5, bias=False, protocol="megatron").double()
    weight = head.weight
    if flagged:  # as Megatron-Core does for tied weights
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = True
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=0.0), 2, main_grad=True)
    total = torch.zeros(5, 4, dtype=torch.float64)
    for index in (1, 2):
        tokens = torch.tensor([index, 0, index])
        head(F.embedding(tokens, weight)).square().sum().backward()
        if index == 1:
            optimizer.step()
        loss = F.linear(F.embedding(tokens, weight), weight).square().sum()
        total += torch.autograd.grad(loss, weight)[0] / 2
    torch.testing.assert_close(weight.grad, total)


def test_a_dummy_gradient_does_not_count_and_resets_the_flag(engine):
    layer = AddingLinear(1, 1, bias=False, protocol="primus").double()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), 2, main_grad=True)
    add(layer, 3.0)
    assert layer.weight.grad_added_to_main_grad is False
    assert layer.weight.main_grad.item() == 3.0
    optimizer.step()
    (layer.weight * 5.0).sum().backward()  # without a module, and without a dummy gradient
    assert layer.weight.grad.item() == 4.0


def test_quack_adds_to_p_grad_of_a_manual_loop(engine):
    layer = AddingLinear(1, 1, bias=False, protocol="quack").double()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), main_grad=True)
    for value, total in ((1.0, 1.0), (2.0, 3.0), (4.0, 7.0)):
        add(layer, value)
        assert layer.weight.grad is layer.weight.main_grad
        assert layer.weight.main_grad.item() == total
    optimizer.zero_grad()
    assert layer.weight.main_grad.item() == 0.0


def test_modules_of_the_model_add_to_main_grad_too(engine):
    net, wanted = Net(None), Net(None)
    optimizer = wrap(net, 2, model=net)
    plain_optimizer = inner_of(wanted)
    for index in range(4):
        loss_of(net, index).backward()
        optimizer.step()
        (loss_of(wanted, index) / 2).backward()
        if index % 2:
            plain_optimizer.step()
            plain_optimizer.zero_grad()
    assert_equal(net, wanted)


# The memory of the sums


@pytest.mark.parametrize("steps", [None, 2])
def test_the_sums_live_as_long_as_the_wrapper_and_begin_with_zeros(steps, engine):
    net = Net("apex")
    optimizer = wrap(net, steps)
    sums = [p.main_grad for p in net.parameters()]
    nbytes = sum(total.nbytes for total in sums)
    for index in range(4):
        assert all(p.main_grad is total for p, total in zip(net.parameters(), sums, strict=True))
        assert optimizer.accumulator_bytes == nbytes
        if index % 2 == 0:
            assert not any(total.any() for total in sums)
        loss_of(net, index).backward()
        if steps or index % 2:
            optimizer.step()
        if index % 2:
            optimizer.zero_grad()
            assert all(p.grad is None for p in net.parameters())
    optimizer.close()


def test_p_grad_is_the_sum_at_the_end_of_a_window_and_none_after_it(engine):
    layer, optimizer = scalar(2)
    assert layer.weight.grad is None
    add(layer, 1.0)
    assert layer.weight.grad is None
    assert layer.weight.main_grad.item() == 1.0
    optimizer.step()
    add(layer, 3.0)
    assert layer.weight.grad is layer.weight.main_grad
    assert layer.weight.grad.item() == 2.0
    layer.weight.grad.mul_(0.5)
    optimizer.step()
    assert layer.weight.item() == -1.0
    assert layer.weight.grad is None
    add(layer, 8.0)  # no zero_grad() is needed
    assert layer.weight.main_grad.item() == 8.0


def test_zero_grad_can_leave_zeros(engine):
    layer, optimizer = scalar()
    add(layer, 1.0)
    optimizer.zero_grad(set_to_none=False)
    assert layer.weight.grad is layer.weight.main_grad
    assert layer.weight.grad.item() == 0.0
    add(layer, 2.0)
    assert layer.weight.grad.item() == 2.0


def test_discard_clears_what_modules_have_added(engine):
    layer, optimizer = scalar(2)
    add(layer, 1.0)
    optimizer.discard()
    assert layer.weight.main_grad.item() == 0.0
    for value in (2.0, 4.0):
        add(layer, value)
        optimizer.step()
    assert layer.weight.item() == -3.0


def test_a_gradient_put_into_p_grad_before_the_window_counts(engine):
    layer, _ = scalar()
    layer.weight.grad = torch.full((1, 1), 5.0, dtype=torch.float64)
    add(layer, 1.0)
    assert layer.weight.grad is layer.weight.main_grad
    assert layer.weight.grad.item() == 6.0


@pytest.mark.parametrize("clear", ["model", "replace"])
def test_a_sum_that_other_code_took_out_of_p_grad_raises(clear, engine):
    layer, optimizer = scalar()
    add(layer, 1.0)
    if clear == "model":
        layer.zero_grad()
    else:
        layer.weight.grad = torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="was cleared or replaced"):
        add(layer, 1.0)
    with pytest.raises(RuntimeError, match="discard"):
        optimizer.step()
    optimizer.discard()
    add(layer, 2.0)
    optimizer.step()
    assert layer.weight.item() == -2.0


# Backward passes that do not count, or fail


@pytest.mark.parametrize("steps", [None, 2])
def test_ignored_backward_passes_add_to_other_memory(steps, engine):
    layer, optimizer = scalar(steps)
    total = layer.weight.main_grad
    add(layer, 1.0)
    if steps:
        optimizer.step()
    with optimizer.ignore():
        assert layer.weight.main_grad is not total
        assert layer.weight.main_grad.shape == total.shape
        with optimizer.ignore():
            add(layer, 100.0)
        add(layer, 100.0)
        assert total.item() == 1.0
    assert layer.weight.main_grad is total
    add(layer, 3.0)
    optimizer.step()
    assert layer.weight.item() == (-2.0 if steps else -4.0)


def test_ignored_gradients_of_empty_parameters_stay_in_p_grad(engine):
    """Empty tensors have equal addresses, and are not taken for the sum."""
    empty = nn.Parameter(torch.zeros(0, 3))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([empty], lr=1.0), main_grad=True)
    with optimizer.ignore():
        (empty * 2.0).sum().backward()
        assert empty.grad.shape == (0, 3)


def test_an_exception_after_an_addition_taints_the_window(engine):
    net = Net("apex")
    optimizer = wrap(net, 2)

    def fail(gradient):
        raise KeyError("in the backward pass")

    handle = net.first.bias.register_hook(fail)
    with pytest.raises(KeyError):
        loss_of(net, 0).backward()
    handle.remove()
    assert net.last.weight.main_grad.any()
    with pytest.raises(RuntimeError, match="discard"):
        optimizer.step()
    optimizer.discard()
    assert not net.last.weight.main_grad.any()


def test_as_many_backward_passes_as_before_are_one_micro_batch(engine):
    layer, optimizer = scalar(2)
    for value in (1.0, 2.0):
        add(layer, value)
        add(layer, value)
        optimizer.step()
    assert layer.weight.item() == -3.0


def test_a_backward_pass_after_the_division_raises(engine):
    layer, optimizer = scalar(2)
    add(layer, 1.0)
    optimizer.step()
    add(layer, 1.0)
    with pytest.raises(RuntimeError, match="divided"):
        add(layer, 1.0)
    with pytest.raises(RuntimeError, match="discard"):
        optimizer.step()
    optimizer.discard()
    assert layer.weight.main_grad.item() == 0.0


@pytest.mark.parametrize("retries", [True, False])
def test_a_failed_update_can_be_tried_again_but_not_followed(retries, engine):
    layer, optimizer = scalar(1)
    add(layer, 2.0)
    group = optimizer.param_groups[0]
    rate = group.pop("lr")
    with pytest.raises(KeyError):
        optimizer.step()
    group["lr"] = rate
    if retries:
        optimizer.step()
        assert layer.weight.item() == -2.0
        return
    with pytest.raises(RuntimeError, match="update of the last window has failed"):
        add(layer, 1.0)
    optimizer.discard()
    add(layer, 1.0)
    optimizer.step()
    assert layer.weight.item() == -1.0


def test_a_recorded_backward_pass_is_for_counted_loops(engine):
    layer, optimizer = scalar()
    loss = layer(torch.ones(1, 1, dtype=torch.float64)).sum()
    with pytest.raises(RuntimeError, match="create_graph"):
        loss.backward(create_graph=True)
    optimizer.close()
    layer, optimizer = scalar(1)
    layer(torch.full((1, 1), 3.0, dtype=torch.float64)).sum().backward(create_graph=True)
    optimizer.step()
    assert layer.weight.item() == -3.0


def test_a_skipped_update_leaves_zeros(engine):
    layer, optimizer = scalar(1, skip_nonfinite=True)
    add(layer, float("inf"))
    optimizer.step()
    assert int(optimizer.num_skipped) == 1
    assert layer.weight.main_grad.item() == 0.0


@pytest.mark.parametrize("unscales", [True, False])
def test_scaled_losses(unscales, engine):
    layer, optimizer = scalar(2)
    scaler = fusedacc.amp.GradScaler("cpu", init_scale=8.0)
    for value in (1.0, 3.0):
        scaler.scale(layer(torch.full((1, 1), value, dtype=torch.float64)).sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
            assert value == 1.0 or layer.weight.grad.item() == 2.0
        scaler.step(optimizer)
        scaler.update()
    assert layer.weight.item() == -2.0


# Which parameters have a main_grad


def test_frozen_parameters_have_no_main_grad(engine):
    """A module that adds to a frozen weight, as under LoRA in ms-swift #9790, fails and names it."""
    net = Net("megatron")
    net.first.requires_grad_(False)
    optimizer = wrap(net, 1)
    assert not hasattr(net.first.weight, "main_grad")
    assert not hasattr(net.first.bias, "main_grad")
    with pytest.raises(AttributeError, match="main_grad"):
        net.first(batch(0).requires_grad_()).sum().backward()
    assert net.last.weight.main_grad is not None
    net.first.requires_grad_(True)
    net.last.requires_grad_(False)
    optimizer.zero_grad()
    assert not hasattr(net.last.weight, "main_grad")
    before = net.first.weight.clone()
    net.first(batch(0)).sum().backward()
    assert torch.equal(net.first.weight.grad, net.first.weight.main_grad)
    optimizer.step()
    assert not torch.equal(before, net.first.weight)


def test_added_and_removed_parameters(engine):
    layer, optimizer = scalar(1)
    other = AddingLinear(1, 1, bias=False, protocol="apex").double()
    optimizer.add_param_group({"params": [other.weight]})
    assert other.weight.main_grad.item() == 0.0
    del optimizer.param_groups[0]
    add(other, 2.0)
    optimizer.step()
    assert not hasattr(layer.weight, "main_grad")
    assert other.weight.main_grad.item() == 0.0


def test_a_cast_model_gets_new_sums(engine):
    net = Net("apex", torch.float32)
    optimizer = wrap(net, 1)
    net.double()
    optimizer.zero_grad()
    assert all(p.main_grad.dtype == torch.float64 for p in net.parameters())
    loss_of(net, 0).backward()
    wanted = Net(None, torch.float32).double()
    loss_of(wanted, 0).backward()
    torch.testing.assert_close(net.first.weight.grad, wanted.first.weight.grad)


@pytest.mark.parametrize("clears", [True, False])
def test_layers_add_to_the_new_sum_after_a_cast_between_micro_batches(engine, clears):
    layer = AddingLinear(1, 1, bias=False, protocol="apex")
    inner = torch.optim.SGD(layer.parameters(), lr=1.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 3, main_grad=True)
    start = layer.weight.item()
    add(layer, 2.0)
    optimizer.step()
    layer.double()
    if clears:
        optimizer.zero_grad()
        assert layer.weight.main_grad.item() == 2.0
    else:
        optimizer.step()
    assert layer.weight.main_grad.dtype == torch.float64
    for _ in range(2):
        add(layer, 5.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(start - layer.weight.item(), 4.0)


def test_close_copies_and_pickles_leave_no_attribute_behind(engine):
    net = Net("megatron")
    net.first.weight.grad_added_to_main_grad = False
    net.first.weight.owner = "the user's"
    optimizer = wrap(net, 2)
    loss_of(net, 0).backward()
    optimizer.step()
    saved = io.BytesIO()
    torch.save(net, saved)
    saved.seek(0)
    for twin in (pickle.loads(pickle.dumps(net)), torch.load(saved, weights_only=False)):
        assert attributes(twin) == ["owner"]
        assert torch.equal(twin.first.weight, net.first.weight)
    assert attributes(copy.deepcopy(net)) == []
    optimizer.close()
    assert attributes(net) == ["owner"]
    assert net.first.weight.grad is None


def test_a_wrapper_that_is_freed_leaves_no_attribute_behind():
    net = Net("megatron")
    optimizer = wrap(net, 2)
    del optimizer
    gc.collect()
    assert attributes(net) == []


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_the_optimizer_has_its_own_sums(how, engine):
    layer, optimizer = scalar(2)
    add(layer, 1.0)
    optimizer.step()
    if how == "deepcopy":
        layer2, optimizer2 = copy.deepcopy((layer, optimizer))
    else:
        layer2, optimizer2 = pickle.loads(pickle.dumps((layer, optimizer)))
    assert layer2.weight.main_grad.item() == 1.0
    assert layer2.weight.main_grad is not layer.weight.main_grad
    for one, of_one, value in ((layer, optimizer, 3.0), (layer2, optimizer2, 7.0)):
        add(one, value)
        of_one.step()
    assert (layer.weight.item(), layer2.weight.item()) == (-2.0, -4.0)


# Checkpoints


def saved(optimizer: fusedacc.AccumulatingOptimizer) -> dict:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_window_resumes_bit_for_bit(after, engine):
    """After a third backward pass the sums are divided already."""
    net = Net("megatron", torch.float32)
    optimizer = wrap(net, 3)

    def run(net: Net, optimizer: fusedacc.AccumulatingOptimizer, first: int) -> None:
        for index in range(first, 6):
            loss_of(net, index).backward()
            optimizer.step()

    for index in range(after):
        loss_of(net, index).backward()
        if index < 2:
            optimizer.step()
    state = copy.deepcopy(net.state_dict()), saved(optimizer)
    other = Net("megatron", torch.float32)
    other.load_state_dict(state[0])
    resumed = wrap(other, 3)
    resumed.load_state_dict(state[1])
    for one, of_one in ((net, optimizer), (other, resumed)):
        if after == 3:
            of_one.step()
        run(one, of_one, after)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("to_main_grad", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "normalized"])
def test_a_window_resumes_with_and_without_main_grad(to_main_grad, reduction, engine):
    layer = AddingLinear(1, 1, bias=False, protocol="apex").double()
    nn.init.zeros_(layer.weight)
    twin = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(twin.weight)
    of_layer, of_twin = (
        fusedacc.AccumulatingOptimizer(
            torch.optim.SGD(one.parameters(), lr=1.0), 3, reduction=reduction, main_grad=one is layer
        )
        for one in (layer, twin)
    )
    (first, of_first), (second, of_second) = (layer, of_layer), (twin, of_twin)
    if to_main_grad:
        (first, of_first), (second, of_second) = (second, of_second), (first, of_first)
    weights = (1.0, 2.0, 4.0) if reduction == "normalized" else (None, None, None)
    for index, (value, weight) in enumerate(zip((1.0, 2.0, 6.0), weights, strict=True)):
        one, of_one = (first, of_first) if index < 2 else (second, of_second)
        if index == 2:
            second.load_state_dict(first.state_dict())
            of_second.load_state_dict(saved(of_first))
        with of_one.accumulate(weight=weight):
            add(one, value)
        of_one.step()
    expected = {"mean": -3.0, "sum": -9.0, "normalized": -9.0 / 7.0}[reduction]
    assert second.weight.item() == pytest.approx(expected, rel=1e-14)


# Errors and reports


def test_arguments_that_do_not_go_together():
    net = Net(None)
    with pytest.raises(ValueError, match=r"does not go with reduction='weighted'.*normalized"):
        wrap(net, 2, reduction="weighted")
    with pytest.raises(ValueError, match="rounding='stochastic'"):
        wrap(net, 2, rounding="stochastic", accumulate_dtype=LOW)
    net.first.weight.overwrite_main_grad = True
    with pytest.raises(ValueError, match="overwrite_main_grad=True"):
        wrap(net, 2)
    del net.first.weight.overwrite_main_grad
    net.first.weight.main_grad = torch.zeros(6, 4)
    with pytest.raises(ValueError, match=r"has a main_grad already"):
        wrap(net, 2)
    assert attributes(net) == ["main_grad"]


def test_a_weight_of_0_raises():
    layer, optimizer = scalar(2, reduction="normalized")
    with (
        pytest.raises(ValueError, match="weight=0 does not go with main_grad=True"),
        optimizer.accumulate(weight=0),
    ):
        pass
    with optimizer.accumulate() as micro_batch:
        with pytest.raises(ValueError, match="weight=0"):
            micro_batch.weight = 0
        micro_batch.weight = 2.0
        add(layer, 4.0)
    optimizer.step()
    optimizer.flush()
    assert layer.weight.item() == -2.0


def test_explain_shows_what_modules_have_added():
    net = Net("megatron")
    optimizer = wrap(net, 2)
    loss_of(net, 0).backward()
    rows = {line.split()[0]: line.split() for line in optimizer.explain().splitlines()[2:]}
    paths = [rows[f"0.{index}"][2] for index in range(6)]
    assert paths == ["main_grad", "multi_tensor", "multi_tensor", "multi_tensor", "main_grad", "multi_tensor"]
    assert rows["0.0"][3] == "module"
