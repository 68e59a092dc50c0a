"""Gradients that an optimizer's own step() changes, that were loaded, or that another optimizer has used."""

import pytest
import torch
import torch.nn.functional as F
from auditing_cases import audited, factors
from plain_loops import K, data, loop, mlp, sgd
from torch import nn


class ChangingOptimizer(torch.optim.Optimizer):
    """An optimizer that changes gradients and calls another one, as OrthoGrad does."""

    def __init__(self, inner, change):
        self.inner, self.change = inner, change
        super().__init__(inner.param_groups, {})

    def step(self):
        for param in self.inner.param_groups[0]["params"]:
            self.change(param)
        self.inner.step()


def project(param):
    """Remove the gradient's part along the parameter, and keep its norm."""
    weight, norm = param.flatten(), param.grad.norm()
    param.grad -= ((weight @ param.grad.flatten()) / (weight @ weight + 1e-30) * weight).view_as(param)
    param.grad.mul_(norm / (param.grad.norm() + 1e-30))


def divide(param):
    param.grad /= K


def test_gradients_that_step_changes_before_it_uses_them():
    model = mlp()
    report = audited(lambda: loop(model, ChangingOptimizer(sgd(model), project), data()))
    assert (report.status, report.as_json()["checked"]) == (0, 6), report.text
    assert any("changes the gradients inside its step()" in note for note in report.notes)
    report = audited(lambda: loop(model, ChangingOptimizer(sgd(model), project), data(), divide=False))
    assert factors(report) == {"scale": 4.0}, report.text


def test_a_common_factor_of_step_counts():
    model = mlp()
    right = audited(lambda: loop(model, ChangingOptimizer(sgd(model), divide), data(), divide=False))
    assert (right.status, right.notes) == (0, []), right.text
    assert factors(audited(lambda: loop(model, ChangingOptimizer(sgd(model), divide), data()))) == {
        "scale": 0.25
    }


class Perturbing(torch.optim.Optimizer):
    """An optimizer that moves the parameters before the evaluation that counts, as SAM does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure):
        params = self.param_groups[0]["params"]
        for param in params:
            param.add_(param.grad, alpha=0.01)
        with torch.enable_grad():
            closure()
        for param in params:
            param.sub_(param.grad, alpha=0.05)


def test_passes_before_an_evaluation_at_moved_parameters_are_not_lost():
    model = mlp()
    optimizer = Perturbing(model.parameters())

    def train():
        for x, y in data():

            def closure(x=x, y=y):
                for param in model.parameters():
                    param.grad = None
                F.cross_entropy(model(x), y).backward()

            closure()
            optimizer.step(closure)

    assert audited(train).status == 0


def test_one_of_two_optimizers_loses_micro_batches():
    """The other optimizer has used them, but this one should have too."""
    first, second = mlp(), nn.Linear(10, 10)

    def train():
        one, two = sgd(first), sgd(second)
        for i, (x, y) in enumerate(data()):
            (F.cross_entropy(second(first(x)), y) / K).backward()
            if (i + 1) % K == 0:
                one.step()
                two.step()
                two.zero_grad()
            one.zero_grad()

    report = audited(train)
    assert factors(report) == {"lost": 0.25}, report.text
    assert report.problems[0].optimizers == [0]


def resumed_loop(rest):
    """Load an optimizer when p.grad has sums of an earlier process, beside those of this one."""
    model = mlp(torch.bfloat16)
    optimizer = sgd(model)
    for i, (x, y) in enumerate(data(dtype=torch.bfloat16)):
        (F.cross_entropy(model(x), y) / K).backward()
        if i == 5:
            optimizer.load_state_dict(optimizer.state_dict())
            for param in model.parameters():
                noise = torch.randn_like(param.grad)
                param.grad += noise * (rest * param.grad.norm() / noise.norm())
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_sums_that_were_loaded_are_not_judged():
    report = audited(lambda: resumed_loop(0.03))
    assert (report.status, report.as_json()["checked"]) == (0, 5), report.text
    report = audited(lambda: resumed_loop(0.0))
    assert (report.status, report.as_json()["checked"]) == (0, 6), report.text


@pytest.mark.parametrize("infinite", [0, 2, 3])
def test_a_skipped_window_that_is_repeated(infinite):
    """Its gradients are equal to those of the window that counts."""
    model = mlp()

    def train():
        optimizer, batches = sgd(model), list(data())
        for start in range(0, len(batches), K):
            for attempt in range(2 if start == K else 1):
                for i, (x, y) in enumerate(batches[start : start + K]):
                    loss = F.cross_entropy(model(x), y) / K
                    is_infinite = start == K and attempt == 0 and i == infinite
                    (loss * float("inf") if is_infinite else loss).backward()
                if all(param.grad.isfinite().all() for param in model.parameters()):
                    optimizer.step()
                optimizer.zero_grad()

    report = audited(train)
    assert (report.status, report.as_json()["checked"]) == (0, 6), report.text
    assert "4 backward passes dropped because of an inf or nan" in report.notes


def test_gradients_of_grad_alone_are_micro_batches():
    model = mlp()

    def train():
        optimizer = sgd(model)
        for i, (x, y) in enumerate(data()):
            gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            for param, gradient in zip(model.parameters(), gradients, strict=True):
                param.grad = gradient / K if param.grad is None else param.grad + gradient / K
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

    report = audited(train)
    assert (report.status, report.as_json()["micro_batches"]) == (0, 24), report.text


def test_gradients_that_a_penalty_looks_at():
    """Without the penalty, in every second micro-batch, they are equal to those of backward()."""
    model = mlp()

    def train():
        optimizer = sgd(model)
        for i, (x, y) in enumerate(data()):
            loss = F.cross_entropy(model(x), y)
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            penalty = sum(gradient.square().sum() for gradient in gradients)
            ((loss + 1e-5 * penalty * (i % 2)) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

    report = audited(train)
    assert report.status == 0, report.text
    assert {row["weights"] for row in report.as_json()["table"]} == {"1/4 each"}
