"""A module whose weight, bias or options are no plain attributes trains with `model=` as in plain PyTorch.

An attribute may be a pruned or parametrized tensor, a buffer, a plain tensor, a property, what a hook or a
`__getattr__` provides, or something that hides a parameter. It may become so before the wrapper is created,
in the middle of a window, or between a forward and its backward.
"""

import copy
import functools

import pytest
import sweeps
import torch
from kept_casts import Conv1D
from torch import nn
from torch._dynamo.utils import counters
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune

import fusedacc

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler", "small_layers_too"),
    pytest.mark.filterwarnings("ignore:.*(weight|spectral)_norm.*deprecated"),
]
STEPS, MICRO_BATCHES = 2, 6


class Picks(nn.Module):
    """Experts that are selected one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 6, 6)), nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return sum(torch.tanh(x @ self.weight[expert] + self.bias[expert]) for expert in (0, 2))


class Loss(nn.Module):
    """A head with its loss, as a module with one input."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.LinearCrossEntropyLoss(6, 7, bias=True)

    def forward(self, x):
        return self.loss(x, torch.arange(len(x), device=x.device) % 7)


#: For each kind of module: how to make it, and its input, made of (4, 6) numbers.
KINDS = {
    "linear": (lambda: nn.Linear(6, 5), lambda x: x),
    "conv1d": (lambda: Conv1D(5, 6), lambda x: x),
    "embedding": (lambda: nn.Embedding(9, 5, padding_idx=2), lambda x: (x * 9).long().remainder(9)),
    "convolution": (lambda: nn.Conv2d(2, 4, 2), lambda x: x.reshape(1, 2, 3, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 4, 2), lambda x: x.reshape(1, 2, 3, 4)),
    "experts": (Picks, lambda x: x),
    "head": (Loss, lambda x: x),
}
if not hasattr(nn, "LinearCrossEntropyLoss"):
    del KINDS["head"]


class Net(nn.Module):
    def __init__(self, kind, dtype=torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        make, self.shaped = KINDS[kind]
        self.enter, self.changed = nn.Linear(6, 6), make()
        self.to(dtype)
        for param in self.parameters():
            nn.init.normal_(param, std=0.3)

    @property
    def owner(self):
        """The module that has weight and bias."""
        return self.changed.loss.linear if isinstance(self.changed, Loss) else self.changed

    @property
    def with_options(self):
        return self.changed.loss if isinstance(self.changed, Loss) else self.changed

    def forward(self, x):
        if isinstance(self.changed, nn.Embedding):
            return self.changed(self.shaped(x)) * self.enter(x).mean()
        return self.changed(self.shaped(self.enter(x)))


# Ways to provide an attribute. Each changes the module.


class Half(nn.Module):
    def forward(self, value):
        return value * 0.5


class Counting(nn.Module):
    """A parametrization that computes another value each time, as spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("reads", torch.zeros(()))

    def forward(self, value):
        with torch.no_grad():
            self.reads += 1
        return value * (1 + self.reads / 10)


def subclass(module, **attributes):
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **attributes})


def pruned(module, name):
    prune.l1_unstructured(module, name, 0.25)


def parametrized(module, name):
    parametrize.register_parametrization(module, name, Half())


def counted(module, name):
    parametrize.register_parametrization(module, name, Counting())


def buffer(module, name):
    value = getattr(module, name).detach() + 1
    delattr(module, name)
    module.register_buffer(name, value)


def constant(module, name):
    value = getattr(module, name).detach() + 1
    delattr(module, name)
    setattr(module, name, value)


def computed_by_a_hook(module, name):
    raw = getattr(module, name)
    delattr(module, name)
    module.raw = raw
    module.register_forward_pre_hook(lambda module, _: setattr(module, name, torch.tanh(module.raw)))
    setattr(module, name, torch.tanh(raw))


def hidden_by_an_entry(module, name):
    module.__dict__[name] = getattr(module, name).detach() * 0.5


def hidden_by_a_parameter(module, name):
    """The entry is a parameter that the module has under another name."""
    module.other = nn.Parameter(getattr(module, name).detach() * 0.5)
    module.__dict__[name] = module.other


def a_property(module, name):
    subclass(module, **{name: property(lambda module: module._parameters[name] * 0.5)})


def a_class_attribute(module, name):
    subclass(module, **{name: getattr(module, name).detach() * 0.5})


def by_getattr(module, name):
    def __getattr__(module, asked):
        found = nn.Module.__getattr__(module, asked)
        return found * 0.5 if asked == name else found

    subclass(module, __getattr__=__getattr__)


def by_getattribute(module, name):
    def __getattribute__(module, asked):
        found = nn.Module.__getattribute__(module, asked) if asked != name else None
        return module._parameters[name] * 0.5 if asked == name else found

    subclass(module, __getattribute__=__getattribute__)


def another_parameter(module, name):
    setattr(module, name, nn.Parameter(getattr(module, name).detach() * 0.5))


def of_a_subclass(module, name):
    class Marked(torch.Tensor):
        pass

    value = getattr(module, name).detach()
    delattr(module, name)
    setattr(module, name, value.as_subclass(Marked))


def weight_norm(module, name):
    parametrizations.weight_norm(module, name)


def old_weight_norm(module, name):
    torch.nn.utils.weight_norm(module, name)


def spectral_norm(module, name):
    torch.manual_seed(3)
    parametrizations.spectral_norm(module, name)


def old_spectral_norm(module, name):
    torch.manual_seed(3)
    torch.nn.utils.spectral_norm(module, name)


def absent(module, name):
    setattr(module, name, None)


def broadcast(module, name):
    delattr(module, name)
    module.raw = nn.Parameter(torch.full((1,), 0.5, dtype=module.weight.dtype))
    setattr(module, name, module.raw)


def of_two_dimensions(module, name):
    raw = getattr(module, name).detach()[None]
    delattr(module, name)
    module.register_buffer(name, raw)


def another_forward(module, name):
    """The module's class gets another forward, which reads the attribute differently."""
    kind = type(module)

    def forward(module, *inputs):
        return kind.forward(module, *inputs) * getattr(module, name).mean()

    subclass(module, forward=forward)


ANY = (pruned, parametrized, counted, buffer, constant, computed_by_a_hook, hidden_by_an_entry)
ANY += (hidden_by_a_parameter, a_property, a_class_attribute, by_getattr, by_getattribute, another_parameter)
ANY += (of_a_subclass, another_forward, old_weight_norm)
WEIGHTS = (*ANY, weight_norm, spectral_norm, old_spectral_norm)
BIASES = (*ANY, absent, broadcast, of_two_dimensions)

#: Changes that register a hook.
HOOKED = (pruned, computed_by_a_hook, old_weight_norm)
#: Combinations that plain PyTorch cannot run, or that change nothing.
IMPOSSIBLE = {
    *((kind, "bias", absent) for kind in ("conv1d", "experts")),
    *((kind, "bias", broadcast) for kind in ("convolution", "transposed", "experts", "head")),
    *((kind, "bias", of_two_dimensions) for kind in ("convolution", "transposed", "experts")),
    ("embedding", "weight", old_spectral_norm),
    # The loss does not call its Linear, so no hook of the Linear runs.
    *(("head", "weight", change) for change in (*HOOKED, another_forward, old_spectral_norm)),
    *(("head", "bias", change) for change in (*HOOKED, another_forward)),
    # The loss reads a bias twice.
    ("head", "bias", counted),
}
CASES = [
    (kind, name, change)
    for kind in KINDS
    for name, changes in (("weight", WEIGHTS), ("bias", BIASES))
    for change in changes
    if (kind, name, change) not in IMPOSSIBLE and not (kind == "embedding" and name == "bias")
]
#: When the attribute changes: before the wrapper is created, before a micro-batch, or in one.
TIMES = ("before", "a window's start", "the middle of a window", "before a backward")
#: Changes that write the parameter, which a backward would notice.
WRITING = (parametrized, counted, weight_norm, spectral_norm)


def times_of(change):
    return TIMES[: -1 if change in WRITING else None]


def train(net, change, when, wrap, call=None, **cast):
    """Train, and return all outputs and the parameters. wrap: whether to use a wrapper."""
    generator, outputs = torch.Generator().manual_seed(1), []
    if when == "before":
        change(net)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = inner
    if wrap:
        optimizer = fusedacc.AccumulatingOptimizer(inner, STEPS, model=net, keep_casts=bool(cast))
    run = call(net) if call else net
    for index in range(MICRO_BATCHES):
        if (index, when) in ((2, "a window's start"), (3, "the middle of a window")):
            change(net)
        x = torch.rand(4, 6, generator=generator, dtype=torch.float64).to(net.enter.weight.dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(cast)):
            output = run(x)
        outputs.append(output.detach().double().as_subclass(torch.Tensor))
        if (index, when) == (3, "before a backward"):
            change(net)
        loss = output.double().square().mean()
        (loss if wrap else loss / STEPS).backward()
        if wrap or index % STEPS == STEPS - 1:
            optimizer.step()
            optimizer.zero_grad()
    return outputs, {name: value.detach().double() for name, value in net.state_dict().items()}


def assert_alike(kind, change, when, call=None, plain_call=None, dtype=torch.float64, **cast):
    plain = train(Net(kind, dtype), change, when, False, plain_call, **cast)
    ours = train(Net(kind, dtype), change, when, True, call, **cast)
    few = {"rtol": 0.03, "atol": 0.03} if cast else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(ours, plain, **few, msg=lambda text: f"{when}: {text}")


compiled = functools.partial(torch.compile, backend="aot_eager")


def named(value):
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("kind", "name", "change"), CASES, ids=named)
def test_weights_and_biases(kind, name, change):
    for when in times_of(change):
        assert_alike(kind, lambda net: change(net.owner, name), when)


@pytest.mark.sweep(pairs=False)
@pytest.mark.parametrize(("kind", "name", "change"), CASES, ids=named)
def test_weights_and_biases_with_hooks_in_python(kind, name, change, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", "0")
    test_weights_and_biases(kind, name, change)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "name", "change"), CASES, ids=named)
def test_weights_and_biases_under_autocast(kind, name, change):
    for when in times_of(change):
        assert_alike(kind, lambda net: change(net.owner, name), when, dtype=torch.float32, keep_casts=True)


@pytest.mark.sweep(pairs=False)
@pytest.mark.parametrize(("kind", "name", "change"), CASES, ids=named)
def test_weights_and_biases_in_compiled_models(kind, name, change):
    if change in (of_a_subclass, by_getattribute):
        pytest.skip("plain PyTorch does not compile it")
    # Compiled by plain PyTorch, a model does not notice a new entry of __dict__, and its backward reads a
    # buffer after the forward has changed it.
    unlike_eager = counted, hidden_by_an_entry, hidden_by_a_parameter
    plain = compiled if change in unlike_eager else None
    for when in ("before", "the middle of a window"):
        torch.compiler.reset()
        assert_alike(kind, lambda net: change(net.owner, name), when, compiled, plain)


@pytest.mark.parametrize("change", [buffer, computed_by_a_hook, parametrized])
def test_as_many_graphs_as_plain_pytorch(change):
    graphs = []
    for wrap in (False, True):
        torch.compiler.reset()
        counters.clear()
        train(Net("linear"), lambda net: change(net.owner, "bias"), "before", wrap, compiled)
        graphs.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("change", [pruned, computed_by_a_hook] if sweeps.FULL else [pruned])
def test_biases_with_inductor(change):
    compile = functools.partial(torch.compile, backend="inductor")
    assert_alike("linear", lambda net: change(net.owner, "bias"), "the middle of a window", compile)


def sets(**attributes):
    return lambda module: module.__dict__.update(attributes)


def has_properties(**attributes):
    """The class of the module has properties, which come before the module's own attributes."""
    own = {name: property(lambda _, value=value: value) for name, value in attributes.items()}
    return lambda module: subclass(module, **own)


OPTIONS = {
    "embedding": (
        {"padding_idx": 4},
        {"padding_idx": None},
        {"padding_idx": -3},
        {"max_norm": 0.3},
        {"max_norm": 0.3, "norm_type": 1.0},
        {"scale_grad_by_freq": True},
        {"sparse": True},
    ),
    "convolution": ({"stride": (2, 1)}, {"dilation": (1, 2)}, {"padding": (1, 0)}),
    "transposed": (
        {"stride": (2, 1)},
        {"dilation": (1, 2)},
        {"padding": (1, 0)},
        {"output_padding": (1, 0), "stride": (2, 1)},
        {"kernel_size": 2},
    ),
    "head": ({"reduction": "sum"}, {"ignore_index": 3}, {"label_smoothing": 0.25}),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, own) for kind, choices in OPTIONS.items() if kind in KINDS for own in choices],
    ids=str,
)
@pytest.mark.parametrize("way", [sets, has_properties])
def test_options(kind, options, way):
    set_options = way(**options)

    def change(net):
        set_options(net.with_options)

    for when in TIMES:
        assert_alike(kind, change, when)
        assert_alike(kind, change, when, dtype=torch.float32, keep_casts=True)


def test_a_padding_index_that_does_not_exist():
    net = Net("embedding")
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(net.parameters()), STEPS, model=net)
    net.changed.padding_idx = 20
    for run in (net, compiled(net)):
        with pytest.raises((AssertionError, torch._dynamo.exc.TorchRuntimeError), match="num_embeddings"):
            run(torch.rand(4, 6, dtype=torch.float64))


def test_a_conv1d_of_another_width():
    net = Net("conv1d")
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(net.parameters()), STEPS, model=net)
    net.changed.nf = 4
    with pytest.raises(RuntimeError, match="shape"):
        net(torch.rand(4, 6, dtype=torch.float64))


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", ["linear", "conv1d", "convolution", "experts"])
def test_copies_and_calls_with_other_parameters(kind, name):
    """Copies after a change, and functional_call, see what they see in plain PyTorch."""
    results = []
    x = torch.rand(4, 6, dtype=torch.float64)
    for wrap in (False, True):
        net = Net(kind)
        if wrap:
            optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(net.parameters()), STEPS, model=net)
        other = {f"changed.{name}": (getattr(net.owner, name).detach() * 3).requires_grad_()}
        called = functional_call(net, other, (x,))
        called.sum().backward()
        constant(net.owner, name)
        copied = copy.deepcopy(net)(x)
        results.append((called, *(value.grad for value in other.values()), copied, net(x)))
    torch.testing.assert_close(*results)
    optimizer.close()


def test_explain_names_calls_that_pytorch_computes():
    def noted(change, name):
        net = Net("linear")
        optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(net.parameters()), STEPS, model=net)
        assert "PyTorch computed that call" not in optimizer.explain()
        change(net.owner, name)
        net(torch.rand(4, 6, dtype=torch.float64))
        return optimizer.explain()

    assert "another tensor as the module's weight" in noted(pruned, "weight")
    assert "a bias of another dtype or shape" in noted(of_two_dimensions, "bias")
    assert "PyTorch computed that call" not in noted(pruned, "bias")


def test_explain_names_a_weight_that_is_hidden():
    net = Net("linear")
    a_property(net.owner, "weight")
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(net.parameters()), STEPS, model=net)
    assert "hides it" in optimizer.explain()
    assert "forward" not in net.owner.__dict__
