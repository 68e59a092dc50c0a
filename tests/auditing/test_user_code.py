"""Code that scripts have around their loops: it neither misleads the audit nor fails because of it."""

import contextlib
import io
import math

import pytest
import torch
import torch.nn.functional as F
from auditing_cases import audited, factors
from plain_loops import K, data, loop, mlp, sgd, text, text_model
from torch import nn

import fusedacc
from fusedacc.auditing import backward_passes, optimizers
from fusedacc.auditing.sketches import SketchMap


def test_grad_may_be_called_with_positional_arguments():
    """The third argument is grad_outputs, whose truth value a tensor does not have."""
    model = mlp()

    def train():
        optimizer = sgd(model)
        for i, (x, y) in enumerate(data()):
            output = model(x)
            torch.autograd.grad(output, list(model.parameters()), torch.ones_like(output), True)
            (F.cross_entropy(output, y) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

    assert audited(train).status == 0


# Clipping


def convolution_loop(divide):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 10))
    model = model.to(memory_format=torch.channels_last)
    random = torch.Generator().manual_seed(1)
    images = torch.randn(24, 8, 3, 8, 8, generator=random)
    loop(
        model,
        sgd(model),
        [(x.to(memory_format=torch.channels_last), torch.arange(8)) for x in images],
        divide=divide,
        before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.02),
    )


def test_clipping_of_gradients_in_channels_last():
    """A flattened gradient would be a copy, which clipping does not change."""
    assert audited(lambda: convolution_loop(True)).status == 0
    assert factors(audited(lambda: convolution_loop(False))) == {"scale": 4.0}


def test_clipping_of_complex_gradients():
    weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))

    def train():
        optimizer = torch.optim.SGD([weight], lr=0.01)
        for i in range(12):
            x = torch.randn(3, 6, dtype=torch.complex64)
            ((x @ weight).abs().square().mean() / K).backward()
            if (i + 1) % K == 0:
                nn.utils.clip_grad_norm_([weight], 0.1)
                optimizer.step()
                optimizer.zero_grad()

    report = audited(train)
    assert (report.status, report.as_json()["checked"]) == (0, 3), report.text


def test_clipping_by_the_script_through_data():
    """Writes to p.grad.data do not change its version. The factor of a clipping may be 1/k by chance."""
    model = mlp()

    def clip():
        factor = float(torch.rand(()))
        for param in model.parameters():
            param.grad.data.mul_(factor)

    report = audited(lambda: loop(model, sgd(model), data(400), before_step=clip))
    assert report.status == 0, report.text


def test_clipping_by_value_and_then_by_norm():
    model = mlp()

    def clip():
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    report = audited(lambda: loop(model, sgd(model), data(100), before_step=clip))
    assert (report.status, report.as_json()["rounding"]) == (0, {}), report.text
    assert not any("something else" in note for note in report.notes)


def test_clipping_of_each_parameter_by_the_script():
    model = mlp()

    def clip():
        for param in model.parameters():
            limit = 0.01 * param.detach().norm() / (param.grad.norm() + 1e-6)
            param.grad.mul_(limit.clamp(max=1))

    report = audited(lambda: loop(model, sgd(model), data(), before_step=clip))
    assert report.status == 0, report.text
    assert any("different factors" in note for note in report.notes)


def test_clipping_to_zero_is_no_failure():
    model = mlp()

    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 0.0)

    report = audited(lambda: loop(model, sgd(model), data(), before_step=clip))
    assert "The audit failed" not in report.text


# Losses


@pytest.mark.parametrize("outputs", [4, 16])
def test_a_sum_that_is_divided_by_the_number_of_micro_batches(outputs):
    """The audit cannot know whether to divide by the number of outputs too, even if it is k or k * k."""
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, outputs))

    def squares(model, x, _):
        return (model(x) - x[:, :outputs]).square().mean(0).sum()

    assert audited(lambda: loop(model, sgd(model), data(), loss_function=squares)).status == 0


def test_tasks_that_take_turns_in_a_window():
    """The two tasks call backward() on different lines. The weights of neither add up to 1."""
    model = mlp()

    def train(divisor):
        optimizer = sgd(model)
        for i, (x, y) in enumerate(data(48)):
            if i % K in (0, 3):
                (F.cross_entropy(model(x), y) / divisor).backward()
            else:
                (F.mse_loss(model(x), x[:, :10]) / divisor).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

    report = audited(lambda: train(K))
    assert report.status == 0, report.text
    assert audited(lambda: train(1)).status == 1


def train_by_tokens(model, scaled, counted_from=0, updates=lambda window, i: i == K - 1):
    """Train on sums over tokens. scaled: makes a loss from the sum, the tokens of the window's micro-batches
    from `counted_from` on, and the place in the window. updates: whether an update follows.
    """
    optimizer, batches = sgd(model), list(text())
    for start in range(0, len(batches), K):
        window = batches[start : start + K]
        tokens = sum(int((y != -100).sum()) for _, y in window[counted_from:])
        for i, (x, y) in enumerate(window):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
            scaled(loss, tokens, i).backward()
            if updates(start // K, i):
                optimizer.step()
                optimizer.zero_grad()


def test_a_sum_that_is_divided_by_a_few_tokens_too_many():
    """As if labels were counted that the loss does not see. The difference is small, but it has a cause."""
    model = text_model()
    report = audited(lambda: train_by_tokens(model, lambda loss, tokens, i: loss / (tokens + 5)))
    assert "scale" in factors(report)


def test_an_update_that_is_too_early_where_the_loss_is_halved():
    """The first update has only one micro-batch."""
    model = text_model()

    def train():
        train_by_tokens(
            model,
            lambda loss, tokens, i: 0.5 * loss / tokens,
            updates=lambda window, i: i == K - 1 or (window, i) == (0, 0),
        )

    assert "scale" in factors(audited(train))


def test_a_micro_batch_without_labels_has_a_loss_of_zero():
    model = text_model()

    def train():
        train_by_tokens(model, lambda loss, tokens, i: loss / tokens if i else loss * 0, counted_from=1)

    report = audited(train)
    assert report.status == 0, report.text


@pytest.mark.parametrize("zero", [0.0, torch.zeros(())])
def test_a_loss_that_is_divided_by_zero(zero):
    model = mlp()

    def train():
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0)
        for i, (x, y) in enumerate(data()):
            scaler.scale(F.cross_entropy(model(x), y) / (zero if i == 5 else K)).backward()
            if (i + 1) % K == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    report = audited(train)
    assert (report.status, report.as_json()["checked"]) == (0, 5), report.text


# Evaluation mode


def test_a_backward_pass_in_evaluation_mode_that_leaks():
    model = mlp(dropout=0.1)

    def train():
        def evaluate(i):
            if i % 8 == 0:
                model.eval()
                model(torch.randn(4, 20)).square().mean().backward()
                model.train()

        loop(model, sgd(model), data(), after_backward=evaluate)

    assert "stale" in factors(audited(train))


def test_a_model_that_is_fine_tuned_in_evaluation_mode():
    model = mlp(dropout=0.1).eval()
    assert audited(lambda: loop(model, sgd(model), data())).status == 0


# Optimizers


def test_gradients_of_a_second_optimizer_that_are_cleared_before_its_step():
    first, second = mlp(), nn.Linear(10, 10)

    def train():
        optimizers = sgd(first), sgd(second)
        for i, (x, y) in enumerate(data()):
            (F.cross_entropy(second(first(x)), y) / K).backward()
            if (i + 1) % K == 0:
                optimizers[0].step()
                first.zero_grad()
                second.zero_grad()
                optimizers[1].step()

    assert factors(audited(train)) == {"lost": 0.0}


def test_hooks_before_a_step_may_divide_gradients():
    model = mlp()
    optimizer = sgd(model)

    def divide(*_):
        for param in model.parameters():
            param.grad.div_(K)

    handle = optimizer.register_step_pre_hook(divide)
    assert audited(lambda: loop(model, optimizer, data(), divide=False)).status == 0
    assert list(optimizer._optimizer_step_pre_hooks) == [handle.id]
    handle.remove()
    assert factors(audited(lambda: loop(model, optimizer, data(), divide=False))) == {"scale": 4.0}


def test_a_step_that_raises_leaves_no_hook():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError

    model = mlp()
    optimizer = Failing(model.parameters(), lr=0.1)
    handle = optimizer.register_step_pre_hook(lambda *_: None)

    def train():
        F.cross_entropy(model(torch.ones(2, 20)), torch.zeros(2, dtype=torch.long)).backward()
        for _ in range(2):
            with contextlib.suppress(ValueError):
                optimizer.step()

    audited(train)
    assert list(optimizer._optimizer_step_pre_hooks) == [handle.id]


def test_a_parameter_that_is_replaced_by_one_of_another_shape():
    """The passes that the last update has lost have sketches of the old shape."""
    model = mlp()

    def train():
        optimizer = sgd(model)
        for i, (x, y) in enumerate(data()):
            if i == 12:
                model[-1] = nn.Linear(48, 12)
                optimizer.param_groups[0]["params"][-2:] = [*model[-1].parameters()]
                optimizer.state.clear()
            (F.cross_entropy(model(x), y) / K).backward()
            if i == 8:
                optimizer.zero_grad()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

    report = audited(train)
    assert (report.as_json()["checked"], factors(report)) == (6, {"lost": 0.75}), report.text


def test_a_step_that_is_compiled():
    model = mlp()
    optimizer = sgd(model)
    step = torch.compile(lambda: optimizer.step(), backend="eager")

    def train():
        for i, (x, y) in enumerate(data(12)):
            (F.cross_entropy(model(x), y) / K).backward()
            if (i + 1) % K == 0:
                step()
                optimizer.zero_grad()

    report = audited(train)
    assert (report.status, report.as_json()["checked"]) == (0, 3), report.text


def test_a_backward_pass_that_raises_need_not_count():
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("out of memory")

    model = mlp()

    def train():
        optimizer = sgd(model)
        for i, (x, y) in enumerate(data()):
            if i % 8 == 0:
                with contextlib.suppress(RuntimeError):
                    F.cross_entropy(model[2:](Fail.apply(model[:2](x))), y).backward()
                optimizer.zero_grad()
            (F.cross_entropy(model(x), y) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

    report = audited(train)
    assert report.status == 0, report.text
    assert report.notes == ["3 backward passes raised an exception and reached no update"]


def test_what_the_script_puts_in_place_of_the_wrappers_stays():
    model = mlp()
    original, calls = torch.autograd.backward, []

    def train():
        watched = torch.autograd.backward

        def backward(*args, **kwargs):
            calls.append(args)
            return watched(*args, **kwargs)

        torch.autograd.backward = backward
        loop(model, sgd(model), data())

    try:
        assert audited(train, updates=2).status == 0
        assert torch.autograd.backward is not original
        assert len(calls) == 24
    finally:
        torch.autograd.backward = original


# Memory


def test_signs_of_long_vectors_take_little_memory(generator):
    sketch = SketchMap()
    vector = torch.randn(100_003, generator=generator)
    whole = sketch.sketch(vector, vector.shape)
    parts = [sketch.sketch(vector[at : at + 30_001], vector.shape, at) for at in range(0, 100_003, 30_001)]
    torch.testing.assert_close(sum(parts), whole)
    assert sum(signs.numel() for signs in sketch._signs.values()) < 100_003
    assert math.isclose(float(whole.norm()), float(vector.norm()), rel_tol=0.5)


def test_sketches_without_updates_are_forgotten(monkeypatch):
    monkeypatch.setattr(optimizers, "WAITING_SKETCHES", 80)
    layer = nn.Linear(4, 4)
    with fusedacc.audit(output=io.StringIO()) as report:
        for _ in range(200):
            layer(torch.randn(2, 4)).square().mean().backward()
        assert len(report._watcher.watch.optimizers._holding) <= 80


def test_an_optimizer_that_has_finished_keeps_no_sketches(monkeypatch):
    monkeypatch.setattr(optimizers, "FINISHED_AFTER", 20)
    monkeypatch.setattr(optimizers, "UNUSED_AFTER", 20)  # other tests may have left optimizers
    model = mlp()
    first, second = sgd(model), sgd(model)
    with fusedacc.audit(output=io.StringIO()) as report:
        loop(model, first, data(K))
        loop(model, second, data(40 * K))
        assert len(report._watcher.watch.optimizers._holding) < 8
        assert len(report._watcher.watch.optimizers.window_starts()) == 1
    assert (report.status, report.as_json()["checked"]) == (0, 41), report.text


def test_a_window_with_too_many_micro_batches_is_not_judged(monkeypatch):
    """Sketches of another optimizer's long window are freed while this one makes updates."""
    monkeypatch.setattr(optimizers, "WAITING_SKETCHES", 50)
    first, second = mlp(), nn.Linear(10, 10)

    def train():
        fast, slow = sgd(second), sgd(first)
        for i, (x, y) in enumerate(data(192)):
            (F.cross_entropy(second(first(x)), y)).backward()
            fast.step()
            fast.zero_grad()
            if (i + 1) % 64 == 0:
                for param in first.parameters():
                    param.grad /= 64
                slow.step()
                slow.zero_grad()

    report = audited(train, updates=0)
    assert (report.status, report.as_json()["checked"]) == (0, 192), report.text


@pytest.mark.parametrize("num_updates", [0, 1])
def test_the_audit_ends_in_a_script_without_updates(monkeypatch, num_updates):
    monkeypatch.setattr(backward_passes, "MAX_PASSES", 50)
    model = mlp()

    def train():
        loop(model, sgd(model), data(K * num_updates))
        for _ in range(51):
            model(torch.randn(2, 20)).square().mean().backward()
        assert not any(param._backward_hooks for param in model.parameters())

    report = audited(train)
    assert report.status == (0 if num_updates else 2), report.text
    assert any("50 backward passes" in note for note in report.notes)


def test_an_audit_can_be_used_once():
    report = audited(lambda: None)
    with pytest.raises(RuntimeError, match=r"this audit has ended: call fusedacc.audit\(\) for a new one"):
        report.__enter__()
    assert audited(lambda: loop(model := mlp(), sgd(model), data())).status == 0


def test_divided_sums_of_text_are_still_judged():
    model = text_model()

    def train():
        optimizer = sgd(model)
        for i, (x, y) in enumerate(text()):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
            (loss / int((y != -100).sum())).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

    assert "scale" in factors(audited(train))


@pytest.mark.parametrize("outputs", [3, 9])
def test_a_sum_over_as_many_outputs_as_micro_batches(outputs):
    """3 outputs are no missing division by 3 micro-batches, and 9 outputs no product with their number."""
    model = nn.Linear(20, outputs)

    def train():
        optimizer = sgd(model)
        for i, (x, _) in enumerate(data()):
            (model(x).square().sum() / len(x) / 3).backward()
            if (i + 1) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()

    assert audited(train).status == 0


def partial_loop(divide_gradients, divisor):
    """Windows of 16, and a last one of 2."""
    model = mlp()
    optimizer, batches = sgd(model), list(data(50))
    for start in range(0, 50, 16):
        window = batches[start : start + 16]
        for x, y in window:
            (F.cross_entropy(model(x), y) / (len(window) if divisor else 1)).backward()
        for param in model.parameters():
            param.grad /= divide_gradients
        optimizer.step()
        optimizer.zero_grad()


def test_a_short_window_is_divided_twice_like_the_others():
    report = audited(lambda: partial_loop(16, True))
    assert factors(report) == {"scale": 0.0625}, report.text
    assert report.problems[0].updates == [1, 2, 3, 4]


def test_windows_of_different_lengths_that_are_not_divided():
    report = audited(lambda: partial_loop(1, False))
    assert factors(report) == {"scale": 16.0}, report.text
    assert "nothing divides by their number" in report.problems[0].text


@pytest.mark.parametrize("clears", [True, False])
def test_each_evaluation_of_a_closure_is_an_update(clears):
    """LBFGS evaluates it three times in each step."""

    def train():
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        batches = list(data(K))

        def closure():
            if clears:
                optimizer.zero_grad()
            losses = [F.cross_entropy(model(x), y) for x, y in batches]
            for loss in losses:
                (loss / (K if not clears else 1)).backward()
            return sum(losses) / K

        for _ in range(2):
            optimizer.step(closure)

    report = audited(train)
    first = 1 if clears else 2  # the first has no earlier gradient
    assert report.problems[0].updates == [*range(first, 7)], report.text
