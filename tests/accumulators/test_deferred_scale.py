"""Deferred scales: the next addition applies them, or one pass where there is no addition."""

import copy
import itertools

import pytest
import torch
from loops import LOW, Failure, NoHostRead, fail, failing, through_file, wrap
from torch import Tensor, nn

from fusedacc.accumulators.reduction import WEIGHING
from fusedacc.kernels import registry
from fusedacc.optimizer import micro_batch as micro_batch_module
from fusedacc.traffic import TrafficMeter

F32 = torch.float32
SIZE = 64


class Layers(nn.Module):
    """Parameters. Each micro-batch names those that it uses."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.ParameterList(nn.Parameter(torch.randn(SIZE).to(dtype)) for _ in range(3))

    def backward(self, names: str = "012", seed: int = 0) -> list[Tensor]:
        """Run the backward of one micro-batch and return the gradients of the named parameters."""
        given = torch.Generator().manual_seed(seed)
        values = [torch.randn(SIZE, generator=given).to(self.used[0].dtype) for _ in self.used]
        sum((self.used[int(n)] * values[int(n)]).sum() for n in names).backward()
        return [values[int(n)] for n in names]


def build(steps=3, dtype=F32, **options):
    model = Layers(dtype)
    return model, wrap(model, steps, lr=0.0, **options)


def accumulated(meter: TrafficMeter) -> float:
    """Return the bytes of accumulation per element of the parameters."""
    return sum(meter.as_dict()["by_phase_and_kind"].get("accumulate", {}).values()) / (3 * SIZE)


def run(model, optimizer, parts, weights=None, done: int = 0):
    """Run the micro-batches from `done` on, which name their parameters, without the last `step()`."""
    for seed, names in enumerate(parts[done:], done):
        with optimizer.accumulate(weight=None if weights is None else weights[seed]):
            model.backward(names, seed)
        if seed < len(parts) - 1:
            optimizer.step()


def assert_mean_of(model, first, second, weights=(1, 1)):
    for param, a, b in zip(model.used, first, second, strict=True):
        torch.testing.assert_close(param.grad, (weights[0] * a + weights[1] * b) / sum(weights))


def bytes_of(parts, weights=None, **options) -> float:
    model, optimizer = build(len(parts), **options)
    with TrafficMeter(model) as meter:
        run(model, optimizer, parts, weights)
    return accumulated(meter)


ALL = "012"


@pytest.mark.parametrize("dtype", [F32, torch.float64])
def test_a_window_scales_its_first_gradients_in_its_second_addition(dtype):
    width = dtype.itemsize
    assert bytes_of([ALL] * 3, dtype=dtype) == 2 * 3 * width
    # One of the three accumulators gets no second addition, so a pass multiplies it.
    assert bytes_of([ALL, "01"], dtype=dtype) == (2 * 3 * width + 2 * width) / 3
    assert bytes_of(["01", ALL], dtype=dtype) == (2 * 3 * width + 2 * width) / 3


@pytest.mark.parametrize(("dtype", "steps", "first"), [(LOW, 3, 4), (torch.float16, 4, 4), (LOW, 4, 0)])
def test_16_bit_accumulators_are_scaled_at_once(dtype, steps, first):
    """A deferred scale would skip a rounding.

    Powers of two in bfloat16 are deferred, because they round nothing.
    """
    assert bytes_of([ALL] * steps, dtype=dtype, accumulate_dtype=dtype) == first + 6 * (steps - 1)


def test_a_manual_loop_shows_scaled_gradients():
    model, optimizer = build(None, reduction="weighted")
    with optimizer.accumulate(weight=3.0):
        values = model.backward()
    for param, value in zip(model.used, values, strict=True):
        assert torch.equal(param.grad, value * 3.0)


PARTS = [[ALL] * 3, [ALL, "01", "12"], ["0", "01", "2"], ["2", "01", "01"]]


@pytest.mark.parametrize(
    ("dtype", "parts"), [*itertools.product([F32, torch.float64], PARTS), (LOW, [ALL] * 2), (LOW, [ALL] * 8)]
)
def test_deferred_scales_have_the_bits_of_scaling_each_gradient(cpu_backend, dtype, parts):
    """bfloat16 accumulators defer powers of two."""
    given = {"accumulate_dtype": LOW} if dtype == LOW else {}
    model, optimizer = build(len(parts), dtype, backend=cpu_backend, **given)
    run(model, optimizer, parts)
    backend = registry.get(cpu_backend)
    twin, sums = Layers(dtype), {}
    for seed, names in enumerate(parts):
        for name, value in zip(names, twin.backward(names, seed), strict=True):
            first = name not in sums
            total = sums.setdefault(name, torch.empty_like(value))
            backend.accumulate_([total], [value], 1 / len(parts), first)
    for name, total in sums.items():
        assert torch.equal(model.used[int(name)].grad, total)


@pytest.mark.parametrize("weights", [None, [3.0, 5.0, 7.0]])
@pytest.mark.parametrize("parts", [[ALL, ALL], [ALL] * 3, [ALL, "01", "0"], ["01", "12", ALL]])
def test_saving_loading_and_copying_change_no_bit(parts, weights):
    reduction = "mean" if weights is None else "weighted"
    found = []
    for way in ("not saved", "saved", "loaded", "copied"):
        model, optimizer = build(len(parts), reduction=reduction)
        for seed in range(len(parts) - 1):
            with optimizer.accumulate(weight=None if weights is None else weights[seed]):
                model.backward(parts[seed], seed)
            optimizer.step()
            if way == "not saved":
                continue
            saved = through_file(optimizer.state_dict())
            if way == "loaded":
                model, optimizer = build(len(parts), reduction=reduction)
                optimizer.load_state_dict(saved)
            if way == "copied":
                model, optimizer = copy.deepcopy((model, optimizer))
        run(model, optimizer, parts, weights, len(parts) - 1)
        found.append([param.grad for param in model.used])
    for gradients in found[1:]:
        for ours, wanted in zip(gradients, found[0], strict=True):
            assert (ours is None) == (wanted is None)
            assert ours is None or torch.equal(ours, wanted)


def test_a_cast_of_the_model_applies_the_deferred_scale():
    model, optimizer = build(2)
    first = model.backward()
    optimizer.step()
    model.double()
    optimizer._capture.registry.refresh()
    for slot, value in zip(optimizer._accumulators.slots, first, strict=True):
        assert torch.equal(optimizer._accumulators.grads.current(slot), (value * 0.5).double())
    assert not optimizer._accumulators.deferred.select_deferred()


def test_each_deferred_factor_is_one_launch():
    """Weights differ: two parameters got their first gradient in one micro-batch, the third in the next."""
    model, optimizer = build(4, reduction="weighted")
    run(model, optimizer, ["01", "2"], [3.0, 5.0])
    optimizer.step()
    with TrafficMeter(model) as meter, optimizer.accumulate(weight=7.0):
        model.backward(ALL, 2)
    calls = [op["calls"] for name, op in meter.as_dict()["by_op"].items() if "accumulate" in name]
    assert sum(calls) == 2
    assert accumulated(meter) == 12
    optimizer.step()
    with optimizer.accumulate(weight=1.0):
        model.backward(ALL, 3)
    values = [Layers().backward(ALL, seed) for seed in range(4)]
    for index, param in enumerate(model.used):
        weights = [3.0, 0.0, 7.0, 1.0] if index < 2 else [0.0, 5.0, 7.0, 1.0]
        total = sum(weight * each[index] for weight, each in zip(weights, values, strict=True))
        torch.testing.assert_close(param.grad, total / 16.0)


# The window's final scale


@pytest.mark.parametrize("reduction", WEIGHING)
@pytest.mark.parametrize("late", [False, True], ids=["", "device"])
@pytest.mark.parametrize("count", [2, 3])
def test_the_last_additions_apply_the_final_scale(reduction, late, count, monkeypatch):
    """The host does not read a weight on the device. Its bytes are a few per launch."""
    if late:
        monkeypatch.setattr(micro_batch_module, "_on_host", lambda tensor: False)
    numbers = [3.0, 5.0, 8.0][:count]
    weights = [torch.tensor(number) for number in numbers] if late else numbers
    model, optimizer = build(count, reduction=reduction)
    with TrafficMeter(model) as meter, NoHostRead():
        run(model, optimizer, [ALL] * count, weights)
    launches = {name: op for name, op in meter.as_dict()["by_op"].items() if name.startswith("fusedacc::")}
    assert sum(op["calls"] for op in launches.values()) == count - 1  # the first gradients become the sums
    moved = sum(op["read_bytes"] + op["written_bytes"] for op in launches.values())
    assert moved / (3 * SIZE) == pytest.approx(12 * (count - 1), abs=0.1)
    values = [Layers().backward(ALL, seed) for seed in range(count)]
    for index, param in enumerate(model.used):
        terms = [
            each[index] * (weight if reduction == "weighted" else 1.0)
            for weight, each in zip(numbers, values, strict=True)
        ]
        torch.testing.assert_close(param.grad, sum(terms) / sum(numbers))


@pytest.mark.parametrize(
    ("parts", "extra"), [([ALL, ALL, "01"], 8), ([ALL, "01", "2"], 16), ([ALL, "1"], 16)]
)
def test_one_pass_scales_the_accumulators_without_a_last_addition(parts, extra):
    additions = sum(map(len, parts)) - 3
    assert bytes_of(parts, [3.0, 5.0, 8.0], reduction="weighted") == pytest.approx(
        (12 * additions + extra) / 3
    )


def test_each_backward_of_the_last_micro_batch_leaves_the_final_scale():
    model, optimizer = build(2, reduction="weighted")
    first = Layers().backward(ALL, 0)
    run(model, optimizer, [ALL], [3.0])
    optimizer.step()
    with optimizer.accumulate(weight=5.0):
        second = model.backward(ALL, 1)
        assert_mean_of(model, first, second, (3, 5))
        third = model.backward("0", 2)
    torch.testing.assert_close(model.used[0].grad, (3 * first[0] + 5 * second[0] + 5 * third[0]) / 8)
    torch.testing.assert_close(model.used[1].grad, (3 * first[1] + 5 * second[1]) / 8)


def test_a_micro_batch_that_fails_before_its_first_gradient_may_be_repeated_with_another_weight():
    model, optimizer = build(2, reduction="weighted")
    run(model, optimizer, [ALL], [3.0])
    optimizer.step()
    with failing(model.used[2]), optimizer.accumulate(weight=100.0):  # before the gradient is taken
        model.backward("2", 1)
    with optimizer.accumulate(weight=5.0):
        second = model.backward(ALL, 1)
    assert_mean_of(model, Layers().backward(ALL, 0), second, (3, 5))


def test_a_failure_after_the_first_gradient_taints_the_window():
    model, optimizer = build(2, reduction="weighted")
    run(model, optimizer, [ALL], [3.0])
    optimizer.step()
    seen = []
    model.used[1].register_hook(lambda gradient: seen.append(gradient))  # so it is added at once
    late = model.used[0] * 1.0
    late.register_hook(fail)
    with pytest.raises(Failure), optimizer.accumulate(weight=5.0):
        (late.sum() + (model.used[1] * 2.0).sum()).backward()
    assert seen
    with pytest.raises(RuntimeError, match="discard"):
        optimizer.step()
    optimizer.discard()
    assert not optimizer._accumulators.deferred.select_deferred()
