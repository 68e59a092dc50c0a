"""Peak memory is plain PyTorch's, and at most one bucket of pending gradients more."""

import pytest
import torch
from memory import peak_of
from torch import nn

import fusedacc

WIDTH, LAYERS, STEPS = 512, 8, 3
LAYER_BYTES = 4 * WIDTH * WIDTH
#: Pending gradients, and small tensors.
ALLOWED = 1.25 * LAYER_BYTES
WAYS = ["counted", "counted model=", "manual", "manual model="]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


class Training:
    def __init__(self, way, steps=STEPS):
        self.model, self.way, self.steps, self.count = mlp(), way, steps, 0
        optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        if way != "plain":
            model = self.model if "model=" in way else None
            counted = steps if "counted" in way else None
            optimizer = fusedacc.AccumulatingOptimizer(optimizer, counted, model=model)
        self.optimizer = optimizer

    def micro_batch(self, activations: int = 0) -> None:
        """Train on one micro-batch. activations: layers' sizes that the loss keeps until its backward."""
        loss = self.model(torch.randn(4, WIDTH)).square().mean()
        if activations:
            loss = (loss * torch.ones(activations * LAYER_BYTES // 8)).sin().sin().mean()
        counted = "counted" in self.way
        (loss if counted else loss / self.steps).backward()
        self.count += 1
        if counted or self.count % self.steps == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def one_micro_batch_per_window(way):
    training = Training(way, 1)
    return lambda: [training.micro_batch(2 * LAYERS) for _ in range(3)]


def evaluation_between_windows(way):
    training = Training(way)

    def run():
        for _ in range(3):
            for _ in range(STEPS):
                training.micro_batch()
            torch.ones(2 * LAYERS * LAYER_BYTES // 4).add_(1)

    return run


def layers_frozen_after_the_first_window(way):
    training = Training(way)

    def run():
        for _ in range(STEPS):
            training.micro_batch()
        for layer in training.model[::2][: LAYERS // 2]:
            layer.weight.requires_grad_(False)
        for _ in range(2 * STEPS):
            training.micro_batch(2 * LAYERS)

    return run


def a_post_accumulate_hook_on_each_parameter(way):
    training = Training(way)
    for p in training.model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: None)
    return lambda: [training.micro_batch() for _ in range(3 * STEPS)]


def discarded_windows(way):
    training = Training(way)

    def run():
        for _ in range(3):
            training.micro_batch()
            if way == "plain":
                training.optimizer.zero_grad()
            else:
                training.optimizer.discard()
            training.count = 0
            torch.ones(2 * LAYERS * LAYER_BYTES // 4).add_(1)

    return run


CASES = [one_micro_batch_per_window, evaluation_between_windows, layers_frozen_after_the_first_window]
CASES += [a_post_accumulate_hook_on_each_parameter, discarded_windows]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("native", ["", "0"], ids=["native", "python"])
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_plain_pytorchs(case, native, way, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", native)
    assert peak_of(case(way)) <= peak_of(case("plain")) + ALLOWED


@pytest.mark.parametrize("scaled", [False, True])
def test_the_casts_of_an_update_take_two_bytes_and_are_freed(scaled):
    model = mlp().to(torch.bfloat16)
    optimizer = fusedacc.AccumulatingOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), 1, max_grad_norm=1e-3 if scaled else None
    )
    model(torch.randn(4, WIDTH).bfloat16()).float().square().mean().backward()
    elements = sum(p.numel() for p in model.parameters())
    peak = peak_of(optimizer.step)
    assert 2 * elements <= peak < (2 + 4 * scaled) * elements + 2**20
    assert optimizer.accumulator_bytes == 4 * elements
