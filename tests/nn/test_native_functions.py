"""`model=` with native functions, with Python functions, and plain PyTorch: cases where they could differ."""

import copy
from collections import Counter

import pytest
import torch
from loops import Operators
from memory import allocated_by
from test_autograd import assert_same_gradients, wrap
from torch import nn
from torch.nn import functional as F

import fusedacc
from fusedacc.accumulators import engine


def nets(*layers: nn.Module, **options):
    """Return a wrapped model, its wrapper, and the same model for plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    twin = copy.deepcopy(model)
    return model, wrap(model, **options), twin


WRITES = {
    "relu_": F.relu_,
    "add_": lambda out: out.add_(1),
    "mul_": lambda out: out.mul_(0.5),
    "leaky_relu_": lambda out: F.leaky_relu_(out, 0.1),
    "dropout": lambda out: F.dropout(out, 0.5, inplace=True),
    "a part": lambda out: out[..., 1:].zero_(),
}


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (2, 1, 3, 6), (0, 3, 6)])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_the_output_of_a_linear_may_be_written_in_place(shape, autocast):
    layers = nn.Linear(6, 4), nn.Linear(6, 4, bias=False)
    model, _optimizer, twin = nets(*layers, keep_casts=autocast)
    x = torch.randn(shape)
    for write in WRITES.values():
        for layer in (0, 1):
            found = []
            for net in (model, twin):
                point = x.clone().requires_grad_()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    out = net[layer](point)
                torch.manual_seed(0)
                write(out)
                out.float().square().sum().backward()
                found.append((out, point.grad))
            (ours, slope), (theirs, wanted) = found
            assert torch.equal(ours, theirs)
            assert torch.equal(slope, wanted)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        # Plain PyTorch rounds each gradient to bfloat16.
        rounding = len(WRITES) * 2.0**-8 * theirs.grad.abs().max().item()
        tolerances = {"rtol": 0.0, "atol": rounding} if autocast else {}
        torch.testing.assert_close(ours.grad, theirs.grad, **tolerances)


def test_an_output_that_was_written_in_place_can_be_differentiated_twice():
    model, _optimizer, twin = nets(nn.Linear(6, 4))
    x, slopes = torch.randn(2, 3, 6), []
    for net in (model, twin):
        point = x.clone().requires_grad_()
        out = F.leaky_relu_(net(point).mul_(3), 0.1)
        (slope,) = torch.autograd.grad(out.pow(3).sum(), point, create_graph=True)
        slope.square().sum().backward()
        slopes.append(point.grad)
    torch.testing.assert_close(*slopes)
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("lookup", [False, True])
def test_a_gradient_penalty_runs_no_more_products_than_plain_pytorch(lookup):
    """It computes no weight gradient that the inner `autograd.grad` does not want, and copies no weight."""
    layers = nn.Linear(40, 40, bias=False), nn.Tanh(), nn.Linear(40, 40, bias=False), nn.Embedding(9, 40)
    model, _optimizer, twin = nets(*layers)
    calls, tokens = [], torch.arange(5)
    for net in (model, twin):
        with Operators() as operators:
            point = (net[3](tokens) if lookup else torch.ones(5, 40)).requires_grad_()
            (slope,) = torch.autograd.grad(net[:3](point).sum(), point, create_graph=True)
            slope.square().sum().backward()
        names = [name.split(".")[1] for name in operators.names]
        calls.append(Counter("product" if "mm" in name else name for name in names))
    assert calls[0]["product"] <= calls[1]["product"]
    assert calls[0]["sub"] == calls[0]["embedding_dense_backward"] == 0
    assert_same_gradients(model, twin)


@pytest.mark.parametrize(
    ("layer", "x"), [(nn.Linear(4, 4), torch.ones(3, 4)), (nn.Embedding(4, 4), torch.tensor([1, 1, 3]))]
)
def test_with_the_eager_backend_only_operators_of_torch_run(layer, x):
    model, optimizer, _twin = nets(layer, backend="eager", steps=3)
    for _ in range(5):
        loss = model(x).square().sum()
        with Operators() as operators:
            loss.backward()
        assert not [name for name in operators.names if name.startswith("fusedacc")]
        optimizer.step(), optimizer.zero_grad()


def test_an_output_is_allocated_once():
    model, _optimizer, twin = nets(nn.Linear(64, 256))
    x = torch.randn(4, 8, 64)
    model(x), twin(x)
    outputs = []
    plain = allocated_by(lambda: twin(x))  # on aarch64 also a copy of the weight
    assert allocated_by(lambda: outputs.append(model(x))) < plain + 0.5 * 4 * 8 * 256 * 4
    assert not outputs[0]._is_view()


@pytest.mark.parametrize("bucket", [1, 200, 400, 700, 10**6])
def test_a_full_bucket_after_a_first_product(bucket, monkeypatch):
    """The product uses uninitialized memory, and the bucket holds another gradient of the weight."""
    monkeypatch.setattr(engine, "LAUNCH_BYTES", bucket)
    model, optimizer, twin = nets(*(nn.Linear(9, 9) for _ in range(6)))
    for window in range(4):
        for net in (model, twin):
            generator = torch.Generator().manual_seed(window)
            loss = net(torch.randn(4, 9, generator=generator)).square().sum()
            for k, layer in enumerate(net):
                loss = loss + (k + 1) * layer.weight.sum() + 3 * layer.bias.sum()
            loss.backward()
        assert_same_gradients(model, twin)
        optimizer.zero_grad(), twin.zero_grad()


@pytest.mark.parametrize("shape", [(1,), (1, 4), (3, 4)])
def test_a_bias_of_another_shape(shape):
    layer = nn.Linear(5, 4)
    layer.bias = nn.Parameter(torch.randn(shape))
    model, _optimizer, twin = nets(layer)
    for net in (model, twin):
        net(torch.ones(3, 5)).square().sum().backward()
    assert_same_gradients(model, twin)


def test_options_changed_between_forward_and_backward_have_no_effect():
    model, _optimizer, twin = nets(nn.Embedding(9, 6, padding_idx=1), nn.Embedding(9, 6))
    for net in (model, twin):
        for padding, by_frequency in ((2, True), (None, False), (1, True)):
            loss = sum(table(torch.tensor([1, 2, 2, 3])).square().sum() for table in net)
            net[0].padding_idx, net[1].scale_grad_by_freq = padding, by_frequency
            loss.backward()
    assert_same_gradients(model, twin)


def test_weights_on_the_meta_device():
    model, _optimizer, twin = nets(nn.Linear(3, 4, device="meta"), nn.Embedding(3, 4, device="meta"))
    index = torch.zeros(2, dtype=torch.int64, device="meta")
    for net in (model, twin):
        assert net[0](torch.ones(2, 3, device="meta")).shape == (2, 4)
        assert net[1](index).shape == (2, 4)


@pytest.mark.filterwarnings("ignore")
def test_compiled_autograd():
    model, _optimizer, twin = nets(nn.Embedding(9, 6, padding_idx=2), nn.Linear(6, 6), nn.Linear(6, 6))
    for net in (model, twin):
        net[2].weight.requires_grad_(False)
        for compiled in (False, True, False):
            loss = net(torch.tensor([[1, 2, 2], [3, 4, 4]])).square().sum()
            if compiled and net is model:
                with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", dynamic=False)):
                    loss.backward()
            else:
                loss.backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("stored_as", [torch.float64, torch.bfloat16])
def test_saved_tensors_may_be_cast_by_hooks(stored_as):
    """As hooks that offload or compress them do."""
    model, _optimizer, twin = nets(nn.Embedding(9, 6), nn.Linear(6, 4))

    def pack(tensor):
        return tensor.dtype, tensor.to(stored_as)

    def unpack(packed):
        dtype, tensor = packed
        return tensor.to(dtype)

    for net in (model, twin):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = net(torch.arange(5)).square().mean()
        loss.backward()
    assert_same_gradients(model, twin)


class HeadAndLinear(nn.Module):
    """The head's weight is that of a Linear, and of linear_cross_entropy in some micro-batches."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.other = nn.Linear(8, 8), nn.Linear(8, 16, bias=False), nn.Linear(8, 4)

    def forward(self, x, target, cross_entropy):
        hidden = self.body(x)
        loss = self.head(hidden).square().mean() + self.other(hidden).square().mean()
        return loss if target is None else loss + cross_entropy(hidden, self.head.weight, target)


def test_python_and_native_code_add_products_of_one_weight_in_a_first_micro_batch():
    torch.manual_seed(0)
    model, steps = HeadAndLinear(), 3
    twin, optimizer = copy.deepcopy(model), wrap(model, steps)

    def stock(hidden, weight, target):
        return F.cross_entropy(hidden @ weight.t(), target)

    for window in range(4):
        twin.zero_grad()
        for step in range(steps):
            x, target = torch.randn(6, 8), torch.randint(0, 16, (6,)) if window >= 2 else None
            model(x, target, fusedacc.nn.functional.linear_cross_entropy).backward()
            (twin(x, target, stock) / steps).backward()
            if step == steps - 1:
                assert_same_gradients(model, twin)
            optimizer.step()
            optimizer.zero_grad()
        twin.load_state_dict(model.state_dict())
