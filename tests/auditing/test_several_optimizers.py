"""Several optimizers: which of them a problem is about, and losses of one that count in another's update."""

import re
from pathlib import Path

import pytest
import torch
from auditing_cases import audited
from torch import nn
from torch.nn import functional as F

K = 4
#: A line of this file, in a report whose lines are all 7.
AT = "test_several_optimizers.py:7"


class Gan:
    """Trains a generator and a critic in windows of k micro-batches.

    Args:
        k: micro-batches in a window.
        clear: when the critic's gradients are cleared: "first" (before its own losses), "after" (its step) or
            "never".
        generator_first: whether the generator's update comes before the critic's.
    """

    def __init__(self, k=1, clear="first", generator_first=False):
        self.k, self.clear, self.generator_first = k, clear, generator_first
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.generator_optimizer = torch.optim.SGD(self.generator.parameters(), 1e-2)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), 1e-3)

    def loss(self, samples, label):
        out = self.critic(samples)
        return F.binary_cross_entropy_with_logits(out, torch.full_like(out, label)) / self.k

    def train_critic(self):
        if self.clear == "first":
            self.critic_optimizer.zero_grad()
        for _ in range(self.k):
            real, fake = torch.randn(16, 16), self.generator(torch.randn(16, 8)).detach()
            (self.loss(real, 1.0) + self.loss(fake, 0.0)).backward()
        self.critic_optimizer.step()
        if self.clear == "after":
            self.critic_optimizer.zero_grad()

    def train_generator(self):
        self.generator_optimizer.zero_grad()
        for _ in range(self.k):
            self.loss(self.generator(torch.randn(16, 8)), 1.0).backward()
        self.generator_optimizer.step()

    def run(self):
        for _ in range(6):
            parts = self.train_critic, self.train_generator
            for train in reversed(parts) if self.generator_first else parts:
                train()


def lines_of(report):
    """Return the report's lines, with all lines of the script as 7."""
    return re.sub(r"py:\d+", "py:7", report.text).splitlines()


@pytest.mark.parametrize("k", [1, K])
@pytest.mark.parametrize("generator_first", [False, True])
def test_a_gan_that_clears_before_each_window_has_no_problem(k, generator_first):
    report = audited(lambda: Gan(k, generator_first=generator_first).run())
    assert (report.status, report.notes) == (0, []), report.text


@pytest.mark.parametrize("k", [1, K])
def test_a_generators_loss_that_is_left_in_the_critic(k):
    report = audited(lambda: Gan(k, clear="after").run())
    lines = lines_of(report)
    start = lines.index(
        "PROBLEM stale: updates 2-6 of optimizer 1: the gradient of a loss of optimizer 2 (backward() at "
        f"{AT}), which also reaches the parameters of optimizer 1, counts too: nothing clears it"
    )
    assert lines[start + 1 : start + 3] == [
        f"    Where: after backward() at {AT}, before backward() at {AT}",
        f"    Fix: call the zero_grad() of optimizer 1 (Adam, made at {AT}) there, once for each update, "
        "not only after its step().",
    ]
    assert f"Optimizer 1: Adam, made at {AT}." in lines
    assert f"Optimizer 2: SGD, made at {AT}." in lines
    (problem,) = report.problems
    assert (problem.updates, problem.optimizers) == ([2, 3, 4, 5, 6], [0])


@pytest.mark.parametrize("k", [1, K])
def test_a_critic_that_is_never_cleared(k):
    report = audited(lambda: Gan(k, clear="never").run())
    text = (
        "the gradient of the previous update counts again. The gradient of a loss of optimizer 2 "
        f"(backward() at {AT}), which also reaches the parameters of optimizer 1, counts too: "
        "nothing clears them"
    )
    assert f"PROBLEM stale: updates 2-6 of optimizer 1: {text}" in lines_of(report)
    assert f"    Where: after backward() at {AT}, before backward() at {AT}" in lines_of(report)


def test_a_loss_that_reaches_another_optimizer_in_all_updates_is_a_note():
    """It may be meant, as in a model whose parts have optimizers."""
    report = audited(lambda: Gan(clear="after", generator_first=True).run())
    assert report.status == 0, report.text
    (note,) = report.notes
    assert re.sub(r"py:\d+", "py:7", note) == (
        f"optimizer 2 also counts a loss of optimizer 1 (backward() at {AT}): if that is not meant, call its "
        "zero_grad() after that backward pass"
    )


def train_apart(clears_second):
    """Train two models with an optimizer each, which share nothing."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizers = [torch.optim.Adam(first.parameters()), torch.optim.SGD(second.parameters(), 1e-3)]
    for _ in range(5):
        for _ in range(K):
            for model in (first, second):
                (model(torch.randn(16, 8)).square().mean() / K).backward()
        for optimizer in optimizers:
            optimizer.step()
        optimizers[0].zero_grad()
        if clears_second:
            optimizers[1].zero_grad()


def test_optimizers_that_share_nothing():
    assert audited(lambda: train_apart(True)).status == 0
    lines = lines_of(audited(lambda: train_apart(False)))
    start = lines.index(
        "PROBLEM stale: updates 2-5 of optimizer 2: the gradient of the previous update counts again: "
        "nothing clears it"
    )
    assert lines[start + 1 : start + 3] == [
        f"    Where: after step() at {AT}, before backward() at {AT}",
        f"    Fix: call the zero_grad() of optimizer 2 (SGD, made at {AT}) there, once for each update.",
    ]


def test_an_optimizer_of_the_script_is_named_by_the_line_that_makes_it():
    class Own(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)

    def train():
        train_apart(True)
        model = nn.Linear(8, 8)
        optimizer = Own(model.parameters())
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()

    report = audited(train)
    (line,) = re.findall(r"Optimizer 3: Own, made at test_several_optimizers.py:(\d+)\.", report.text)
    source = Path(__file__).read_text().splitlines()
    assert "Own(model.parameters())" in source[int(line) - 1]


def test_losses_of_several_lines_have_a_sum_each():
    """Also an update that was checked only in part says so."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def train(factor):
        for _ in range(4):
            (model(torch.randn(4, 8)).square().mean() * factor).backward()
            model(torch.randn(4, 8)).abs().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    (row,) = audited(lambda: train(1.0)).as_json()["table"]
    assert (row["sum"], row["verdict"]) == ("1 for each loss", "ok")
    (row,) = audited(lambda: train(0.5)).as_json()["table"]
    assert (row["sum"], row["verdict"]) == ("1/2, 1", "ok")


def test_an_update_whose_sum_is_unknown_is_only_partly_checked():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def train():
        for _ in range(4):
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = audited(train)
    (row,) = report.as_json()["table"]
    assert (report.status, row["sum"], row["verdict"]) == (0, "unknown", "partly checked")
    assert report.notes == [
        "some losses are sums that nothing divides: what their weights should add up to is not known"
    ]
