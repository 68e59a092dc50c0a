"""The kernel benchmark: every provider computes the sum, moves the bytes it claims, and may be missing."""

from __future__ import annotations

import pytest
import torch
from bench_setup import CPU
from benchmarks.harness.measure import PEAK
from benchmarks.harness.results import Results

from benchmarks.contestants import accumulate as providers
from benchmarks.contestants import products
from benchmarks.suites import kernel_cases, kernels
from fusedacc.traffic import TrafficMeter

SHAPES = ((1,), (3,), (7, 5), (1023,), (2, 3, 5, 7))
SCALE = 0.125


def can_run(registry) -> list[str]:
    """The providers that do the job on CPU tensors here; copy and triad do another."""
    return [
        name for name, provider in registry.items() if name not in PEAK and provider.unavailable(CPU) is None
    ]


def lists(dtypes: str, generator: torch.Generator, shapes=SHAPES):
    gradient, accumulator = kernel_cases.DTYPES[dtypes]
    accumulators = [torch.randn(shape, generator=generator).to(accumulator) for shape in shapes]
    return accumulators, [torch.randn(shape, generator=generator).to(gradient) for shape in shapes]


def layer(dtypes: str, generator: torch.Generator):
    gradient, accumulator = kernel_cases.DTYPES[dtypes]
    dy, x = (torch.randn(5, n, generator=generator).to(gradient) for n in (7, 3))
    return [torch.randn(7, 3, generator=generator).to(accumulator)], [(dy, x)]


@pytest.mark.parametrize("dtypes", kernel_cases.DTYPES)
@pytest.mark.parametrize("name", can_run(providers.ACCUMULATE))
def test_every_provider_computes_the_sum(name, dtypes, generator):
    provider = providers.ACCUMULATE[name]
    accumulators, gradients = lists(dtypes, generator)
    if provider.compiled and dtypes not in kernel_cases.MAIN_DTYPES:
        assert kernels.Work("1Ki", dtypes, CPU, "full").compile_obstacle()
        return
    why = provider.unsupported(accumulators, gradients)
    if why is not None:
        assert "dtypes are equal" in why
        assert gradients[0].dtype == accumulators[0].dtype
        return
    added = providers.scratch(accumulators, "other") if name == "add_ same dtype" else gradients
    before = [(acc.clone(), gradient.clone()) for acc, gradient in zip(accumulators, added, strict=True)]
    run = provider.make(accumulators, gradients, SCALE)
    run()
    run()
    for acc, gradient, (old, given) in zip(accumulators, added, before, strict=True):
        expected = old.double() + 2 * SCALE * given.double()
        roundings = 4 * torch.finfo(acc.dtype).eps * (old.double().abs() + given.double().abs())
        assert ((acc.double() - expected).abs() <= roundings).all()
        assert torch.equal(gradient, given), "the gradient is read only"


@pytest.mark.parametrize("dtypes", kernel_cases.PRODUCT_DTYPES)
@pytest.mark.parametrize("name", can_run(products.PRODUCT))
def test_every_product_is_added(name, dtypes, generator):
    provider = products.PRODUCT[name]
    accumulators, gradients = layer(dtypes, generator)
    if why := provider.unsupported(accumulators, gradients):
        assert "needs one dtype" in why
        return
    ((dy, x),) = gradients
    product = dy.double().t() @ x.double()
    largest = dy.double().abs().t() @ x.double().abs()
    expected = accumulators[0].double() + product
    provider.make(accumulators, gradients, 1.0)()
    allowed = 2 * torch.finfo(dy.dtype).eps * largest + 1e-6
    assert ((accumulators[0].double() - expected).abs() <= allowed).all()


def counted(provider, accumulators, gradients) -> int:
    run = provider.make(accumulators, gradients, SCALE)
    run()
    with TrafficMeter() as meter:
        run()
    if provider.name != "fusedacc eager":
        assert not meter.uncounted
        return meter.total_bytes
    # The plan compares addresses in small integer tensors before it adds.
    by_op = meter.as_dict()["by_op"]
    sums = sum(by_op[op]["total_bytes"] for op in ("aten::add_", "aten::copy_") if op in by_op)
    size = accumulators[0].itemsize
    wide = sum(acc.numel() for acc in accumulators) * (size + 4) if size < 4 else 0
    return sums + wide


@pytest.mark.parametrize(
    ("registry", "make", "dtypes"),
    [(providers.ACCUMULATE, lists, dtypes) for dtypes in kernel_cases.DTYPES]
    + [(products.PRODUCT, layer, dtypes) for dtypes in kernel_cases.PRODUCT_DTYPES],
)
def test_counted_bytes_are_those_of_the_formula(registry, make, dtypes, generator):
    for name, provider in registry.items():
        tensors = make(dtypes, generator)
        seen = provider.counted or name == "fusedacc eager"
        if seen and not provider.unavailable(CPU) and not provider.unsupported(*tensors):
            assert counted(provider, *tensors) == provider.moved(*tensors), name


def test_goals_name_what_exists():
    for (size, dtypes, provider), goals in kernel_cases.GOALS.items():
        assert size in kernel_cases.SIZES
        assert dtypes in kernel_cases.DTYPES
        assert {provider, *(goal.against for goal in goals)} <= set(kernels.PROVIDERS)
    for sweep in kernel_cases.SWEEPS.values():
        assert set(sweep) <= set(kernel_cases.SIZES)
    assert not any("," in name for name in (*kernels.PROVIDERS, *kernel_cases.SIZES))


def measured(size: str, *names: str, dtypes: str = "bfloat16:float32") -> list:
    results = Results(None)
    kernels.figures(results, "quick", providers=names, dtypes=[dtypes], sizes=[size])
    return results.rows


def test_a_provider_that_fails_is_a_row(monkeypatch):
    def make(accumulators, gradients, scale):
        raise RuntimeError("no such kernel\nand a long story")

    monkeypatch.setitem(providers.ACCUMULATE, "add_", providers.Provider("add_", "", make))
    rows = {row.provider: row for row in measured("300x4", "add_", "torch._foreach_add_", "fusedacc cpu")}
    assert rows["add_"].note == "not run: RuntimeError: no such kernel"
    assert rows["fusedacc cpu"].median > 0


@pytest.mark.cuda
@pytest.mark.parametrize("dtypes", kernel_cases.MAIN_DTYPES)
def test_every_provider_computes_the_sum_on_a_gpu(dtypes, generator):
    device = torch.device("cuda")
    for name, provider in providers.ACCUMULATE.items():
        accumulators, gradients = ([t.to(device) for t in tensors] for tensors in lists(dtypes, generator))
        if name in PEAK or provider.unavailable(device) or provider.unsupported(accumulators, gradients):
            continue
        added = providers.scratch(accumulators, "other") if name == "add_ same dtype" else gradients
        expected = [a.double() + SCALE * g.double() for a, g in zip(accumulators, added, strict=True)]
        provider.make(accumulators, gradients, SCALE)()
        for acc, exact in zip(accumulators, expected, strict=True):
            torch.testing.assert_close(acc.double(), exact, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.cuda
def test_a_gpus_row_counts_kernels_and_host_time():
    results = Results(None, "cuda")
    names, dtypes = ["fusedacc cuda", "add_"], ["float32:float32"]
    kernels.figures(results, "quick", providers=names, dtypes=dtypes, sizes=["300x4"])
    rows = {row.provider: row for row in results.rows}
    assert rows["add_"].launches == 300
    assert rows["fusedacc cuda"].launches == 1
    assert all(row.host_us > 0 and row.median > 0 for row in rows.values())
