"""Products that are added directly to their sum, with every backend that runs on a CPU."""

import functools
import itertools
import sys

import forked
import pytest
import torch
from cases import PAIR_IDS, native
from gemm_cases import (
    BACKENDS,
    GEMM_PAIRS,
    NAN,
    OPERAND_LAYOUTS,
    SHAPES,
    SUM_LAYOUTS,
    assert_is_product,
    lay_out_sum,
    matrices,
    ways,
)
from loops import NoHostRead
from memory import largest_allocation
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedacc.kernels import cpu_rules, dtypes, library, matmul, matmul_eager
from fusedacc.kernels.constants import GemmMethod
from fusedacc.kernels.matmul import gemm_accumulate_
from fusedacc.traffic import TrafficMeter

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def operator(accumulator, left, right, scale=1.0, beta=1.0, *, way=GemmMethod.WHOLE):
    """Return the operator for a given way, whichever way this processor would choose."""
    numbers = [argument for value in (scale, beta) for argument in matmul.as_argument(value)]
    torch.ops.fusedacc.gemm_accumulate_(accumulator, left, right, *numbers, int(way))


WAYS = ways(gemm_accumulate_, {way.name.lower(): functools.partial(operator, way=way) for way in GemmMethod})


def run(way, tensors, scale=1.0, beta=1.0):
    accumulator, left, right = tensors
    before = accumulator.clone()
    way(accumulator, left, right, scale, beta)
    assert_is_product(accumulator, before, left, right, scale, beta)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_shape_and_number(way, pair, shape, generator):
    scales = (1.0, -0.3, torch.tensor(0.7), torch.tensor(0.7, dtype=F64), torch.tensor(0.5, dtype=BF16))
    betas = (1.0, 0.0, 0.25, torch.tensor(0.25), torch.tensor(0.0))
    for scale, beta in (*zip(scales, betas, strict=True), *zip(scales, reversed(betas), strict=True)):
        run(way, matrices(pair, shape, generator), scale, beta)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("sum_layout", SUM_LAYOUTS)
def test_every_layout(way, pair, sum_layout, generator):
    for left, right in itertools.product(OPERAND_LAYOUTS, OPERAND_LAYOUTS):
        for shape in ((5, 7, 3), (1, 6, 4), (6, 1, 4), (3, 4, 1)):
            run(way, matrices(pair, shape, generator, (sum_layout, left, right)), 0.3, 0.5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("beta", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_with_beta_zero_the_old_sum_is_not_read(way, pair, beta, generator):
    for shape in ((5, 7, 3), (6, 5, 0)):
        accumulator, left, right = matrices(pair, shape, generator)
        accumulator.fill_(NAN)
        way(accumulator, left, right, 0.5, beta)
        zeros = torch.zeros_like(accumulator)
        assert_is_product(accumulator, zeros, left, right, 0.5)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((1700, 1000, 3), "rows"),
        ((1000, 1700, 3), "rows"),
        ((1000, 1700, 3), "columns"),
        ((300, 212, 1600), "rows"),
    ],
    ids=str,
)
@pytest.mark.parametrize("pair", [(BF16, F32), (F16, F32), (F32, BF16), (BF16, BF16)], ids=str)
def test_large_products_are_split(way, pair, shape, layout, generator):
    run(way, matrices(pair, shape, generator, (layout, "rows", "long rows")), 0.3, 0.5)


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", SUM_LAYOUTS)
@pytest.mark.parametrize("pair", [(F32, F32), (F16, F32)], ids=str)
def test_products_are_split_among_threads(way, pair, layout, generator, threads):
    threads(2)
    for tokens in (48, 100):
        run(way, matrices(pair, (650, 30, tokens), generator, (layout, "rows", "rows")), 0.3, 0.5)
        run(way, matrices(pair, (30, 650, tokens), generator, (layout, "rows", "rows")), 0.3, 0.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), NAN])
def test_infinities_and_nan_reach_the_sum(way, dtype, tokens, value):
    accumulator, left, right = torch.zeros(2, 2), torch.ones(tokens, 2), torch.ones(tokens, 2)
    left[-1, 1] = value
    way(accumulator, left.to(dtype), right.to(dtype))
    expected = torch.tensor([[tokens, tokens], [value, value]], dtype=F32)
    torch.testing.assert_close(accumulator, expected, rtol=0, atol=0, equal_nan=True)


@native
def test_float32_products_have_the_bits_of_pytorchs(generator):
    accumulator, left, right = matrices((F32, F32), (70, 90, 5), generator)
    expected = accumulator.addmm(left.t(), right, beta=0.5, alpha=0.3)
    gemm_accumulate_(accumulator, left, right, 0.3, 0.5)
    assert torch.equal(accumulator, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_the_host_does_not_read_tensors(backend, pair, generator):
    scale, beta = torch.tensor(0.3), torch.tensor(0.5)
    for shape in ((5, 7, 3), (6, 5, 0)):
        tensors = matrices(pair, shape, generator)
        expected = tensors[0].clone()
        gemm_accumulate_(expected, *tensors[1:], scale.item(), beta.item(), backend=backend)
        with NoHostRead():
            gemm_accumulate_(*tensors, scale, beta, backend=backend)
        torch.testing.assert_close(tensors[0], expected)


# Allocations and bytes moved


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("layout", ["long rows", "columns"])
def test_no_allocation_is_as_large_as_the_sum(way, pair, layout):
    by_onednn = pair[0] == BF16 and getattr(way, "keywords", {}).get("way") == GemmMethod.ONEDNN
    if by_onednn and not cpu_rules.multiplies_bfloat16():
        pytest.skip("this CPU has no bfloat16 instructions, so `cpu_rules` leaves this method out")
    accumulator = lay_out_sum(torch.zeros(2048, 2048, dtype=pair[1]), layout)
    left, right = torch.ones(4, 2048, dtype=pair[0]), torch.ones(4, 4096, dtype=pair[0])[:, ::2]
    for scale, beta in ((1.0, 1.0), (0.3, 0.0), (torch.tensor(0.3), torch.tensor(0.5))):
        call = functools.partial(way, accumulator, left, right, scale, beta)
        call()  # do not count what is kept after a first call
        largest = largest_allocation(call)
        assert largest <= matmul_eager.PART_ELEMENTS * dtypes.computation_dtype(accumulator.dtype).itemsize
        assert largest < accumulator.nbytes


@native
@pytest.mark.parametrize("pair", GEMM_PAIRS, ids=PAIR_IDS)
def test_bytes(pair, generator):
    accumulator, left, right = matrices(pair, (64, 32, 5), generator)
    for beta, passes in ((1.0, 2), (0.0, 1), (torch.tensor(0.0), 2)):
        scalar = beta.nbytes if isinstance(beta, torch.Tensor) else 0
        with TrafficMeter() as meter:
            gemm_accumulate_(accumulator, left, right, 0.5, beta)
        assert not meter.uncounted
        assert meter.total_bytes == left.nbytes + right.nbytes + passes * accumulator.nbytes + scalar


# Selection


def test_selection_names_the_backend_and_the_reason(monkeypatch):
    cpu = torch.device("cpu")
    assert matmul.select(cpu, F32, F32, "eager", tokens=5).reason == "chosen by backend='eager'"
    asked = matmul.select(cpu, F32, F32, "triton", tokens=5)
    assert asked.name == "eager"
    assert asked.reason == "chosen by backend='triton', which has no kernel for products"
    chosen = matmul.select(cpu, F32, F32, tokens=5)
    assert chosen.reason.startswith("first of cpu, eager that can run here")
    if library.load_error() is None:  # no rule has another method for 5 tokens
        assert (chosen.name, chosen.how) == ("cpu", "BLAS into the sum")
    monkeypatch.setenv("FUSEDACC_BACKEND", "eager")
    assert matmul.select(cpu, F32, F32, tokens=5).reason == "chosen by FUSEDACC_BACKEND='eager'"


@native
@pytest.mark.parametrize(("pair", "tokens"), [((BF16, F32), 1), ((BF16, F32), 16), ((F32, F32), 100)])
def test_own_loops_give_the_same_bits_on_any_number_of_threads(pair, tokens, generator, threads):
    accumulator, left, right = matrices(pair, (301, 700, tokens), generator)
    found = [accumulator.clone(), accumulator.clone()]
    for count, total in enumerate(found, 1):
        threads(count)
        operator(total, left, right, 0.5, 0.25, way=GemmMethod.RANK_K)
    assert torch.equal(*found)
    assert_is_product(found[0], accumulator, left, right, 0.5, 0.25)


@native
@pytest.mark.parametrize("tokens", [16, 1000])
def test_own_loops_allocate_nothing(tokens, generator):
    tensors = matrices((BF16, F32), (300, 700, tokens), generator)
    assert largest_allocation(lambda: operator(*tensors, way=GemmMethod.RANK_K)) == 0


def compare_loops(capability=None):
    """Use odd and even numbers of tokens, numbers that take several blocks, and subnormal values."""
    assert capability in (None, library.built_with()["cpu_capability"])
    generator = torch.Generator().manual_seed(0)
    way = functools.partial(operator, way=GemmMethod.RANK_K)
    for tokens in (1, 2, 31, 128, 129, 256, 257, 515):
        for layouts in (("rows", "rows", "long rows"), ("long rows", "columns", "gaps")):
            run(way, matrices((BF16, F32), (133, 70, tokens), generator, layouts), 0.3, 0.5)
    run(way, matrices((BF16, F32), (70, 300, 33), generator, ("columns", "columns", "columns")), 0.3, 0.0)
    tiny = torch.finfo(F32).smallest_normal
    total, left, right = torch.zeros(9, 20), torch.ones(5, 9), torch.full((5, 20), tiny / 4)
    way(total, left.to(BF16), right.to(BF16))
    # The exact sum is 5 / 4 tiny. AVX512-BF16 treats each factor and each sum below `tiny` as zero.
    assert (total - 5 / 4 * tiny).abs().max() <= 2 * len(left) * tiny


@native
def test_own_loops_with_each_instruction_set():
    compare_loops()
    names = ("baseline", "avx2", "avx512", "avx512_bf16")
    for name in names[: names.index(library.built_with()["cpu_capability"])]:
        program = f"import sys; sys.path[:0] = {sys.path!r}; import test_matmul; "
        program += f"test_matmul.compare_loops({name!r})"
        result = forked.run(program, FUSEDACC_CPU_CAPABILITY=name)
        assert result.returncode == 0, result.stderr


def test_refused_backends():
    tensors = torch.zeros(2, 2), torch.ones(1, 2), torch.ones(1, 2)
    for backend, error, message in (
        ("cuda", RuntimeError, "backend='cuda' cannot add a product of float32 into float32 on cpu"),
        ("fast", ValueError, "backend='fast' is no backend"),
    ):
        with pytest.raises(error, match=message):
            gemm_accumulate_(*tensors, backend=backend)
    assert tensors[0].eq(0).all()


# Errors


def make(*shape, dtype=F32):
    return torch.ones(*shape, dtype=dtype)


OWN = torch.ones(12)


@native
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((make(2), make(1, 2), make(1, 2)), "accumulator has 1 dimensions; it must have 2"),
        ((make(2, 2), make(1, 3), make(1, 2)), r"left has shape \[1, 3\] but accumulator has \[2, 2\]"),
        ((make(2, 2), make(1, 2), make(2, 2)), "right has 2 rows but left has 1"),
        ((make(2, 2), make(1, 2), make(1, 2, dtype=BF16)), "right has bfloat16 but left has float32"),
        ((make(2, 2), *[make(1, 2, dtype=F64)] * 2), "left has float64 and accumulator float32"),
        ((make(2, 4)[:, ::2], make(1, 2), make(1, 2)), r"accumulator has strides \[4, 2\]"),
        ((OWN[:4].view(2, 2), OWN[2:4].view(1, 2), make(1, 2)), "left overlaps accumulator in memory"),
        ((make(2, 2), make(1, 2), make(1, 2), make(1)), "scale must be a number or a 0-dim tensor"),
        ((make(2, 2), make(1, 2), make(1, 2), 1.0, torch.tensor(1)), "beta is a tensor of a dtype"),
    ],
)
def test_the_operator_checks_its_arguments(arguments, says):
    before = arguments[0].clone()
    with pytest.raises(RuntimeError, match=says):
        operator(*arguments)
    assert torch.equal(arguments[0], before)


@native
def test_an_unknown_way_is_refused():
    accumulator = torch.zeros(2, 2)
    for way in (-1, len(GemmMethod)):
        with pytest.raises(RuntimeError, match=f"method is {way}; allowed"):
            operator(accumulator, make(1, 2), make(1, 2), way=way)
    assert accumulator.eq(0).all()


# In graphs


@native
@pytest.mark.parametrize("pair", [(BF16, F32), (F64, F64)], ids=str)
@pytest.mark.parametrize(
    "numbers", [(None, 0.3, None, 0.0), (torch.tensor(0.3), 1.0, torch.tensor(0.5), 1.0)]
)
def test_opcheck(pair, numbers, generator):
    tensors = matrices(pair, (5, 7, 3), generator, ("columns", "rows", "gaps"))
    arguments = *tensors, *numbers, int(GemmMethod.ONEDNN)
    torch.library.opcheck(torch.ops.fusedacc.gemm_accumulate_.default, arguments)


@native
def test_fake_tensors_are_checked():
    with FakeTensorMode():
        operator(make(2, 3), make(4, 2), make(4, 3))
        with pytest.raises(RuntimeError, match=r"left has shape \[4, 3\] but accumulator has \[2, 3\]"):
            operator(make(2, 3), make(4, 3), make(4, 3))
        gemm_accumulate_(make(2, 3), make(4, 2), make(4, 3))
        gemm_accumulate_(make(2, 3), make(4, 2, dtype=BF16), make(4, 3, dtype=BF16), 0.5, 0.0)
