"""Micro-batches in the middle of a window on a GPU run without Python, and give PyTorch's gradients."""

import contextlib
import copy
import sys
import threading
import time
from collections import Counter

import pytest
import torch
from gpu import side_stream
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedacc
from fusedacc.accumulators import engine
from fusedacc.kernels import matmul_eager, selftest

pytestmark = pytest.mark.cuda
STEPS = 4


def wrap(net: nn.Module, **options) -> fusedacc.AccumulatingOptimizer:
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    return fusedacc.AccumulatingOptimizer(inner, STEPS, **options)


def assert_window_equals_pytorchs(model, optimizer, loss_of, **tolerances):
    """Run two windows and compare p.grad at each end with the mean of plain PyTorch's gradients.

    loss_of(model, micro_batch) returns a loss.
    """
    twin = copy.deepcopy(model)
    for window in range(2):
        twin.zero_grad()
        for step in range(STEPS):
            loss_of(model, STEPS * window + step).backward()
            (loss_of(twin, STEPS * window + step) / STEPS).backward()
            if step == STEPS - 1:
                for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad.to(theirs.dtype), theirs.grad, **tolerances)
            optimizer.step()
            optimizer.zero_grad()
        twin.load_state_dict(model.state_dict())


def batch(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


class Counted:
    """Counts the calls of functions of fusedacc in all threads that run hooks of the model's output."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def note(self, frame, event: str, argument) -> None:
        if event == "call" and "/fusedacc/" in frame.f_code.co_filename:
            self.names[frame.f_code.co_name] += 1

    def watch_thread(self, gradient: Tensor) -> None:
        sys.setprofile(self.note)

    def stop_thread(self, gradient: Tensor) -> None:
        sys.setprofile(None)

    def __enter__(self) -> Counter[str]:
        self.names.clear()
        sys.setprofile(self.note)
        return self.names

    def __exit__(self, *error) -> None:
        sys.setprofile(None)


@pytest.mark.parametrize("with_model", [False, True], ids=["plain", "model="])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layers", [1, 16])
def test_no_python_runs_in_the_middle_of_a_window(layers, dtype, with_model):
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)]).cuda().to(dtype)
    optimizer = wrap(model, **({"model": model} if with_model else {}))
    counted = Counted()
    for step in range(2 * STEPS):
        with counted as forward:
            output = model(batch(step, 8, 16).to(dtype))
            num_forward = forward.total()
        output.register_hook(counted.watch_thread)
        with counted as backward:
            output.square().mean().backward()
            num_backward = backward.total()
        with counted as ends:
            optimizer.step()
            optimizer.zero_grad()
            num_ends = ends.total()
        if step % STEPS in (1, 2):
            assert num_forward <= (layers if with_model else 0)
            assert num_backward == 0
            assert num_ends <= 2
        elif step == 0:
            assert num_backward > 0  # so the count counts


@pytest.mark.parametrize("with_model", [False, True], ids=["plain", "model="])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_pytorch(dtype, with_model):
    model = nn.Sequential(nn.Linear(33, 17), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 5)).cuda().to(dtype)
    optimizer = wrap(model, **({"model": model} if with_model else {}))
    tolerances = {"rtol": 3e-2, "atol": 2e-3} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}

    def loss_of(net: nn.Module, seed: int) -> Tensor:
        return net(batch(seed, 7, 33).to(dtype)).float().square().mean()

    assert_window_equals_pytorchs(model, optimizer, loss_of, **tolerances)


class UsedTwice(nn.Module):
    """The weight is a Linear's, whose product is added inside its backward, and is read directly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.linear.weight.square()


def test_a_weight_of_a_product_that_is_also_read_directly():
    model = UsedTwice().cuda()
    optimizer = wrap(model, model=model)
    assert_window_equals_pytorchs(
        model, optimizer, lambda net, seed: net(net(batch(seed, 5, 8))).square().mean(), rtol=1e-4, atol=1e-5
    )


class Reentrant(nn.Module):
    """Adds to one weight in two backward passes, of which one runs inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.utils.checkpoint.checkpoint(lambda y: y @ self.weight, x, use_reentrant=True)
        return inner @ self.weight


def test_a_backward_inside_another():
    model = Reentrant().cuda()
    optimizer = wrap(model)
    assert_window_equals_pytorchs(
        model,
        optimizer,
        lambda net, seed: net(batch(seed, 5, 8).requires_grad_()).square().mean(),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_gradient_that_a_user_changes_later():
    """A hook keeps the gradient of one parameter, and a later hook of the same backward overwrites it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
    twin = copy.deepcopy(model)
    optimizer = wrap(model)
    kept = []

    def overwrite(gradient: Tensor) -> None:
        kept.pop().fill_(100.0)

    model[1].bias.register_hook(kept.append)
    model[0].bias.register_hook(overwrite)

    def loss_of(net: nn.Module, seed: int) -> Tensor:
        return net(batch(seed, 5, 8)).square().mean()

    for step in range(STEPS):
        loss_of(model, step).backward()
        (loss_of(twin, step) / STEPS).backward()
        if step < STEPS - 1:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_gradients_that_wait_are_added_when_they_are_many(monkeypatch):
    """In the middle of a window at most the limit of a bucket waits."""
    monkeypatch.setattr(engine, "LAUNCH_BYTES", 3 * 64 * 64 * 4)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(12)]).cuda()
    optimizer = wrap(model)
    peaks = []
    for step in range(STEPS):
        loss = model(batch(step, 4, 64)).square().mean()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        optimizer.step()
        optimizer.zero_grad()
    assert max(peaks[1:3]) < 6 * 64 * 64 * 4


def test_a_capture_cannot_begin_in_the_middle_of_a_window():
    model = nn.Linear(8, 8).cuda()
    x = batch(0, 5, 8)
    with side_stream():
        optimizer = wrap(model)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    whole = pytest.raises(RuntimeError, match="CUDA graph")
    with whole, torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x).square().mean().backward()


@pytest.mark.parametrize("with_model", [False, True], ids=["plain", "model="])
def test_the_callers_stream_waits_for_what_was_added_on_others(with_model):
    """In a manual loop users read p.grad, the sum, right after a backward."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).cuda()
    twin = copy.deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, None, **({"model": model} if with_model else {}))
    caller = torch.cuda.Stream()
    caller.wait_stream(torch.cuda.current_stream())
    for step in range(4):
        x = batch(step, 5, 8)
        with torch.cuda.stream(caller):
            caller.wait_stream(torch.cuda.default_stream())
            model(x).square().mean().backward()
            found = [p.grad.clone() for p in model.parameters()]
        torch.cuda.current_stream().wait_stream(caller)
        twin(x).square().mean().backward()
        for ours, theirs in zip(found, twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad)
    optimizer.close()


class UsedOnTwoStreams(nn.Module):
    """The weight is read directly on the current stream, then by a Linear on another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        here = torch.cuda.current_stream()
        direct = x @ self.linear.weight.square()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            product = self.linear(x)
            x.record_stream(self.side)
        here.wait_stream(self.side)
        product.record_stream(here)
        return direct + product

    def __deepcopy__(self, memo) -> nn.Module:
        made = UsedOnTwoStreams().cuda()
        made.load_state_dict(self.state_dict())
        return made


def test_an_addition_waits_for_a_product_on_another_stream():
    model = UsedOnTwoStreams().cuda()
    optimizer = wrap(model, model=model)
    assert_window_equals_pytorchs(
        model, optimizer, lambda net, seed: net(batch(seed, 5, 8)).square().mean(), rtol=1e-4, atol=1e-5
    )


class UsedOnStreamsInTurns(nn.Module):
    """A Linear that is called on the current stream, on another, and on the current one again."""

    def __init__(self, side: torch.cuda.Stream) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        here = torch.cuda.current_stream()
        output = self.linear(x)
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            x.record_stream(self.side)
            other = self.linear(2 * x)
        output = output * self.linear(3 * x)
        here.wait_stream(self.side)
        other.record_stream(here)
        return output + other

    def __deepcopy__(self, memo) -> nn.Module:
        made = UsedOnStreamsInTurns(self.side).cuda()
        made.load_state_dict(self.state_dict())
        return made


def test_each_product_waits_for_the_last_one():
    model = UsedOnStreamsInTurns(torch.cuda.Stream()).cuda()
    optimizer = wrap(model, model=model)
    assert_window_equals_pytorchs(
        model, optimizer, lambda net, seed: net(batch(seed, 5, 8)).square().mean(), rtol=1e-4, atol=1e-5
    )


def test_two_callers_that_do_not_wait_for_each_other():
    """Their gradients are added on the stream of the parameter's node."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).cuda()
    twin = copy.deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, None)
    here = torch.cuda.current_stream()
    callers = [torch.cuda.Stream() for _ in range(2)]
    for step in range(3):
        for number, caller in enumerate(callers):
            x = batch(2 * step + number, 5, 8)
            caller.wait_stream(here)
            with torch.cuda.stream(caller):
                model(x).square().mean().backward()
            x.record_stream(caller)
            twin(x).square().mean().backward()
        for caller in callers:
            here.wait_stream(caller)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    optimizer.close()


def test_a_linear_that_is_also_called_in_a_compiled_graph():
    """Python adds the products of compiled graphs, native code the others, also in a first micro-batch."""
    model = nn.Linear(160, 160, bias=False).cuda()
    optimizer = wrap(model, model=model)
    compiled = torch.compile(lambda net, x: net(x).square(), backend="aot_eager")

    def loss_of(net: nn.Module, seed: int) -> Tensor:
        x = batch(seed, 5, 160)
        first = compiled(net, x) if net is model else net(x).square()
        return net(2 * x).square().mean() + first.mean()

    assert_window_equals_pytorchs(model, optimizer, loss_of, rtol=1e-4, atol=1e-5)


class OfTwoDtypes(nn.Module):
    """A Linear under autocast on a side stream, and in float32 on the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, side: torch.cuda.Stream) -> Tensor:
        here = torch.cuda.current_stream()
        output = self.linear(x)
        side.wait_stream(here)
        with torch.cuda.stream(side), torch.autocast("cuda", torch.bfloat16):
            other = self.linear(2 * x).float()
        here.wait_stream(side)
        other.record_stream(here)
        return output + other


@pytest.mark.parametrize("steps", [None, STEPS])
def test_native_additions_wait_for_those_of_python(steps, monkeypatch):
    """Without a product of 16-bit operands into a float32 sum, Python adds it in parts."""
    monkeypatch.setattr(matmul_eager, "_widens_on", lambda *key: False)
    model = OfTwoDtypes().cuda()
    twin = copy.deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, steps, model=model)
    side = torch.cuda.Stream()
    for step in range(STEPS):
        x = batch(step, 5, 16)
        model(x, side).square().mean().backward()
        (twin(x, side).square().mean() / (steps or 1)).backward()
        if steps is not None and step < STEPS - 1:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.linear.weight.grad, twin.linear.weight.grad, rtol=2e-2, atol=1e-2)
    optimizer.close()


class FailingLaunch(TorchDispatchMode):
    """Raises in the operator that adds gradients."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.fusedacc.scale_accumulate_.default:
            raise torch.OutOfMemoryError("no memory")
        return func(*args, **(kwargs or {}))


def wait_for_failure(optimizer: fusedacc.AccumulatingOptimizer) -> None:
    """Wait until the engine's thread of the GPU has freed the failed graph task, a moment after the error."""
    deadline = time.monotonic() + 10.0
    while not all(map(optimizer._engine.has_failed, optimizer._engine.backwards())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("native", [True, False], ids=["native", "begun by Python"])
def test_a_failed_launch_taints_the_window(native):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).cuda()
    optimizer = wrap(model, model=model)
    for step in range(2):
        model(batch(step, 5, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not native:
        optimizer._engine.drop_plan()
    with pytest.raises(torch.OutOfMemoryError, match="no memory"), FailingLaunch():
        model(batch(2, 5, 16)).square().mean().backward()
    wait_for_failure(optimizer)
    with pytest.raises(RuntimeError, match="discard"):
        optimizer.step()
    optimizer.discard()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in the backward")


def test_a_capture_after_a_failed_backward():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).cuda()
    optimizer = wrap(model)
    x = batch(0, 5, 16)

    def micro_batch(between=lambda hidden: hidden):
        optimizer.zero_grad()
        model[1](between(model[0](x))).square().mean().backward()
        optimizer.step()

    with side_stream():
        for _ in range(STEPS + 1):
            micro_batch()
        with pytest.raises(ValueError, match="in the backward"):
            micro_batch(Fails.apply)
        wait_for_failure(optimizer)
        optimizer.discard()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            micro_batch()
    graph.replay()


def test_native_code_leaves_a_backend_that_has_failed_its_self_test(monkeypatch):
    monkeypatch.setenv("FUSEDACC_SELFTEST", "1")
    model = nn.Linear(8, 8).cuda()
    selftest.forget()
    with monkeypatch.context() as deferring:
        deferring.setattr(selftest, "_may_check", lambda device: False)
        optimizer = wrap(model)
    try:
        selftest.exclude("cuda", torch.device("cuda:0"), "wrong sums")
        for step in range(2 * STEPS):
            fails = FailingLaunch() if step >= STEPS else contextlib.nullcontext()
            with fails:
                model(batch(step, 5, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        selftest.forget()


class TwoDtypes(nn.Module):
    """Layers of two dtypes, so that their gradients and sums have two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x.bfloat16()).float())


def test_gradients_of_two_dtypes():
    model = TwoDtypes().cuda()
    assert_window_equals_pytorchs(
        model, wrap(model), lambda net, seed: net(batch(seed, 5, 8)).square().mean(), rtol=3e-2, atol=2e-3
    )


def test_sums_that_begin_in_different_micro_batches():
    """Their scales are applied in different additions."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()

    def loss_of(net: nn.Sequential, seed: int) -> Tensor:
        number = 1 + min(seed % STEPS, 1)
        return net[:number](batch(seed, 5, 8)).square().mean()

    assert_window_equals_pytorchs(model, wrap(model), loss_of, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "weighted"])
def test_a_parameter_that_was_added_on_another_stream(reduction):
    """Its gradients arrive on that stream. Their scale may be on the GPU."""
    first, second = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
    model = nn.ModuleList([first, second])
    inner = torch.optim.SGD(first.parameters(), lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, STEPS, reduction=reduction)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        optimizer.add_param_group({"params": list(second.parameters())})

    def loss_of(net: nn.ModuleList, seed: int) -> Tensor:
        here = torch.cuda.current_stream()
        x = batch(seed, 5, 8)
        loss = net[0](x).square().mean()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            x.record_stream(side)
            other = net[1](x).square().mean()
        here.wait_stream(side)
        other.record_stream(here)
        return loss + other

    twin = copy.deepcopy(model)
    for seed in range(STEPS):
        weight = torch.full((), 2.0, device="cuda") if reduction == "weighted" else None
        with optimizer.accumulate(weight=weight):
            loss_of(model, seed).backward()
        (loss_of(twin, seed) / STEPS).backward()
        if seed < STEPS - 1:
            optimizer.step(), optimizer.zero_grad()
    torch.cuda.synchronize()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


class CountedLaunches(TorchDispatchMode):
    """Counts the calls of the operator that adds gradients."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.fusedacc.scale_accumulate_.default
        return func(*args, **(kwargs or {}))


def test_full_buckets_are_added_in_one_launch_each(monkeypatch):
    monkeypatch.setattr(engine, "LAUNCH_BYTES", 3 * 64 * 64 * 4)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(12)]).cuda()
    optimizer = wrap(model)
    for step in range(STEPS):
        loss = model(batch(step, 4, 64)).square().mean()
        with CountedLaunches() as launches:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            assert launches.count == 4


@pytest.mark.parametrize("uses_module", [True, False], ids=["a product", "a gradient"])
def test_backward_passes_of_two_threads_add_to_one_sum_in_turns(uses_module):
    """The engine's thread of the GPU runs nodes of both, those that were recorded last first.

    A window's second addition multiplies the sum by the scale of the first, so a product must not overtake
    it. Later additions have the same factors, and must not share a launch.
    """
    torch.manual_seed(0)
    linear, other = nn.Linear(8, 8, bias=False).cuda(), nn.Parameter(torch.ones(8).cuda())
    weight = linear.weight
    inner = torch.optim.SGD([weight, other], lr=0.1)
    optimizer = fusedacc.AccumulatingOptimizer(inner, STEPS, model=linear if uses_module else None)
    twin = weight.detach().clone().requires_grad_()
    xs = [batch(seed, 5, 8) for seed in range(3)]
    for _ in range(1 if uses_module else 2):
        (xs[0] @ weight).sum().backward()
        (xs[0] @ twin).sum().backward()
        optimizer.step(), optimizer.zero_grad()
    begun, queued = threading.Event(), threading.Event()

    def wait(gradient: Tensor) -> None:
        begun.set()
        assert queued.wait(60)

    last = (other * 1.0).sum()  # keeps the first backward pass from ending
    late = linear(xs[2]) if uses_module else (xs[2] @ weight.square()) * 0.5
    first = (xs[1] @ weight).sum() + last
    first.register_hook(wait)
    second = (other * 1.0).sum() + late.sum()
    torch.cuda.synchronize()
    threads = [threading.Thread(target=loss.backward) for loss in (first, second)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    time.sleep(0.3)
    queued.set()
    for thread in threads:
        thread.join(60)
    torch.cuda.synchronize()
    optimizer.step(), optimizer.zero_grad()
    of_late = nn.functional.linear(xs[2], twin) if uses_module else (xs[2] @ twin.square()) * 0.5
    ((xs[1] @ twin).sum() + of_late.sum()).backward()
    (slot, _) = optimizer._slots
    torch.testing.assert_close(slot.accumulator * slot.beta, twin.grad / STEPS, rtol=1e-4, atol=1e-4)
