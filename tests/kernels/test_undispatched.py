"""Calls without the dispatcher give the operators' bits, and unusual arguments go to the operators."""

import gc
import random
import sys
import threading
import weakref

import pytest
import torch
from loops import Operators
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusedacc import functional
from fusedacc.kernels import native_module, registry
from fusedacc.kernels.dtypes import PAIRS
from fusedacc.traffic import TrafficMeter

pytestmark = pytest.mark.skipif(native_module.module() is None, reason=f"{native_module.why_not()}")

SHAPES = ((), (1,), (0,), (5,), (3, 7), (64, 64), (2, 1, 3), (1000,), (2, 0, 3), (9000,), (2,) * 7)
INF = float("inf")


def made(dtype: torch.dtype, shapes=SHAPES, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def accumulate(accumulators, gradients, scale=1.0, overwrite=False, beta=1.0, bumps=False):
    return native_module.accumulate(accumulators, gradients, scale, overwrite, beta, None, False, bumps)


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("gradient", "accumulator"), sorted(PAIRS, key=str), ids=str)
@pytest.mark.parametrize("prepared", [False, True])
def test_sums_have_the_bits_of_the_operators(
    gradient: torch.dtype, accumulator: torch.dtype, prepared: bool
) -> None:
    operators = torch.ops.fusedacc
    for seed, (scale, beta) in enumerate([(1.0, 1.0), (1 / 3, 1.0), (-2.0, 0.7), (INF, 1.0), (1.0, 0.0)]):
        for flags in (False, True, [seed % 2 == index % 2 for index in range(len(SHAPES))]):
            ours, fresh = made(accumulator), made(gradient, seed=1)
            ours[5][0, 0], fresh[5][1, 1], fresh[7][3] = INF, -INF, float("nan")
            theirs = [total.clone() for total in ours]
            if prepared:
                done = native_module.prepare(ours, ())(fresh, scale, flags, beta, None)
            else:
                done = accumulate(ours, tuple(fresh), scale, flags, beta)
            assert done is True
            listed = [flags] if isinstance(flags, bool) else flags
            operators.scale_accumulate_(theirs, fresh, None, scale, listed, None, beta)
            same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_norms_have_the_bits_of_the_operators(dtype: torch.dtype, norm_type: float) -> None:
    channels_last = torch.randn(2, 3, 4, 5).to(dtype, memory_format=torch.channels_last)
    tensors = [*made(dtype), made(dtype)[4].t(), channels_last]
    partials = torch.ops.fusedacc.norm_partials(tensors, norm_type)
    same([native_module.norm_partials(tensors, norm_type)], [partials])
    wanted = torch.ops.fusedacc.finish_norm([partials], norm_type, dtype == torch.float64)
    same(list(native_module.total_norm(tensors, norm_type)), list(wanted))
    tensors[3][1] = float("nan")
    norm, found = native_module.total_norm(tensors, norm_type)
    assert norm.isnan()
    assert (found.item(), norm.dtype) == (1.0, wanted[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scale_and_beta_may_be_tensors(dtype: torch.dtype) -> None:
    ours, theirs, fresh = made(torch.float32), made(torch.float32), made(torch.bfloat16, seed=1)
    scale, beta = torch.tensor(1 / 3, dtype=dtype), torch.tensor(0.3, dtype=dtype)
    assert accumulate(ours, fresh, scale, False, beta) is True
    torch.ops.fusedacc.scale_accumulate_(theirs, fresh, scale, 1.0, (), beta, 1.0)
    same(ours, theirs)


def test_lists_in_any_order_of_addresses_and_dense_layouts_of_any_kind() -> None:
    block = torch.zeros(100 * 20)
    views = [block[20 * index : 20 * index + 20].view(4, 5) for index in range(100)]
    random.Random(0).shuffle(views)
    views[3], fresh = views[3].t(), [torch.ones(4, 5) for _ in views]
    fresh[3] = torch.ones(4, 5).t()
    for _ in range(2):
        assert accumulate(views, fresh) is True
    assert block.eq(2).all()
    assert accumulate(views, views, 3.0, True) is True
    assert block.eq(6).all()
    plan = native_module.prepare(views, ())
    assert plan(fresh, 1.0, False, 1.0, None) is True
    assert block.eq(7).all()


class Sub(torch.Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def unusual() -> dict[str, tuple]:
    total, other = torch.zeros(4, 4), torch.zeros(4, 4)
    grads = [torch.ones(4, 4), torch.ones(4, 4)]
    both, line = [total, other], torch.zeros(17)
    return {
        "no list": (iter(both), grads),
        "nothing": ([], []),
        "counts": (both, grads[:1]),
        "no tensor": (both, [grads[0], 1.0]),
        "None": (both, [grads[0], None]),
        "subclass": (both, [grads[0], grads[1].as_subclass(Sub)]),
        "shape": (both, [grads[0], torch.ones(16)]),
        "dtype pair": (both, [grads[0], torch.ones(4, 4, dtype=torch.float64)]),
        "integers": (both, [grads[0], torch.ones(4, 4, dtype=torch.int64)]),
        "meta": (both, [grads[0], torch.ones(4, 4, device="meta")]),
        "sparse": (both, [grads[0], torch.ones(4, 4).to_sparse()]),
        "conjugate": (both, [grads[0], torch.zeros(4, 4, dtype=torch.complex64).conj().imag]),
        "layout": (both, [grads[0], grads[1].t()]),
        "strided": (both, [grads[0], torch.ones(8, 8)[::2, ::2]]),
        "expanded": ([total, torch.zeros(1, 1).expand(4, 4)], grads),
        "twice": ([total, total], grads),
        "overlap": ([total, total.view(16)[:4]], [grads[0], torch.ones(4)]),
        "of another": (both, [grads[0], total]),
        "shifted": ([line[1:]], [line[:-1]]),
        "scale": (both, grads, "1"),
        "large scale": (both, grads, 10**400),
        "scale of two": (both, grads, torch.ones(2)),
        "number of flags": (both, grads, 1.0, [True]),
        "flags": (both, grads, 1.0, [True, 1]),
        "no flag": (both, grads, 1.0, None),
        "beta": (both, grads, 1.0, False, None),
    }


@pytest.mark.parametrize("name", unusual())
def test_unusual_arguments_go_to_the_operators(name: str) -> None:
    arguments = unusual()[name]
    before = [total.clone() for total in arguments[0]] if isinstance(arguments[0], list) else []
    assert accumulate(*arguments, bumps=True) is False
    if before:
        same(arguments[0], before)
        assert all(total._version == 0 for total in arguments[0])


UNPLANNED = "counts", "None", "subclass", "shape", "dtype pair", "layout", "of another"


@pytest.mark.parametrize("name", UNPLANNED)
def test_plans_refuse_unusual_gradients(name: str) -> None:
    sums, fresh = unusual()[name]
    plan = native_module.prepare(sums, sums)
    assert plan(fresh, 1.0, False, 1.0, None, None) is False
    assert all(total.eq(0).all() and total._version == 0 for total in sums)


def test_modes_see_an_operator() -> None:
    lists = [torch.zeros(3)], [torch.ones(3)]
    with Operators() as called:
        functional.scale_accumulate_(*lists)
        functional.total_norm(lists[0])
        plan = functional.prepare(lists[0])
        plan(lists[1])
    for name in ("scale_accumulate_", "norm_partials", "prepare", "accumulate_prepared_"):
        assert f"fusedacc.{name}.default" in called.names
    with Functions():
        assert accumulate(*lists) is False
    assert accumulate(*lists) is True
    with TrafficMeter() as meter:
        functional.scale_accumulate_(*lists)
    assert meter.total_bytes == 36


def test_transforms_and_traces_use_the_operators() -> None:
    lists = [torch.zeros(3)], [torch.ones(3)]
    seen = []
    torch.func.vmap(lambda x: seen.append(accumulate(*lists)) or x)(torch.ones(2))
    torch.func.grad(lambda x: seen.append(accumulate(*lists)) or x)(torch.ones(()))
    torch.jit.trace(lambda x: seen.append(accumulate(*lists)) or x + 1, torch.ones(2), check_trace=False)
    assert seen == [False] * 3


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [torch.zeros(3)], [torch.ones(3)]
    automatic = (1.0, False, 1.0, None, True, False)
    monkeypatch.setenv("FUSEDACC_BACKEND", "eager")
    assert native_module.accumulate(*lists, *automatic) is False
    assert native_module.total_norm(lists[0], 2.0) is False
    assert accumulate(*lists) is True  # the caller has chosen the backend
    monkeypatch.delenv("FUSEDACC_BACKEND")
    assert native_module.accumulate(*lists, *automatic) is True
    monkeypatch.setenv(native_module.VARIABLE, "0")
    assert native_module.accumulate(*lists, *automatic) is False


def test_versions_are_bumped_as_the_operators_bump_them() -> None:
    base = torch.zeros(6)
    sums = [base[:3], base[3:], torch.zeros(2), torch.zeros(0)]
    fresh = [torch.ones_like(total) for total in sums]
    functional.scale_accumulate_(sums, fresh)
    assert (base._version, sums[2]._version, sums[3]._version) == (2, 1, 1)
    functional.prepare(sums)(fresh)
    assert (base._version, sums[2]._version, sums[3]._version) == (3, 2, 2)
    assert accumulate(sums, fresh) is True  # the wrapper bumps by itself
    assert base._version == 3


@pytest.mark.parametrize("elements", [10, 300_000])
def test_calls_keep_no_reference(elements: int) -> None:
    sums, fresh = [torch.zeros(elements)], [torch.ones(elements)]
    plan, run = functional.prepare(sums), registry.get("cpu").prepare(sums)
    counts = [sys.getrefcount(sums[0]), sys.getrefcount(fresh[0]), sys.getrefcount(fresh)]
    for _ in range(3):
        functional.scale_accumulate_(sums, fresh)
        plan(fresh)
        functional.total_norm(fresh)
        run(fresh, 1.0, False)
    assert counts == [sys.getrefcount(sums[0]), sys.getrefcount(fresh[0]), sys.getrefcount(fresh)]
    gone = weakref.ref(fresh[0])
    del fresh
    gc.collect()
    assert gone() is None


def test_other_threads_may_replace_the_lists_tensors() -> None:
    elements, rounds = 400_000, 30
    totals = torch.zeros(elements)
    lists = [[torch.ones(elements)] for _ in range(rounds)]
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            for each in lists:
                each[0] = torch.ones(elements)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for each in lists:
            functional.scale_accumulate_([totals], each)
    finally:
        stop.set()
        thread.join()
    assert totals.eq(rounds).all()
