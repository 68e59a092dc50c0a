"""`model=` and stacked weights of experts: the same training, without a gradient of all experts."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from experts_models import EXPERTS, INNER, WIDTH, Experts, Mixture, batch, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedacc
from fusedacc.nn.patched_forward import PATCHED
from fusedacc.nn.stacked import StackedWeight
from fusedacc.traffic import TrafficMeter

K = 4
#: How a model reads its experts, and how stock's twin of it does.
TWINS = {"loop": "loop", "grouped": "stock"}


def wrapped(model, steps=K, inner=None, **options):
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if inner is None else inner
    return fusedacc.AccumulatingOptimizer(inner, steps, model=model, **options)


def pair(how, steps=None, inward=False, **options):
    """A model that accumulates in its backward, its wrapper, and stock's twin."""
    model, twin = Mixture(how, inward), Mixture(TWINS[how], inward)
    return model, wrapped(model, steps, **options), twin


def paths(optimizer):
    """By the parameters' names."""
    rows = [line.split() for line in optimizer.explain().splitlines()]
    return {row[0]: row[2] for row in rows if row and row[0].split(".")[0] in ("enter", "experts", "leave")}


def assert_same_gradients(model, twin, **tolerances):
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(
                ours.grad, theirs.grad, **tolerances, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("inward", [False, True])
@pytest.mark.parametrize("how", TWINS)
def test_windows_are_stocks(how, inward):
    model, optimizer, twin = pair(how, inward=inward)
    stock = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for window in range(3):
        for index in range(K):
            loss_of(model, K * window + index).backward()
            loss_of(twin, K * window + index).backward()
        assert_same_gradients(model, twin, rtol=1e-5, atol=1e-7)
        if how == "loop" and window == 0:  # later the Linear layers have parted by a rounding
            assert torch.equal(model.experts.up.grad, twin.experts.up.grad), window
        for each in (optimizer, stock):
            each.step()
            each.zero_grad()
    found = paths(optimizer)
    # Of another shape than the parameter, a view of it is no parameter of anybody's.
    taken = "multi_tensor" if how == "grouped" and inward else "grouped"
    assert found["experts.up"] == found["experts.down"] == taken
    assert found["experts.bias"] == "multi_tensor"
    assert found["enter.weight"] == "gemm"


@pytest.mark.parametrize("how", TWINS)
@pytest.mark.parametrize("options", [{}, {"accumulate_dtype": torch.bfloat16}], ids=["float32", "bfloat16"])
def test_bfloat16_weights(how, options):
    """Against the float64 sums of the gradients of the same model."""
    model = Mixture(how, dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    optimizer = wrapped(model, **options)
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in twin.parameters()]
    for index in range(K):
        loss_of(model, index).backward()
        twin.zero_grad()
        (loss_of(twin, index) / K).backward()
        for total, p in zip(sums, twin.parameters(), strict=True):
            total += p.grad
        if index < K - 1:
            optimizer.step()
    for (name, p), total in zip(model.named_parameters(), sums, strict=True):
        error = (p.grad.double() - total).norm() / total.norm()
        assert error < (0.02 if options else 0.005), name


@pytest.mark.parametrize("how", TWINS)
def test_no_gradient_of_all_experts_is_written(how):
    """8 bytes a parameter of experts that have rows, 0 of the others, but 4 in the first micro-batch."""
    model = Mixture(how)
    optimizer = wrapped(model, steps=8)
    loss_of(model, 0).backward()
    optimizer.step()
    _, experts = batch(1)
    used = experts.unique().numel()
    with TrafficMeter(optimizer) as meter:
        loss_of(model, 1).backward()
        optimizer.step()
    op = meter.as_dict()["by_op"][
        "fusedacc::grouped_accumulate_" if how == "grouped" else "fusedacc::scale_accumulate_"
    ]
    both = 2 * used * WIDTH * INNER * 4
    # Next to them the loops' pass adds the biases' gradients.
    others = 4 * sum(p.numel() for name, p in model.named_parameters() if "bias" in name)
    assert both <= op["written_bytes"] <= both + (others if how == "loop" else 0)
    rows = len(experts) * 2 * (WIDTH + INNER) * 4 + 2 * EXPERTS * 4
    assert op["read_bytes"] <= both + rows if how == "grouped" else 2 * both + 2 * others
    assert not meter.uncounted


def test_modules_that_take_no_expert_out_are_left_alone():
    model = Mixture("dense")
    optimizer = wrapped(model)
    loss_of(model, 0).backward()
    optimizer.step()
    assert paths(optimizer)["experts.up"] == "multi_tensor"
    assert PATCHED not in model.experts.__dict__
    assert "forward" not in model.experts.__dict__


INDICES = {
    "int": 2,
    "negative": -1,
    "0-dim": torch.tensor(3),
    "numpy": np.int64(1),
    "bool": True,
    "slice": slice(1, 3),
    "tuple": (2, slice(None), 1),
    "tensor": torch.tensor([0, 0, 5]),
    "mask": torch.tensor([True, False, True, False, False, True]),
    "none": None,
}


class Indexed(nn.Module):
    def __init__(self, index) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.arange(EXPERTS * 12.0).view(EXPERTS, 3, 4) / 10)
        self.index = index

    def forward(self):
        return self.stack[self.index].sin().sum() + self.stack[0].sum()


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_whatever_stands_in_brackets(index):
    model, twin = Indexed(index), Indexed(index)
    optimizer = wrapped(model, None)
    for _ in range(2):
        model().backward()
        twin().backward()
    assert_same_gradients(model, twin)
    assert optimizer._slots[0].paths == ("grouped",)


def test_an_index_out_of_range_is_refused_as_by_stock():
    model = Indexed(EXPERTS)
    _optimizer = wrapped(model)
    with pytest.raises(IndexError, match="out of bounds"):
        model()
    assert "stack" not in model.__dict__


class Curious(nn.Module):
    """Looks at its parameter from all sides while it is shadowed."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(EXPERTS, 3, 4))
        self.stack.note = "ours"

    def forward(self):
        stack = self.stack
        assert isinstance(stack, nn.Parameter)
        assert isinstance(stack, StackedWeight)
        assert stack.note == "ours"
        assert stack.is_leaf
        assert stack.requires_grad
        assert stack.grad is None
        assert stack.shape == (EXPERTS, 3, 4)
        assert len(stack) == EXPERTS
        assert stack.dtype == torch.float32
        stack.seen = True
        stack.data = stack.data * 2
        with torch.no_grad():
            stack.clamp_(-1, 1)
            assert type(stack[0]) is torch.Tensor
            assert stack[0].grad_fn is None
        return stack[1].sum() + torch.stack(list(stack)).sum() + (stack * 2).sum()


def test_a_stand_in_passes_for_the_parameter():
    model = Curious()
    twin = copy.deepcopy(model)
    twin.stack.note = "ours"
    _optimizer = wrapped(model, None)
    before = model.stack.detach().clone()
    model().backward()
    assert model.stack.seen
    assert "stack" not in model.__dict__
    assert torch.equal(model.stack, (before * 2).clamp(-1, 1))
    wanted = torch.full((EXPERTS, 3, 4), 3.0)
    wanted[1] += 1
    assert torch.equal(model.stack.grad, wanted)


class Opaque(torch.autograd.Function):
    """Sees tensors, and no subclass of theirs."""

    @staticmethod
    def forward(ctx, stack):
        return torch.Tensor.sum(stack)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(EXPERTS, 3, 4) * 5


def test_a_function_that_is_handed_a_stand_in_differentiates_by_the_parameter():
    class Net(Curious):
        def forward(self):
            return Opaque.apply(self.stack) + self.stack[0].sum()

    model = Net()
    _optimizer = wrapped(model, None)
    for _ in range(2):
        model().backward()
    wanted = torch.full((EXPERTS, 3, 4), 10.0)
    wanted[0] += 2
    assert torch.equal(model.stack.grad, wanted)


@pytest.mark.parametrize("how", TWINS)
class TestAutograd:
    def test_both_kinds_of_checkpoint(self, how):
        for reentrant in (True, False):
            model, _optimizer, twin = pair(how)
            for index in range(3):
                for each in (model, twin):
                    x, experts = batch(index)
                    hidden = each.enter(x)
                    out = checkpoint(each.experts, hidden, experts, use_reentrant=reentrant)
                    each.leave(out).pow(2).mean().backward()
            assert_same_gradients(model, twin)

    def test_a_weight_that_two_modules_share(self, how):
        class Shared(nn.Module):
            def __init__(self, how):
                super().__init__()
                torch.manual_seed(0)
                self.first, self.second = Experts(how), Experts(how)
                self.second.up = self.first.up

            def forward(self, x, experts):
                return self.second(self.first(x, experts), experts.flip(0))

        model, twin = Shared(how), Shared(TWINS[how])
        _optimizer = wrapped(model, None)
        for index in range(3):
            _, experts = batch(index)
            x = torch.randn(len(experts), WIDTH, generator=torch.Generator().manual_seed(index))
            for each in (model, twin):
                each(x, experts).pow(2).mean().backward()
        assert_same_gradients(model, twin, rtol=1e-5, atol=1e-6)

    def test_frozen_and_trained_again(self, how):
        model, optimizer, twin = pair(how)
        for index in range(4):
            for each in (model, twin):
                each.experts.up.requires_grad_(index % 2 == 0)
                loss_of(each, index).backward()
        assert_same_gradients(model, twin)
        assert optimizer.explain()

    def test_a_hook_on_the_weight_sees_its_gradient(self, how):
        model, _optimizer, twin = pair(how)
        for each in (model, twin):
            each.experts.up.register_hook(lambda gradient: gradient * 2)
        for index in range(2):
            for each in (model, twin):
                loss_of(each, index).backward()
        assert_same_gradients(model, twin)

    def test_grad_by_the_weight_adds_nothing(self, how):
        model, _optimizer, twin = pair(how)
        ours, theirs = (torch.autograd.grad(loss_of(each, 0), each.experts.up)[0] for each in (model, twin))
        torch.testing.assert_close(ours, theirs)
        assert all(p.grad is None for p in model.parameters())

    def test_a_second_derivative(self, how):
        model, _optimizer, twin = pair(how)
        for each in (model, twin):
            weights = [each.experts.up, each.experts.down]
            first = torch.autograd.grad(loss_of(each, 0), weights, create_graph=True)
            sum(gradient.pow(2).sum() for gradient in first).backward()
        assert_same_gradients(model, twin, rtol=1e-4, atol=1e-6)

    def test_evaluation_and_ignored_backwards(self, how):
        model, optimizer, twin = pair(how)
        with torch.no_grad():
            torch.testing.assert_close(model(*batch(0)), twin(*batch(0)), rtol=0, atol=0)
        with optimizer.ignore():
            loss_of(model, 7).backward()
        model.zero_grad()
        for each in (model, twin):
            loss_of(each, 0).backward()
        assert_same_gradients(model, twin)

    def test_parameters_that_stand_in_for_the_modules_own(self, how):
        model, _optimizer, twin = pair(how)
        others = {name: p.detach() * 2 for name, p in model.named_parameters()}
        ours, theirs = (torch.func.functional_call(each, others, batch(0)) for each in (model, twin))
        assert torch.equal(ours, theirs)

    def test_weighted_means(self, how):
        model, optimizer, twin = pair(how, steps=3, reduction="weighted")
        for index in range(3):
            with optimizer.accumulate(weight=index + 1):
                loss_of(model, index).backward()
            (loss_of(twin, index) * (index + 1) / 6).backward()
            if index < 2:
                optimizer.step()
        assert_same_gradients(model, twin, rtol=1e-5, atol=1e-7)

    def test_a_mean_by_flush(self, how):
        """The unit of a window's sums changes at its end: all experts' with it."""
        model, optimizer, twin = pair(how, steps=4)
        stock = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
        for index in range(3):
            loss_of(model, index).backward()
            optimizer.step()
            (loss_of(twin, index) / 3).backward()
        optimizer.flush()
        stock.step()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_closing_gives_the_modules_back():
    model = Mixture("loop")
    optimizer = wrapped(model)
    assert PATCHED in model.experts.__dict__
    optimizer.close()
    assert PATCHED not in model.experts.__dict__
    assert "forward" not in model.experts.__dict__
    grouped = Mixture("grouped")
    closed = wrapped(grouped)
    closed.close()
    loss_of(grouped, 0).backward()
    twin = Mixture("stock")
    loss_of(twin, 0).backward()
    assert_same_gradients(grouped, twin, rtol=0, atol=0)


def test_copies_and_pickles_hold_nothing_of_ours():
    model = Mixture("loop")
    optimizer = wrapped(model)
    loss_of(model, 0).backward()
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model.experts)):
        for module in made.modules():
            assert not {PATCHED, "up", "down"} & set(module.__dict__)
    stream = io.BytesIO()
    torch.save(model, stream)
    assert optimizer.micro_step == 1 or optimizer.micro_step == 0


def test_an_exception_in_the_forward_leaves_no_stand_in():
    model = Mixture("loop")
    _optimizer = wrapped(model)
    with pytest.raises(RuntimeError):
        model.experts(torch.zeros(3, WIDTH + 1), torch.zeros(3, dtype=torch.int64))
    assert not {"up", "down"} & set(model.experts.__dict__)


def test_a_wrapper_without_model_leaves_grouped_linear_stocks():
    model, twin = Mixture("grouped"), Mixture("stock")
    _optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for each in (model, twin):
        loss_of(each, 0).backward()
    assert_same_gradients(model, twin, rtol=0, atol=0)


def test_grouped_linear_ignores_rows_behind_the_last_experts():
    weight = nn.Parameter(torch.randn(3, 8, 16))
    _optimizer = wrapped(nn.ParameterList([weight]), None)
    rows = torch.randn(7, 16)
    rows[5:] = torch.nan
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    output = fusedacc.nn.functional.grouped_linear(rows, weight, offs)
    gradient = torch.randn_like(output)
    gradient[5:] = torch.nan
    output.backward(gradient)
    wanted = torch.stack([gradient[:2].t() @ rows[:2], torch.zeros(8, 16), gradient[2:5].t() @ rows[2:5]])
    torch.testing.assert_close(weight.grad, wanted)


@pytest.mark.parametrize(
    ("rows", "offs"),
    [
        (torch.zeros(4, 16, dtype=torch.float64), torch.tensor([1, 2, 4], dtype=torch.int32)),
        (torch.zeros(4, 12), torch.tensor([1, 2, 4], dtype=torch.int32)),
        (torch.zeros(4, 16), torch.tensor([1, 2, 4])),
        (torch.zeros(4, 16), torch.tensor([2, 4], dtype=torch.int32)),
    ],
    ids=["dtype", "width", "int64", "too few"],
)
def test_grouped_linear_refuses_what_stock_refuses(rows, offs):
    weight = nn.Parameter(torch.randn(3, 8, 16))
    _optimizer = wrapped(nn.ParameterList([weight]), None)
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        torch.nn.functional.grouped_mm(rows, weight.transpose(-2, -1), offs=offs)
    with pytest.raises(type(theirs.value)) as ours:
        fusedacc.nn.functional.grouped_linear(rows, weight, offs)
    assert str(ours.value) == str(theirs.value)


@torch.jit.script
def scripted(x, weight):
    return torch.tanh(x @ weight[0]) @ weight[1]


@torch.compile(backend="eager")
def compiled(x, weight):
    return torch.tanh(x @ weight[0]) @ weight[1]


READERS = {
    "vmap": lambda x, w: torch.vmap(lambda each: torch.tanh(x @ each))(w).sum(0),
    "vmap, and an expert": lambda x, w: torch.vmap(lambda each: x @ each)(w).sum(0) * w[2].sum(),
    "func.grad": lambda x, w: torch.func.grad(lambda v: (x @ v[1]).pow(2).sum())(w)[1] + w[0],
    "batched": lambda x, w: (
        torch.baddbmm(torch.zeros(6, 3, 4), x.expand(6, 3, 4), w).sum(0) + w.view(24, 4)[3]
    ),
    "checkpoint": lambda x, w: checkpoint(lambda y: torch.tanh(y @ w[1]) @ w[3], x, use_reentrant=False),
    "scripted": scripted,
    "compiled": compiled,
    "iterated": lambda x, w: sum(torch.tanh(x @ each) for each in w),
    "in place": lambda x, w: torch.zeros(3, 4).addmm_(x, w[4]).add_(w[5].sum()),
}


class Reading(nn.Module):
    def __init__(self, read) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.read = nn.Parameter(torch.randn(6, 4, 4)), read

    def forward(self, x):
        return self.read(x, self.weight)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_whatever_a_forward_does_with_it(read):
    model, twin = Reading(read), Reading(read)
    _optimizer = wrapped(model, None)
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(3):
        for each in (model, twin):
            each(x).pow(2).sum().backward()
    assert_same_gradients(model, twin, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("how", TWINS)
def test_other_backends(how, backend):
    model, optimizer, twin = pair(how, backend=backend)
    for index in range(2):
        for each in (model, twin):
            loss_of(each, index).backward()
    assert_same_gradients(model, twin, rtol=1e-5, atol=1e-6)
    assert optimizer._slots[-2].paths == ("grouped",)
