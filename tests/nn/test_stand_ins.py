"""The tensor that replaces a stacked weight in a forward: every use of it gives PyTorch's gradients."""

import copy
import pickle

import numpy as np
import pytest
import torch
from experts_models import EXPERTS, WIDTH, Mixture, wrapped
from loops import assert_same_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedacc.nn.stacked import StackedWeight

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


def assert_trains_as_grouped(model: nn.Module, twin: nn.Module) -> None:
    """Check that gradients equal plain PyTorch's, and that the experts add theirs by themselves."""
    optimizer = wrapped(model, None)
    for _ in range(2):
        model().backward()
        twin().backward()
    assert_same_gradients(model, twin)
    assert optimizer._slots[0].paths == ("grouped",)


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_every_kind_of_index(index):
    assert_trains_as_grouped(Indexed(index), Indexed(index))


def test_an_index_out_of_range_raises_pytorchs_error():
    model = Indexed(EXPERTS)
    _optimizer = wrapped(model)
    with pytest.raises(IndexError, match="out of bounds"):
        model()
    assert "stack" not in model.__dict__


class Curious(nn.Module):
    """Inspects its parameter in many ways while it is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(EXPERTS, 3, 4))
        self.stack.note = "ours"

    def forward(self):
        stack = self.stack
        assert isinstance(stack, nn.Parameter)
        assert isinstance(stack, StackedWeight)
        assert stack.note == "ours"
        assert (stack.is_leaf, stack.requires_grad, stack.grad) == (True, True, None)
        assert (stack.shape, len(stack), stack.dtype) == ((EXPERTS, 3, 4), EXPERTS, torch.float32)
        stack.seen = True
        stack.data = stack.data * 2
        with torch.no_grad():
            stack.clamp_(-1, 1)
            assert type(stack[0]) is torch.Tensor
            assert stack[0].grad_fn is None
        return stack[1].sum() + torch.stack(list(stack)).sum() + (stack * 2).sum()


def test_the_stand_in_behaves_like_the_parameter():
    model = Curious()
    _optimizer = wrapped(model, None)
    before = model.stack.detach().clone()
    model().backward()
    assert model.stack.seen
    assert "stack" not in model.__dict__
    assert torch.equal(model.stack, (before * 2).clamp(-1, 1))
    wanted = torch.full((EXPERTS, 3, 4), 3.0)
    wanted[1] += 1
    assert torch.equal(model.stack.grad, wanted)


class Copied(Indexed):
    """Copies its parameter and itself in its forward."""

    def forward(self):
        copies = copy.deepcopy(self.stack), copy.copy(self.stack), pickle.loads(pickle.dumps(self.stack))
        assert all(type(each) is nn.Parameter for each in copies)
        twin = copy.deepcopy(self)
        assert "stack" not in twin.__dict__
        assert repr(self.stack).startswith("Parameter containing:")
        return sum(each.sum() for each in (*copies, twin.stack)) * self.stack[0].sum()


def test_copies_of_a_stand_in_are_copies_of_the_parameter():
    assert_trains_as_grouped(Copied(0), Copied(0))


class Opaque(torch.autograd.Function):
    """Accepts only plain tensors, not subclasses."""

    @staticmethod
    def forward(ctx, stack):
        return torch.Tensor.sum(stack)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(EXPERTS, 3, 4) * 5


def test_an_autograd_function_with_a_stand_in_differentiates_by_the_parameter():
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
def test_every_use_in_a_forward(read):
    model, twin = Reading(read), Reading(read)
    _optimizer = wrapped(model, None)
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(3):
        for each in (model, twin):
            each(x).pow(2).sum().backward()
    assert_same_gradients(model, twin, rtol=1e-5, atol=1e-5)


def test_an_exception_in_the_forward_leaves_no_stand_in():
    model = Mixture("loop")
    _optimizer = wrapped(model)
    with pytest.raises(RuntimeError):
        model.experts(torch.zeros(3, WIDTH + 1), torch.zeros(3, dtype=torch.int64))
    assert not {"up", "down"} & set(model.experts.__dict__)
