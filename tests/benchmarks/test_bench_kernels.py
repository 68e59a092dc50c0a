"""The kernel benchmark: every provider computes the sum, moves the bytes it claims, and may be missing."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from bench_setup import CPU

from benchmarks.contestants import accumulate as providers
from benchmarks.contestants import products
from benchmarks.harness.measure import PEAK, Variant
from benchmarks.harness.results import Results
from benchmarks.suites import kernel_cases, kernels
from fusedacc.traffic import TrafficMeter

SHAPES = ((1,), (3,), (7, 5), (1023,), (2, 3, 5, 7))
SCALE = 0.125
PEERS = {"amp_C": "Apex", "transformer_engine": "TransformerEngine", "optimi": "torch-optimi"}
PEERS["bitsandbytes"] = "bitsandbytes"


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


@pytest.mark.parametrize("registry", [providers.ACCUMULATE, products.PRODUCT], ids=["accumulate", "product"])
def test_the_peak_copies_and_adds_as_many_elements(registry, generator):
    for shapes in (SHAPES, ((1000,),)):
        accumulators, _ = lists("bfloat16:float32", generator, shapes)
        for name, passes in (("copy", 2), ("triad", 3)):
            provider = registry[name]
            total = torch.cat([acc.flatten() for acc in accumulators])
            provider.make(accumulators, None, SCALE)()
            written = providers.flat(accumulators, "out" if name == "copy" else "sum")
            if len(shapes) == 1:
                expected = total if name == "copy" else total + SCALE * 0.01
                torch.testing.assert_close(written, expected)
            assert written.numel() == total.numel()
            assert provider.moved(accumulators, None) == passes * total.nbytes


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


def test_hand_counts():
    """Per element: what stock PyTorch's ways move, bfloat16 into float32."""
    accumulators, gradients = [torch.zeros(1)], [torch.zeros(1, dtype=torch.bfloat16)]
    moved = {name: provider.moved(accumulators, gradients) for name, provider in providers.ACCUMULATE.items()}
    assert moved["fusedacc cpu"] == moved["add_"] == moved["torch._foreach_add_"] == 10
    assert moved["autograd grad_dtype"] == moved["cast and add_"] == 18
    assert moved["by hand"] == 26
    assert moved["copy"] == 8
    assert moved["triad"] == moved["add_ same dtype"] == 12


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


def test_missing_peers_are_rows_that_say_so(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in PEERS else find(name, *rest)
    )
    names = ("apex axpby", "TransformerEngine", "torch-optimi", "bitsandbytes")
    notes = {row.provider: row.note for row in measured("1Ki", *names) if row.median is None}
    assert notes == {
        name: f"not run: {package} is not installed"
        for name, package in zip(names, PEERS.values(), strict=True)
    }

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    for name, why in (
        ("torch-optimi", "optimizer's state"),
        ("bitsandbytes", "no accumulation kernel"),
        ("TransformerEngine", "product"),
        ("apex axpby", "CUDA"),
    ):
        assert why in providers.ACCUMULATE[name].unavailable(CPU)


def test_what_is_beyond_memory_is_a_row(monkeypatch):
    monkeypatch.setattr(kernels, "available_memory", lambda device: 1000)
    (row,) = measured("1Ki", "add_")
    assert row.note == f"not run: needs {1024 * (4 + 2 + 8)} bytes; 1000 of memory are available"
    room = iter([10**6])
    monkeypatch.setattr(kernels, "available_memory", lambda device: next(room, 100))
    notes = {row.provider: row.note for row in measured("1Ki", "add_", "by hand")}
    assert notes["by hand"].startswith(f"not run: needs {8 * 1024} bytes beside the tensors; 100 of memory")
    assert not notes["add_"]


def test_a_provider_that_fails_is_a_row(monkeypatch):
    def make(accumulators, gradients, scale):
        raise RuntimeError("no such kernel\nand a long story")

    monkeypatch.setitem(providers.ACCUMULATE, "add_", providers.Provider("add_", "", make))
    rows = {row.provider: row for row in measured("300x4", "add_", "torch._foreach_add_", "fusedacc cpu")}
    assert rows["add_"].note == "not run: RuntimeError: no such kernel"
    assert rows["fusedacc cpu"].median > 0


def test_a_goal_without_its_rival_leaves_the_figure():
    rows = [row for row in measured("300x4 same", "fusedacc cpu") if row.provider == "fusedacc cpu"]
    assert [(row.against, row.goal) for row in rows] == [("", None)]
    rows = measured("300x4 same", "fusedacc cpu", "torch._foreach_add_")
    assert [(row.against, row.goal) for row in rows if row.goal] == [("torch._foreach_add_", 1.0)]


def test_a_row_says_what_was_measured():
    rows = {row.provider: row for row in measured("300x4", "cast and add_", "torch._foreach_add_")}
    row = rows["cast and add_"]
    assert (row.benchmark, row.case, row.mode) == ("kernels", "300 tensors of 4", "accumulate")
    assert row.shapes == "300 tensors of 4; 4 sets in turn, 0.0275 MiB"
    assert row.dtypes == "bfloat16 into float32"
    assert row.bytes == 1200 * 18
    assert row.launches == 600
    assert row.host_us > 0
    assert row.percent_of_peak > 0
    assert rows["copy"].bytes == 1200 * 8


def test_calls_rotate_and_sets_outgrow_the_cache():
    seen = []
    run = kernels.rotated([lambda i=i: seen.append(i) for i in range(3)])
    for _ in range(7):
        run()
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    plenty = 2**40
    work = {size: kernels.Work(size, "bfloat16:float32", CPU, "short") for size in kernel_cases.SIZES}
    assert work["1Ki"].sets(plenty) == 512
    assert work["300x4"].sets(plenty) == 20_000 // 300
    assert work["300x4 same"].sets(plenty) == 1
    assert work["64Mi"].sets(plenty) == 2
    assert work["64Ki"].sets(plenty) * work["64Ki"].set_bytes >= 64 * 2**20
    assert work["1Gi"].held_bytes == 2**30 * (4 + 2 + 8)
    assert work["1Gi"].sets(work["1Gi"].held_bytes) == 1
    assert work["1Gi"].sets(work["1Gi"].held_bytes - 1) == 0


def test_kernels_are_counted_within_each_call():
    def event(cat, name, ts, dur):
        return {"cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", "one call of add_", 100.0, 50.0),
        event("gpu_user_annotation", "one call of add_", 110.0, 20.0),
        event("kernel", "a", 110.0, 2.0),
        event("kernel", "a", 149.0, 3.0),
        event("gpu_memcpy", "Memcpy HtoD", 120.0, 2.0),
        event("kernel", "from before", 99.0, 2.0),
        event("user_annotation", "one call of copy", 200.0, 50.0),
        event("gpu_memcpy", "Memcpy DtoD", 210.0, 2.0),
    ]
    assert kernels.kernels_in(events, ["add_", "copy", "triad"]) == {"add_": 2, "copy": 0}


def test_an_uncountable_launch_is_a_note(monkeypatch):
    def fail(variants):
        raise RuntimeError("CUPTI is not permitted")

    monkeypatch.setattr(kernels, "kernels_of", fail)
    (variant,) = kernels.with_kernels([Variant("add_", list, launches=1, note="first")])
    assert variant.launches is None
    assert variant.note == "first; launches not counted: RuntimeError: CUPTI is not permitted"


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
