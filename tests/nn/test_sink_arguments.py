"""Wrong arguments and wrong uses of a sink raise before anything is changed."""

import pytest
import torch
from sink_functions import Model, count_sinks, loss_of, twin_of
from torch import nn

import fusedacc
from fusedacc.kernels import native_module

pytestmark = pytest.mark.skipif(not native_module.loaded(), reason="sinks need the native engine")


class Asking(torch.autograd.Function):
    """Gives the sink of a weight to a function, in the backward."""

    @staticmethod
    def forward(ctx, weight, use):
        ctx.save_for_backward(weight)
        ctx.use = use
        return weight.sum()

    @staticmethod
    def backward(ctx, grad):
        ctx.use(fusedacc.sink(ctx.saved_tensors[0]))
        return None, None


def use_sink(shape, use) -> tuple[nn.Parameter, fusedacc.AccumulatingOptimizer]:
    """Use the sink of a new parameter of this shape, whose sum holds ones."""
    weight = nn.Parameter(torch.randn(shape))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.ones(shape)
    Asking.apply(weight, use).backward()
    return weight, optimizer


def offsets(*ends: int, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(ends, dtype=dtype)


ones = torch.ones
#: The parameter's shape, the use, the exception, and words of its message.
WRONG = {
    "product columns": (
        (6, 4),
        lambda s: s.add_product(ones(5, 4), ones(5, 4)),
        ValueError,
        r"left.*\(5, 4\)",
    ),
    "product right": (
        (6, 4),
        lambda s: s.add_product(ones(5, 6), ones(5, 6)),
        ValueError,
        r"right.*\(5, 6\)",
    ),
    "product rows": ((6, 4), lambda s: s.add_product(ones(5, 6), ones(3, 4)), ValueError, "5 rows.* 3"),
    "product dimensions": ((6, 4), lambda s: s.add_product(ones(1, 5, 6), ones(1, 5, 4)), ValueError, "left"),
    "product dtypes": (
        (6, 4),
        lambda s: s.add_product(ones(5, 6), ones(5, 4).half()),
        TypeError,
        "float32.*float16",
    ),
    "product integers": ((6, 4), lambda s: s.add_product(ones(5, 6).int(), ones(5, 4)), TypeError, "int32"),
    "product sparse": (
        (6, 4),
        lambda s: s.add_product(ones(5, 6).to_sparse(), ones(5, 4)),
        TypeError,
        "left",
    ),
    "product meta": (
        (6, 4),
        lambda s: s.add_product(ones(5, 6, device="meta"), ones(5, 4)),
        ValueError,
        "meta.*cpu",
    ),
    "product no tensor": ((6, 4), lambda s: s.add_product([1.0], ones(5, 4)), TypeError, r"\[1.0\]"),
    "product vector": ((6,), lambda s: s.add_product(ones(5, 6), ones(5, 1)), ValueError, r"\(6,\)"),
    "grouped matrix": (
        (6, 4),
        lambda s: s.add_grouped(ones(5, 6), ones(5, 4), offsets(5)),
        ValueError,
        "experts",
    ),
    "grouped int64": (
        (2, 4, 8),
        lambda s: s.add_grouped(ones(5, 4), ones(5, 8), offsets(1, 5, dtype=torch.int64)),
        TypeError,
        "int64",
    ),
    "grouped too few": (
        (2, 4, 8),
        lambda s: s.add_grouped(ones(5, 4), ones(5, 8), offsets(5)),
        ValueError,
        r"offs.*\(1,\)",
    ),
    "grouped too far": (
        (2, 4, 8),
        lambda s: s.add_grouped(ones(5, 4), ones(5, 8), offsets(1, 6)),
        ValueError,
        r"offs\[1\] is 6",
    ),
    "grouped backwards": (
        (2, 4, 8),
        lambda s: s.add_grouped(ones(5, 4), ones(5, 8), offsets(3, 2)),
        ValueError,
        r"offs\[1\] is 2",
    ),
    "rows too high": ((6, 4), lambda s: s.add_rows(torch.tensor([6]), ones(1, 4)), IndexError, "6"),
    "rows negative": ((6, 4), lambda s: s.add_rows(torch.tensor([-1]), ones(1, 4)), IndexError, "-1"),
    "rows floats": ((6, 4), lambda s: s.add_rows(ones(1), ones(1, 4)), TypeError, "float32"),
    "rows shape": ((6, 4), lambda s: s.add_rows(torch.tensor([1, 2]), ones(1, 4)), ValueError, "rows"),
    "rows of a stack": (
        (2, 4, 8),
        lambda s: s.add_rows(torch.tensor([1]), ones(1, 8)),
        ValueError,
        "features",
    ),
    "gradient shape": ((6, 4), lambda s: s.add(ones(4, 6)), ValueError, r"\(4, 6\)"),
    "gradient dtype": ((6, 4), lambda s: s.add(ones(6, 4).long()), TypeError, "int64"),
    "gradient complex": ((6, 4), lambda s: s.add(ones(6, 4, dtype=torch.cfloat)), TypeError, "complex"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_and_change_nothing(name):
    shape, use, error, words = WRONG[name]
    used = []

    def wrong(sink):
        used.append(sink)
        with pytest.raises(error, match=words):
            use(sink)

    weight, optimizer = use_sink(shape, wrong)
    assert used
    assert torch.equal(weight.grad, ones(shape))
    optimizer.step()


def test_a_sink_ends_with_its_backward():
    kept = []
    weight, _optimizer = use_sink((6, 4), kept.append)
    uses = [lambda: kept[0].add(ones(6, 4)), lambda: kept[0].write().__enter__()]
    for use in uses:
        with pytest.raises(RuntimeError, match="after the backward"):
            use()

    def in_another(sink):
        for use in uses:
            with pytest.raises(RuntimeError, match="after the backward"):
                use()

    Asking.apply(weight, in_another).backward()
    assert torch.equal(weight.grad, ones(6, 4))


def test_a_sum_that_is_open_takes_no_other_gradient():
    def twice(sink):
        with sink.write() as (accumulator, scale, beta):
            for use in (lambda: sink.add(ones(6, 4)), lambda: sink.write().__enter__()):
                with pytest.raises(RuntimeError, match="is open"):
                    use()
            accumulator.mul_(beta).add_(scale * ones(6, 4))
        sink.add(ones(6, 4))
        with sink.write() as (accumulator, scale, beta):
            accumulator.mul_(beta).add_(scale * ones(6, 4))

    weight, _optimizer = use_sink((6, 4), twice)
    assert torch.equal(weight.grad, 4 * ones(6, 4))


def test_what_is_no_tensor():
    with pytest.raises(TypeError, match="param is str"):
        fusedacc.sink("weight")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_operands_of_any_floating_dtype(dtype):
    """Where no kernel takes the dtypes, the gradient is computed and added."""

    def use(sink):
        sink.add_product(ones(5, 6, dtype=dtype), ones(5, 4, dtype=dtype))
        sink.add_rows(torch.tensor([1]), ones(1, 4, dtype=dtype))
        sink.add(ones(6, 4, dtype=dtype))

    weight, _optimizer = use_sink((6, 4), use)
    wanted = 7 * ones(6, 4)
    wanted[1] += 1
    assert torch.equal(weight.grad, wanted)


def test_what_write_yields():
    seen = []

    def use(sink):
        with sink.write() as (accumulator, scale, beta):
            seen.append((accumulator.shape, accumulator.dtype, scale, beta, accumulator.requires_grad))
            accumulator.mul_(beta) if beta else accumulator.zero_()
            accumulator.add_(scale * ones(6, 4))

    weight = nn.Parameter(torch.randn(6, 4).bfloat16())
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 4)
    for _ in range(4):
        Asking.apply(weight, use).backward()
        optimizer.step()
    assert [scale for _, _, scale, _, _ in seen] == [0.25] * 4
    assert [beta for _, _, _, beta, _ in seen] == [0.0, 1.0, 1.0, 1.0]
    assert {entry[:2] for entry in seen} == {((6, 4), torch.float32)}
    assert not any(entry[-1] for entry in seen)


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_deferred_scale_is_the_beta_of_write_if_it_is_a_number(is_tensor):
    """A first gradient becomes the sum, with its scale deferred."""
    weight = nn.Parameter(torch.zeros(6, 4))
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    betas = []

    def use(sink):
        with sink.write() as (accumulator, scale, beta):
            betas.append(beta)
            accumulator.mul_(beta).add_(scale * ones(6, 4))

    (weight * 2).sum().backward()
    (slot,) = optimizer._slots
    assert slot.beta == 0.5
    if is_tensor:
        slot.beta = torch.tensor(0.5)  # as with a loss scale on a GPU
    Asking.apply(weight, use).backward()
    assert betas == [1.0 if is_tensor else 0.5]
    assert not isinstance(betas[0], torch.Tensor)
    assert torch.equal(slot.accumulator, 1.5 * ones(6, 4))


def test_without_the_native_engine_there_are_no_sinks(monkeypatch):
    monkeypatch.setenv("FUSEDACC_ENGINE", "0")
    found = count_sinks(monkeypatch)
    model = Model()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    twin = twin_of(model)
    for net in (model, twin):
        loss_of(net).backward()
    assert found
    assert not any(found)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)
    x = torch.randn(5, 8)
    optimizer.zero_grad()
    fusedacc.nn.functional.linear(x, model.up).sum().backward()
    torch.testing.assert_close(model.up.grad, torch.ones(16, 5) @ x)
