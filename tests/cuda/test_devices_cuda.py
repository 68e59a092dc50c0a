"""Models on a CPU and a GPU, on two GPUs, or moved after they were wrapped."""

import pytest
import torch
from torch import nn

import fusedacc

pytestmark = pytest.mark.cuda
STEPS, UPDATES = 2, 3


class Split(nn.Module):
    """Two layers on two devices."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6).to(first), nn.Linear(6, 3).to(second)

    def forward(self, x):
        hidden = torch.tanh(self.first(x.to(self.first.weight.device)))
        return self.second(hidden.to(self.second.weight.device))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def stock(model: nn.Module, params: list[nn.Parameter], clip: float, fused: bool) -> list[torch.Tensor]:
    """Return the final weights of the usual loop, and the last norm."""
    optimizer = torch.optim.AdamW(params, lr=0.01, fused=fused)
    for micro_batch in range(STEPS * UPDATES):
        (model(batch(micro_batch)).square().mean() / STEPS).backward()
        if micro_batch % STEPS == STEPS - 1:
            # clip_grad_norm_ with foreach does not support several devices.
            norm = torch.stack([p.grad.norm().cpu() for p in params]).norm()
            for param in params:
                param.grad.mul_((clip / (norm + 1e-6)).clamp(max=1.0).to(param.device))
            optimizer.step(), optimizer.zero_grad()
    return [*(param.detach().cpu() for param in params), norm]


def wrapped(model: nn.Module, params: list[nn.Parameter], clip: float, fused: bool, **options: object):
    inner = torch.optim.AdamW(params, lr=0.01, fused=fused)
    optimizer = fusedacc.AccumulatingOptimizer(inner, STEPS, max_grad_norm=clip, **options)
    for micro_batch in range(STEPS * UPDATES):
        model(batch(micro_batch)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    return [*(param.detach().cpu() for param in params), optimizer.grad_norm.cpu()]


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("skip", [False, True], ids=["", "skip"])
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu"), ("cuda:0", "cuda:1")], ids=str)
def test_clipping_over_devices_equals_the_usual_loop(devices, skip, fused):
    """The norm combines numbers from both devices, and must not read one before it has arrived."""
    if "cuda:1" in devices and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for reverse in (False, True):
        models = Split(*devices), Split(*devices)
        params = [list(model.parameters()) for model in models]
        if reverse:
            params = [list(reversed(each)) for each in params]
        expected = stock(models[0], params[0], 0.05, fused)
        found = wrapped(models[1], params[1], 0.05, fused, skip_nonfinite=skip)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("on_gpu", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("reduction", ["weighted", "normalized"])
@pytest.mark.parametrize("first", ["cpu", "cuda"])
@pytest.mark.parametrize("uses_model", [False, True], ids=["stored", "written"])
def test_weights_on_a_gpu_scale_sums(first, reduction, uses_model, on_gpu):
    weights = [3.0, 1.0]
    models = Split(first, "cuda"), Split(first, "cuda")
    inners = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    optimizer = fusedacc.AccumulatingOptimizer(
        inners[0], STEPS, reduction=reduction, model=models[0] if uses_model else None
    )
    for micro_batch in range(STEPS * UPDATES):
        index = micro_batch % STEPS
        weight = torch.tensor(weights[index], device="cuda") if on_gpu[index] else weights[index]
        share = weights[index] / sum(weights) if reduction == "weighted" else 1 / sum(weights)
        with optimizer.accumulate(weight=weight):
            models[0](batch(micro_batch)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
        (models[1](batch(micro_batch)).square().mean() * share).backward()
        if index == STEPS - 1:
            inners[1].step(), inners[1].zero_grad()
    torch.testing.assert_close([*models[0].parameters()], [*models[1].parameters()], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", ["a hook", "a new sum"])
def test_weights_on_a_gpu_scale_what_a_module_adds_later(case):
    """The first weight is on the GPU.

    A hook: it keeps the first gradient from the module, so that it becomes the sum, with the weight as its
    deferred scale. A new sum: that of the second layer begins in the last micro-batch.
    """
    weights = [torch.tensor(3.0, device="cuda"), 2.0, 1.0]
    models = Split("cuda", "cuda"), Split("cuda", "cuda")
    inner = torch.optim.SGD(models[0].parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 3, reduction="weighted", model=models[0])
    handles = [param.register_hook(lambda gradient: gradient * 1) for param in models[0].parameters()]
    for index, weight in enumerate(weights):
        if index == 1 or case != "a hook":
            for handle in handles:
                handle.remove()
        uses_second = case != "a new sum" or index == 2
        losses = [
            (model if uses_second else model.first)(batch(index).cuda()).square().mean() for model in models
        ]
        with optimizer.accumulate(weight=weight):
            losses[0].backward()
        (losses[1] * (float(weight) / 6)).backward()
        if index < 2:
            optimizer.step(), optimizer.zero_grad()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_model_that_is_moved_after_it_was_wrapped():
    models = Split("cpu", "cpu"), Split("cuda", "cuda")
    for model in models:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fusedacc.AccumulatingOptimizer(inner, STEPS, model=model, max_grad_norm=1.0)
        model.cuda()
        for micro_batch in range(STEPS * UPDATES):
            model(batch(micro_batch)).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
        assert optimizer.num_updates == UPDATES
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert ours.is_cuda
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
