"""`keep_casts=True`: a weight that changes between micro-batches is cast again, whatever changes it."""

import copy
import functools

import pytest
import torch
from kept_casts import BF16, FP16, autocast, casts_of, loss_of, make
from loops import assert_same_gradients
from torch import nn


def load(model, assign: bool = False) -> None:
    model[0].load_state_dict({"weight": torch.randn_like(model[0].weight)}, assign=assign)


def set_data(change):
    """Replace the weight's data."""
    return lambda model: setattr(model[0].weight, "data", change(model[0].weight.data))


#: Changes of a model with one layer. None requests another dtype from autocast.
CHANGES = {
    "add": lambda model: model[0].weight.detach().add_(1.0),
    "load": load,
    "assign": functools.partial(load, assign=True),
    "data": set_data(torch.randn_like),
    "transposed data": set_data(lambda data: data.transpose(0, 1)),
    "shrunk": set_data(lambda data: data[:3]),
    "fp16": lambda model: model.half(),
    "bf16": lambda model: model.bfloat16(),
    "frozen": lambda model: model[0].weight.requires_grad_(False),
    "swapped": lambda model: setattr(model[0], "weight", nn.Parameter(torch.randn_like(model[0].weight))),
    "other dtype": None,
}


@pytest.mark.parametrize("layer", [nn.Linear(6, 6, bias=False), nn.Conv1d(6, 6, 1, bias=False)], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_cast_again(change, layer):
    model, optimizer = make(lambda: nn.Sequential(copy.deepcopy(layer)))
    x = torch.randn(3, 6, *(() if isinstance(layer, nn.Linear) else (4,)), requires_grad=True)
    with autocast():
        model(x).float().sum().backward()
    optimizer.step()
    (before,) = casts_of(optimizer)
    dtype = FP16 if CHANGES[change] is None else BF16
    if CHANGES[change] is not None:
        CHANGES[change](model)
    x = x.detach().to(model[0].weight.dtype).requires_grad_()
    twin = copy.deepcopy(model)  # the model for plain PyTorch
    results = []
    for net in (model, twin):
        with autocast(dtype=dtype):
            results.append(net(x))
    assert results[0].dtype == dtype
    assert torch.equal(*results)
    if change not in ("bf16", "frozen", "swapped", "assign"):  # PyTorch runs it
        (after,) = casts_of(optimizer)
        assert after is not before


def first_micro_batch(kind, **options):
    model, optimizer = make(kind, **options)
    loss_of(model).backward()
    optimizer.step()
    return model, optimizer


def test_evaluation_and_ignored_backwards_use_the_changed_weight():
    model, optimizer = first_micro_batch("encoder")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    twin = copy.deepcopy(model)
    for context in (torch.no_grad, torch.inference_mode, optimizer.ignore):
        with context():
            assert torch.equal(loss_of(model, 7), loss_of(twin, 7)), context
    with optimizer.ignore():
        loss_of(model, 8).backward()
    loss_of(twin, 8).backward()
    assert_same_gradients(model, twin, rtol=0.02, atol=0.01)


def test_averages_that_are_swapped_in_for_evaluation():
    """The writes do not change the version."""
    model, optimizer = first_micro_batch("perceptron")
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.copy_(p.data * 2)
    with torch.no_grad():
        assert torch.equal(loss_of(model, 3), loss_of(copy.deepcopy(model), 3))
    for p, former in zip(model.parameters(), kept, strict=True):
        p.data.copy_(former)
    loss_of(model, 1).backward()
    optimizer.step()


def test_a_write_that_does_not_change_the_version_raises():
    for kind, name in (("perceptron", "3.weight"), ("convolutions", "0.weight")):
        model, optimizer = first_micro_batch(kind)
        weight = model.get_parameter(name)
        weight.data.copy_(weight.data + 1e-3)
        with pytest.raises(RuntimeError, match=rf"'{name}' was written.*discard\(\)"):
            loss_of(model, 1)
        optimizer.discard()
        loss_of(model, 1).backward()
        optimizer.step()


def test_an_update_between_micro_batches_that_does_not_change_the_version_raises():
    model, optimizer = first_micro_batch("perceptron", inner=functools.partial(torch.optim.AdamW, fused=True))
    version = model[0].weight._version
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.optimizer.step()
    if model[0].weight._version == version:
        with pytest.raises(RuntimeError, match=r"0.weight"):
            loss_of(model, 1)


def test_weights_of_few_elements():
    def build():
        return nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1), nn.Linear(1, 1), nn.Conv1d(1, 1, 1))

    model, optimizer = make(build)
    for _ in range(2):
        with autocast():
            y = model[2](model[1](model[0](torch.ones(3, 1)))).sum()
            (y + model[3](torch.ones(1, 1, 1)).sum()).float().backward()
        optimizer.step()
    model[0].weight.data.add_(1.0)
    with autocast(), pytest.raises(RuntimeError, match=r"'0.weight' was written"):
        model[0](torch.ones(3, 1))
