"""`model=` and torch.compile: no separate frames for fusedacc, and no more graphs than plain PyTorch."""

import copy
import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
from kept_casts import Conv1D
from test_autograd import assert_same_gradients, wrap
from torch import nn
from torch._dynamo.utils import counters

import fusedacc

WIDTH = 8
PACKAGE = Path(fusedacc.__file__).parent


pytestmark = pytest.mark.usefixtures("fresh_compiler", "small_layers_too")


def torch_only():
    return nn.Sequential(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


def stacked(*kinds):
    """Return blocks of these kinds after an Embedding."""
    return nn.Sequential(nn.Embedding(9, WIDTH), *(kind() for kind in kinds))


class Block(nn.Module):
    """A module with a custom forward."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Broken(Block):
    """A module that compiles to two graphs."""

    def forward(self, x):
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.down(x)


class Picks(nn.Module):
    """Experts that a custom forward selects one by one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)

    def forward(self, x):
        return x + sum(torch.tanh(x @ self.weight[expert]) for expert in range(3))


class BrokenPicks(Picks):
    """A module that compiles to two graphs."""

    def forward(self, x):
        x = torch.tanh(x @ self.weight[0])
        torch._dynamo.graph_break()
        return x @ self.weight[1]


class RoutedPicks(Picks):
    """A loop over the experts that the data selects. Dynamo does not compile it."""

    def forward(self, x):
        for expert in torch.arange(len(x) % 4 + 1).nonzero():
            x = x + torch.tanh(x @ self.weight[expert[0] % 3])
        return x


blocks = functools.partial(stacked, Block, Block)
experts = functools.partial(stacked, Picks, Picks)
conv1d = functools.partial(stacked, functools.partial(Conv1D, WIDTH, WIDTH))


def in_place(model, **options):
    model.compile(backend="aot_eager", **options)
    return model


def each(model, **options):
    for block in list(model)[1:]:
        block.compile(backend="aot_eager", **options)
    return model


def around(model, **options):
    return torch.compile(model, backend="aot_eager", **options)


def trained(model, call):
    """Train two micro-batches and return Dynamo's counters."""
    counters.clear()
    x = torch.arange(6)
    for _ in range(2):
        call(x).square().sum().backward()
    return {name: dict(counters[name]) for name in ("frames", "graph_break")} | {
        "graphs": counters["stats"]["unique_graphs"]
    }


@pytest.mark.parametrize(
    ("make", "compiled"),
    [
        (torch_only, in_place),
        (torch_only, around),
        (blocks, in_place),
        (blocks, functools.partial(each, fullgraph=True)),
        (blocks, functools.partial(around, fullgraph=True)),
        (functools.partial(stacked, Broken, Broken), each),
        (experts, functools.partial(each, fullgraph=True)),
        (functools.partial(stacked, BrokenPicks, BrokenPicks), around),
        (functools.partial(stacked, RoutedPicks, RoutedPicks), each),
        (conv1d, each),
    ],
)
def test_as_many_graphs_and_breaks_as_plain_pytorch(make, compiled):
    model = make()
    twin = copy.deepcopy(model)  # for plain PyTorch
    counted = trained(twin, compiled(twin))
    torch.compiler.reset()
    optimizer = wrap(model)
    assert all(slot.paths for slot in optimizer._slots if slot.param.dim() == 2)
    assert trained(model, compiled(model)) == counted
    assert counted["graphs"] or compiled is in_place  # the number depends on torch's version
    assert all(slot.paths == ("grouped",) for slot in optimizer._slots if slot.param.dim() == 3)
    assert_same_gradients(model, twin)


def test_compiled_and_other_micro_batches_of_experts_add_up():
    model = experts()
    twin, optimizer = copy.deepcopy(model), wrap(model)
    compiled = torch.compile(model[1], backend="eager")
    for micro_batch in range(4):
        for net in (model, twin):
            hidden = net[0](torch.arange(6))
            hidden = compiled(hidden) if net is model and micro_batch % 2 else net[1](hidden)
            net[2](hidden).square().sum().backward()
    assert optimizer._slots[1].paths == ("grouped",)
    assert_same_gradients(model, twin)


@pytest.mark.filterwarnings("ignore:model= was given, but this optimizer has the weight of none")
@pytest.mark.parametrize("choice", ["", "0"], ids=["engine", "python"])
def test_dynamo_does_not_compile_our_backward_in_a_compiled_loop(choice, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", choice)
    model = torch_only()
    model.append(nn.LayerNorm(3))  # hooks take its gradients
    _optimizer = wrap(model)
    call = torch.compiler.disable(model.__call__)

    def forward_backward(x):
        call(x).square().sum().backward()

    convert_frame = torch._dynamo.convert_frame
    with mock.patch.object(convert_frame, "_compile", wraps=convert_frame._compile) as compiled:
        torch.compile(forward_backward, backend="eager")(torch.arange(6))
    codes = [call.args[0] for call in compiled.call_args_list]
    assert forward_backward.__code__ in codes
    assert not [code for code in codes if PACKAGE in Path(code.co_filename).parents]
