"""Features of the wrapper on a GPU, compared with PyTorch's usual loop or with training on the CPU."""

import contextlib
import copy
import io

import pytest
import torch
from gpu import nothing_waits
from torch import nn

import fusedacc
from fusedacc.nn.functional import grouped_linear

pytestmark = pytest.mark.cuda
STEPS, UPDATES = 2, 3
CLOSE = {"rtol": 2e-3, "atol": 2e-5}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * 36, 10)
    )


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def wrapped(net: nn.Module, with_model: bool = True, **options: object) -> fusedacc.AccumulatingOptimizer:
    inner = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    return fusedacc.AccumulatingOptimizer(inner, STEPS, model=net if with_model else None, **options)


def usual_loop(
    micro_batches: int, last: int | None = None, clip: float | None = None, layout=torch.contiguous_format
) -> list[torch.Tensor]:
    """Return the weights of plain PyTorch. `last`: micro-batches of a last window that is not full."""
    model = network().cuda().to(memory_format=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for number in range(micro_batches):
        window = last if last and number >= micro_batches - last else STEPS
        (model(batch(number).cuda()).square().mean() / window).backward()
        if number % STEPS == STEPS - 1 or number == micro_batches - 1:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step(), optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def assert_close(model: nn.Module, expected: list[torch.Tensor], **tolerance: float) -> None:
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, **(tolerance or CLOSE))


def train(model: nn.Module, optimizer: fusedacc.AccumulatingOptimizer, numbers: range) -> None:
    for number in numbers:
        model(batch(number).cuda()).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()


@pytest.mark.parametrize("native", [True, False], ids=["native hooks", "Python hooks"])
@pytest.mark.parametrize("with_model", [True, False], ids=["model", "plain"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions_equal_the_usual_loop(layout, with_model, native, monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", "" if native else "0")
    model = network().cuda().to(memory_format=layout)
    train(model, wrapped(model, with_model, max_grad_norm=0.1), range(STEPS * UPDATES))
    assert_close(model, usual_loop(STEPS * UPDATES, clip=0.1, layout=layout))


@pytest.mark.parametrize("numbers_on_device", [True, False])
def test_flush_ends_a_window_that_is_not_full(numbers_on_device):
    model = network().cuda()
    optimizer = wrapped(model, reduction="weighted")
    for number in range(5):
        weight = torch.tensor(2.0, device="cuda") if numbers_on_device else 2.0
        with optimizer.accumulate(weight=weight):
            model(batch(number).cuda()).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    optimizer.flush()
    assert optimizer.num_updates == 3
    assert_close(model, usual_loop(5, last=1))


@pytest.mark.parametrize("keep_casts", [True, False], ids=["keep_casts", ""])
def test_a_scaler_under_autocast_skips_a_window_that_overflows(keep_casts):
    """The scale is halved, and nothing waits for the device."""
    model = network().cuda()
    optimizer = wrapped(model, max_grad_norm=1.0, keep_casts=keep_casts)
    scaler = fusedacc.amp.GradScaler("cuda", init_scale=1024.0)
    before = copy.deepcopy(list(model.parameters()))
    batches = [batch(number).cuda() for number in range(STEPS * UPDATES)]
    for number, images in enumerate(batches):
        if number == STEPS:
            torch.cuda.synchronize()
        with nothing_waits() if number >= STEPS else contextlib.nullcontext():
            with torch.autocast("cuda", torch.float16):
                loss = model(images).float().square().mean()
            if number == STEPS * (UPDATES - 1):
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    assert int(optimizer.num_skipped) == 1
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert not any(map(torch.equal, model.parameters(), before))


def test_kept_casts_change_no_weight():
    found = []
    for keep_casts in (False, True):
        model = network().cuda()
        optimizer = wrapped(model, keep_casts=keep_casts)
        for number in range(STEPS * UPDATES):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(batch(number).cuda()).float().square().mean()
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
        found.append([parameter.detach() for parameter in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_training_resumes_from_a_checkpoint_in_the_middle_of_a_window():
    found = []
    for cut in (None, 3):
        model = network().cuda().bfloat16()
        optimizer = wrapped(model, master_weights=True)
        for number in range(STEPS * UPDATES):
            if number == cut:
                file = io.BytesIO()
                torch.save((model.state_dict(), optimizer.state_dict()), file)
                file.seek(0)
                weights, state = torch.load(file)
                optimizer.close()
                model = network().cuda().bfloat16()
                model.load_state_dict(weights)
                optimizer = wrapped(model, master_weights=True)
                optimizer.load_state_dict(state)
            model(batch(number).cuda().bfloat16()).float().square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
        found.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("backend", ["eager", "cuda"])
def test_stochastic_sums_equal_those_of_the_cpu(backend):
    """The random bits depend only on the seed, the parameter and the element."""
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(40, 30).bfloat16().to(device))
        optimizer = fusedacc.AccumulatingOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            4,
            accumulate_dtype=torch.bfloat16,
            rounding="stochastic",
            seed=3,
            backend="cpu" if device == "cpu" and backend == "cuda" else backend,
        )
        for number in range(4):
            gradient = torch.randn(40, 30, generator=torch.Generator().manual_seed(number)).bfloat16()
            weight.backward(gradient.to(device))
            if number < 3:
                optimizer.step()
        found.append(weight.grad.cpu())
        optimizer.step()
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(*found)


def test_experts_equal_the_sums_of_autograd():
    torch.manual_seed(0)
    offsets = torch.tensor([3, 3, 10], dtype=torch.int32, device="cuda")
    start, tokens = torch.randn(3, 8, 8, device="cuda"), torch.randn(10, 8, device="cuda")
    found = []
    for wraps in (True, False):
        weight = nn.Parameter(start.clone())
        with contextlib.ExitStack() as stack:
            optimizer = torch.optim.SGD([weight], lr=0.1)
            if wraps:
                holder = nn.ParameterList([weight])
                # Triton's kernel for experts uses tl.dot, which some devices cannot run.
                optimizer = fusedacc.AccumulatingOptimizer(optimizer, STEPS, model=holder, backend="eager")
                stack.callback(optimizer.close)
            for number in range(STEPS * UPDATES):
                loss = grouped_linear(tokens, weight, offsets).square().mean()
                (loss if wraps else loss / STEPS).backward()
                if wraps or number % STEPS == STEPS - 1:
                    optimizer.step(), optimizer.zero_grad()
        found.append(weight.detach())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
