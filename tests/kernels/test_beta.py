"""A pass that multiplies the sum before it adds (`beta`) has the same bits as two passes."""

import pytest
import torch
from cases import PAIR_IDS, PAIRS, assert_same_bits, copies, native, random_lists

from fusedacc.kernels import dtypes, registry

SHAPES = [(5,), (3, 4, 2), (0, 3), (), (1025,), (90, 67)]


@pytest.mark.sweep
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("beta", [1 / 3, 1.0, torch.tensor(1 / 3), torch.tensor(0.3, dtype=torch.bfloat16)])
@pytest.mark.parametrize("scale", [0.7, 1.0, torch.tensor(0.7)])
def test_one_pass_has_the_bits_of_two(cpu_backend, prepared, beta, scale, generator):
    """Test sums in the dtype of the computation."""
    backend = registry.get(cpu_backend)
    pairs = [pair for pair in PAIRS if dtypes.computation_dtype(pair[1]) == pair[1]]
    sums, gradients = random_lists(pairs, SHAPES, generator)
    expected = copies(sums)
    backend.accumulate_(expected, expected, beta, True)
    backend.accumulate_(expected, gradients, scale, False)
    if prepared:
        backend.prepare(sums)(gradients, scale, False, beta)
    else:
        backend.accumulate_(sums, gradients, scale, False, beta)
    assert_same_bits(sums, expected)


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_the_kept_sum_is_rounded_to_the_computation_dtype_and_the_result_once(cpu_backend, pair, generator):
    (total,), (gradient,) = random_lists([pair], [(700,)], generator)
    wide = dtypes.computation_dtype(pair[1])
    product = total.to(wide) * 0.3
    # In float64 the product of two float32 numbers is exact. For float64 the eager backend makes the product.
    if wide == torch.float64:
        exact = product.add(gradient, alpha=0.7)
    else:
        exact = product.double() + gradient.double() * torch.tensor(0.7).double()
    registry.get(cpu_backend).accumulate_([total], [gradient], 0.7, False, 0.3)
    # Triton's interpreter also rounds the product with the gradient.
    terms = product.double().abs() + gradient.double().abs() + exact.double().abs()
    steps = 1.0 if cpu_backend == "triton" else 0.5
    allowed = exact.double().abs() * torch.finfo(pair[1]).eps / 2 + terms * torch.finfo(wide).eps * steps
    subnormal = torch.finfo(pair[1]).smallest_normal * torch.finfo(pair[1]).eps
    assert ((total.double() - exact.double()).abs() <= allowed + subnormal).all()


@pytest.mark.parametrize("beta", [2.0, torch.tensor(2.0)])
def test_overwritten_sums_are_not_read(cpu_backend, beta):
    sums = [torch.full((5,), torch.nan), torch.ones(5)]
    registry.get(cpu_backend).accumulate_(sums, [torch.ones(5)] * 2, 3.0, [True, False], beta)
    assert [total.tolist() for total in sums] == [[3.0] * 5, [5.0] * 5]


def test_a_beta_of_one_changes_no_bit(cpu_backend, generator):
    sums, gradients = random_lists(PAIRS, SHAPES, generator)
    special = torch.tensor([0.0, -0.0, 1e-45, -3e-39, torch.inf, -torch.inf, 3.4e38])
    sums.append(special)
    gradients.append(-0.0 * torch.ones(7))
    expected = copies(sums)
    backend = registry.get(cpu_backend)
    backend.accumulate_(expected, gradients, 0.3, False)
    backend.accumulate_(sums, gradients, 0.3, False, torch.tensor(1.0))
    assert_same_bits(sums, expected)


@native
@pytest.mark.parametrize(
    ("beta", "problem"),
    [
        (torch.ones(2), "beta must be a number or a 0-dim tensor"),
        (torch.tensor(1), "beta is a tensor of a dtype that is not float32"),
        (torch.tensor(1.0, device="meta"), "meta"),
    ],
)
def test_an_error_names_beta_and_nothing_is_modified(beta, problem):
    total = torch.ones(3)
    with pytest.raises(RuntimeError, match=problem):
        torch.ops.fusedacc.scale_accumulate_([total], [torch.ones(3)], None, 1.0, (), beta, 1.0)
    assert total.tolist() == [1.0] * 3
