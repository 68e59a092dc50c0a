"""`model=` works with unusual inputs, dtypes and timing wherever plain PyTorch works."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from loops import Failure, fail, with_backward
from test_autograd import assert_same_gradients, wrap
from torch import nn

from fusedacc import AccumulatingOptimizer


def nets(*layers: nn.Module):
    """Return a wrapped model and the same model for plain PyTorch. The model keeps the wrapper alive."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    twin = copy.deepcopy(model)
    model.kept = [wrap(model)]
    return model, twin


@pytest.mark.parametrize(
    ("first", "x"), [(nn.Linear(5, 4), torch.ones(2, 5)), (nn.Embedding(5, 4), torch.tensor([1, 2]))]
)
def test_without_a_gradient_grad_is_none(first, x):
    pair = nets(first, nn.Linear(4, 4))
    for net in pair:
        out = net[0](x)
        (with_backward(out, lambda gradient: None).sum() + net[1](torch.ones(2, 4)).sum()).backward()
    assert pair[1][0].weight.grad is None
    assert_same_gradients(*pair)


@pytest.mark.parametrize(
    ("layer", "x"),
    [(nn.Linear(5, 4, bias=False), torch.ones(2, 5)), (nn.Embedding(5, 4), torch.tensor([1, 2]))],
)
def test_a_backward_that_fails_after_a_module_has_written_taints_the_window(layer, x):
    net = nn.Sequential(layer)
    optimizer = wrap(net, steps=3)
    for _ in range(4):
        net(x).sum().backward()
        optimizer.step(), optimizer.zero_grad()
    before = with_backward(torch.ones((), requires_grad=True), fail)  # its backward runs after the layer's
    with pytest.raises(Failure):
        (before + net(x).sum()).backward()
    with pytest.raises(RuntimeError, match="an exception has interrupted a backward"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_anomaly_detection_finds_a_gradient_that_is_nan_as_in_pytorch():
    """Only the gradient of the weight is NaN: a row of NaNs gets a gradient of zeros."""
    x = torch.ones(3, 5)
    x[2] = torch.nan
    for net in nets(nn.Linear(5, 4)):
        for _ in range(3):
            net(torch.ones(3, 5)).sum().backward()
        with torch.autograd.detect_anomaly(check_nan=True):
            loss = net(x)[:2].sum()
            with pytest.raises(RuntimeError, match="returned nan values"):
                loss.backward()


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0), (1, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("shape", [(), (2,), (0,), (2, 2), (2, 0)])
def test_layers_without_features_and_inputs_without_rows(sizes, shape):
    pair = nets(nn.Linear(*sizes))
    x = torch.randn(*shape, sizes[0])
    for net in pair:
        for _ in range(2):
            net(x.clone().requires_grad_()).square().sum().backward()
    assert_same_gradients(*pair)


def complex_weights(net) -> None:
    net(torch.ones(5, 3, dtype=torch.complex64) * 1j).abs().square().sum().backward()


def a_weight_that_the_backward_does_not_need_is_changed(net) -> None:
    """Plain PyTorch keeps the weight only for the input's gradient, and under autocast it keeps the cast."""
    loss, x = net(torch.ones(2, 3)).square().sum(), torch.ones(2, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        cast = net(x).float().sum()
    with torch.no_grad():
        net[0].weight.mul_(2)
    (loss + cast).backward()
    net.slope = x.grad


def other_memory_between_forward_and_backward(net) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    loss = net(x).square().sum()
    net[0].weight.data = torch.zeros(4, 3)
    loss.backward()
    net.slope = x.grad


@pytest.mark.parametrize(
    ("use", "dtype"),
    [
        (complex_weights, torch.complex64),
        (a_weight_that_the_backward_does_not_need_is_changed, torch.float32),
        (other_memory_between_forward_and_backward, torch.float32),
    ],
)
def test_uses_of_a_linear(use, dtype):
    pair = nets(nn.Linear(3, 4, dtype=dtype))
    for net in pair:
        use(net)
    assert_same_gradients(*pair)
    torch.testing.assert_close(*(getattr(net, "slope", torch.zeros(())) for net in pair))


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype.*")
def test_inputs_of_other_layouts():
    ragged, whole = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]), torch.randn(4, 3)
    mkldnn = whole.to_mkldnn() if torch.backends.mkldnn.is_available() else whole
    for x in (ragged, whole.to_sparse(), mkldnn):
        pair = nets(nn.Linear(3, 4))
        for net in pair:
            out = net(x)
            out = out.to_padded_tensor(0.0) if out.is_nested else out
            (out if out.layout is torch.strided else out.to_dense()).square().sum().backward()
        assert_same_gradients(*pair)


def test_a_lookup_of_no_rows_whose_gradient_has_other_strides():
    pair = nets(nn.Embedding(5, 4))
    for net in pair:
        rows = with_backward(net[0](torch.empty(0, dtype=torch.long)), lambda _: torch.empty(0, 8)[:, ::2])
        rows.sum().backward()
    assert_same_gradients(*pair)


@pytest.mark.parametrize("name", ["0.weight", "1.weight", "1.bias"])
def test_a_parameter_frozen_between_forward_and_backward_gets_nothing(name):
    pair = nets(nn.Embedding(3, 4), nn.Linear(4, 4))
    for net in pair:
        loss = net(torch.tensor([1, 2])).square().sum()
        net.get_parameter(name).requires_grad_(False)
        loss.backward()
    assert pair[1].get_parameter(name).grad is None
    assert_same_gradients(*pair)


@pytest.mark.parametrize("width", [4, 16, 60, 128])
def test_the_gradient_itself_as_input_and_as_output_gradient(width):
    pair = nets(nn.Linear(width, width), nn.Embedding(width, width))
    x, index = torch.randn(width, width) / width, torch.randperm(width)
    for net in pair:
        linear, table = net
        linear(x).square().sum().backward()
        linear(linear.weight.grad).square().sum().backward()
        linear(x).backward(linear.weight.grad)
        table(index).square().sum().backward()
        table(index).backward(table.weight.grad)
    assert_same_gradients(*pair)


def test_backwards_in_several_threads():
    table = nn.Embedding(7, 6)
    model, twin = nets(table, nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7))
    batches = [torch.randint(0, 7, (4, 5)) for _ in range(40)]
    losses = [model(batch).square().mean() for batch in batches]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(torch.Tensor.backward, losses))
    finally:
        sys.setswitchinterval(interval)
    for batch in batches:
        twin(batch).square().mean().backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("when", ["before the update", "after the update"])
@pytest.mark.parametrize("steps", [None, 1, 2])
def test_writes_to_rows_without_a_lookup(steps, when):
    """Writes through `.data` do not change the version. They are in the norm, and in no later window."""
    table = nn.Embedding(50, 4)
    inner = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer = AccumulatingOptimizer(inner, steps, model=table, max_grad_norm=1e9)
    for window in range(3):
        for _ in range(steps or 2):
            optimizer.zero_grad() if steps else None
            table(torch.tensor([window, 7])).sum().backward()
            if steps and not optimizer.will_update:
                optimizer.step()
        gradient = table.weight.grad
        assert gradient.count_nonzero() == 2 * 4
        gradient.data[20:23, 1:] = 3.0 if when == "before the update" else 0.0
        wanted = torch.linalg.vector_norm(gradient)
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm, wanted)
        gradient.data[30:33, 1:] = 3.0
        del gradient  # drop the last reference to the memory, which the next window uses
        optimizer.zero_grad()


def test_a_layer_used_often_under_autocast_is_cast_once():
    """The layer is cast again after an update, a change of its version, or new memory."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    optimizer = AccumulatingOptimizer(torch.optim.SGD([layer.weight], lr=1.0, fused=True), model=layer)
    saved: list[torch.Tensor] = []

    def run(x):
        with (
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        ):
            for _ in range(5):
                x = layer(x)
        return x.float().sum()

    kept = [run(torch.randn(2, 64, requires_grad=True))]
    weights = {t.data_ptr() for t in saved if t.shape == (64, 64)}
    assert len(weights) == 1
    for change in (
        lambda: (kept[-1].backward(retain_graph=True), optimizer.step(), optimizer.zero_grad()),
        lambda: layer.weight.detach().add_(1.0),
        lambda: setattr(layer.weight, "data", torch.randn(64, 64)),
    ):
        change()
        x = torch.randn(2, 64, requires_grad=True)
        saved.clear()
        kept.append(run(x))
        want = x
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for _ in range(5):
                want = nn.functional.linear(want, layer.weight.detach().clone(), layer.bias)
        assert torch.equal(kept[-1], want.float().sum())
