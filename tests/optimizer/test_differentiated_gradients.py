"""Inner optimizers that differentiate p.grad (AdaHessian), after `backward(create_graph=True)`."""

import copy

import pytest
import torch
from loops import LOW, loss_of, network, wrap
from torch import nn


class AdaHessian(torch.optim.Optimizer):
    """Scales the gradient by an estimate of the Hessian's diagonal, from products with random signs."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self._generator = torch.Generator().manual_seed(7)

    def step(self, closure=None):
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        signs = [torch.randint(0, 2, p.shape, generator=self._generator) * 2.0 - 1 for p in parameters]
        products = torch.autograd.grad(gradients, parameters, grad_outputs=signs)
        with torch.no_grad():
            for p, gradient, sign, product in zip(parameters, gradients, signs, products, strict=True):
                p.sub_(0.1 * gradient.detach() / ((product * sign).abs() + 0.1).sqrt())


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.01}], ids=["", "clip"])
@pytest.mark.parametrize("steps", [1, None])
@pytest.mark.parametrize("clears", [True, False], ids=["", "no zero_grad"])
def test_training_as_plain_pytorch(clears, steps, options, with_model, backend):
    if steps is None and not clears:
        pytest.skip("a manual loop adds to what was not cleared")
    model = network()
    twin = copy.deepcopy(model)
    optimizer = wrap(
        model, steps, AdaHessian, model=model if with_model else None, backend=backend, **options
    )
    plain = AdaHessian(twin.parameters())
    for seed in range(5):
        loss_of(model, seed).backward(create_graph=True)
        loss_of(twin, seed).backward(create_graph=True)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad.requires_grad
            torch.testing.assert_close(ours.grad, theirs.grad)
        if options:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        optimizer.step()
        plain.step()
        if clears:
            optimizer.zero_grad()
        plain.zero_grad()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 2), (LOW, 1)])
def test_an_error_says_that_the_graph_was_dropped(dtype, steps):
    model = network(dtype)
    before = copy.deepcopy(model.state_dict())
    optimizer = wrap(model, steps, AdaHessian)
    for seed in range(steps):
        loss_of(model, seed).backward(create_graph=True)
        if seed + 1 < steps:
            optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"AdaHessian\.step\(\) failed.*graph.*gradient_accumulation_steps=1"
    ):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.discard()
    for seed in range(steps):
        loss_of(model, seed).backward()
        if seed + 1 < steps:
            optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"^element 0 of tensors does not require grad"
    ):  # no graph was dropped
        optimizer.step()
