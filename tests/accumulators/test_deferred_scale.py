"""Sums that owe a multiplication: the next addition pays it, or one pass over those that none reaches."""

import copy

import pytest
import torch
from loops import LOW, Failure, NoHostRead, fail, failing, through_file, wrap
from torch import Tensor, nn

from fusedacc.accumulators.reduction import WEIGHING
from fusedacc.kernels import registry
from fusedacc.optimizer import window as window_module
from fusedacc.traffic import TrafficMeter

F32 = torch.float32
SIZE = 64


class Layers(nn.Module):
    """Parameters of which each micro-batch uses those that it names."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.ParameterList(nn.Parameter(torch.randn(SIZE).to(dtype)) for _ in range(3))

    def backward(self, names: str = "012", seed: int = 0) -> list[Tensor]:
        """Backward of one micro-batch; returns what the gradients of the named parameters are."""
        given = torch.Generator().manual_seed(seed)
        values = [torch.randn(SIZE, generator=given).to(self.used[0].dtype) for _ in self.used]
        sum((self.used[int(n)] * values[int(n)]).sum() for n in names).backward()
        return [values[int(n)] for n in names]


def build(steps=3, dtype=F32, **options):
    model = Layers(dtype)
    return model, wrap(model, steps, lr=0.0, **options)


def accumulated(meter: TrafficMeter) -> float:
    """Bytes of accumulation per parameter's element."""
    return sum(meter.as_dict()["by_phase_and_kind"].get("accumulate", {}).values()) / (3 * SIZE)


def run(model, optimizer, parts, weights=None, done: int = 0):
    """One backward for each of `parts`, which name parameters, but for those done; without the last step."""
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
    # A third of the sums is added to once, and multiplied by itself.
    assert bytes_of([ALL, "01"], dtype=dtype) == (2 * 3 * width + 2 * width) / 3
    assert bytes_of(["01", ALL], dtype=dtype) == (2 * 3 * width + 2 * width) / 3


@pytest.mark.parametrize(("dtype", "steps", "first"), [(LOW, 3, 4), (torch.float16, 4, 4), (LOW, 4, 0)])
def test_16_bit_sums_are_scaled_at_once(dtype, steps, first):
    """They would not be rounded in between, and a checkpoint would show it.

    Powers of two in bfloat16 round nothing.
    """
    assert bytes_of([ALL] * steps, dtype=dtype, accumulate_dtype=dtype) == first + 6 * (steps - 1)


@pytest.mark.parametrize("steps", [2, 8])
def test_the_bits_of_a_bfloat16_sum_that_owes_a_power_of_two(cpu_backend, steps):
    model, optimizer = build(steps, LOW, backend=cpu_backend, accumulate_dtype=LOW)
    run(model, optimizer, [ALL] * steps)
    backend = registry.get(cpu_backend)
    twin = Layers(LOW)
    sums = [torch.empty(SIZE, dtype=LOW) for _ in ALL]
    for seed in range(steps):
        backend.accumulate_(sums, twin.backward(ALL, seed), 1 / steps, seed == 0)
    for parameter, total in zip(model.used, sums, strict=True):
        assert torch.equal(parameter.grad, total)


def test_a_manual_loop_shows_scaled_gradients():
    model, optimizer = build(None, reduction="weighted")
    with optimizer.accumulate(weight=3.0):
        values = model.backward()
    for param, value in zip(model.used, values, strict=True):
        assert torch.equal(param.grad, value * 3.0)


@pytest.mark.parametrize("dtype", [F32, torch.float64])
@pytest.mark.parametrize("parts", [[ALL] * 3, [ALL, "01", "12"], ["0", "01", "2"], ["2", "01", "01"]])
def test_the_bits_are_those_of_scaling_each_gradient_as_it_comes(cpu_backend, dtype, parts):
    model, optimizer = build(3, dtype, backend=cpu_backend)
    run(model, optimizer, parts)
    backend = registry.get(cpu_backend)
    twin, sums = Layers(dtype), {}
    for seed, names in enumerate(parts):
        for name, value in zip(names, twin.backward(names, seed), strict=True):
            first = name not in sums
            total = sums.setdefault(name, torch.empty_like(value))
            backend.accumulate_([total], [value], 1 / 3, first)
    for name, total in sums.items():
        assert torch.equal(model.used[int(name)].grad, total)


@pytest.mark.parametrize("weights", [None, [3.0, 5.0, 7.0]])
@pytest.mark.parametrize("parts", [[ALL, ALL], [ALL] * 3, [ALL, "01", "0"], ["01", "12", ALL]])
def test_saving_changes_no_bit_and_what_is_loaded_goes_on_with_the_same(parts, weights):
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


def test_a_moved_parameter_takes_a_scaled_sum_along():
    model, optimizer = build(2)
    first = model.backward()
    optimizer.step()
    model.double()
    optimizer._capture.registry.refresh()
    for slot, value in zip(optimizer._accumulators.slots, first, strict=True):
        assert torch.equal(optimizer._accumulators.grads.current(slot), (value * 0.5).double())
    assert not optimizer._accumulators.deferred.scales


def test_a_launch_for_each_factor_that_is_owed():
    """Weighted: two parameters had their first gradient in one micro-batch, the third in the next."""
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
def test_the_last_additions_bring_the_sums_to_their_final_scale(reduction, late, count, monkeypatch):
    """With a weight on the device too, which is not read by the host; its bytes are a few per launch."""
    if late:
        monkeypatch.setattr(window_module, "_on_host", lambda tensor: False)
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
def test_one_pass_over_the_sums_that_the_last_micro_batch_does_not_reach(parts, extra):
    additions = sum(map(len, parts)) - 3
    assert bytes_of(parts, [3.0, 5.0, 8.0], reduction="weighted") == pytest.approx(
        (12 * additions + extra) / 3
    )


def test_several_backwards_in_the_last_micro_batch_are_final_each():
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


def test_a_last_micro_batch_that_fails_before_its_first_gradient_is_repeated_with_another_weight():
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
    assert not optimizer._accumulators.deferred.scales
