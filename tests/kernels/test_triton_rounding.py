"""Stochastic rounding in the Triton backend gives the eager backend's bits.

Scales are powers of two and gradients are bfloat16, because the interpreter also rounds the product.
"""

import pytest
import rounding_oracle as oracle
import torch
from cases import LAYOUTS, random_tensor
from grouped_cases import offsets_of
from row_cases import TABLES, lay_out, random_indices

from fusedacc.kernels import grouped, reference, registry
from fusedacc.kernels.rounding import Noise, stream_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROBLEM = registry.obstacle("triton", torch.device(DEVICE), torch.bfloat16, torch.float32)
if PROBLEM is not None:
    pytest.skip(f"the triton backend cannot run here: {PROBLEM}", allow_module_level=True)

from fusedacc.kernels.triton import backend, kernels  # noqa: E402  (only where Triton can be imported)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

BF16, F32 = torch.bfloat16, torch.float32
SEED = 0x123456789ABCDEF


def noise_for(count, addition=3):
    return Noise(SEED, [stream_of(100 - index, addition) for index in range(count)])


def like(tensor):
    """Return a copy with the same strides and alignment."""
    shift = tensor.storage_offset()
    room = torch.zeros(shift + tensor.untyped_storage().nbytes() // 2, dtype=tensor.dtype, device=DEVICE)
    return room.as_strided(tensor.shape, tensor.stride(), shift).copy_(tensor)


def number(value, on_device):
    return torch.tensor(value, device=DEVICE) if on_device else value


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
def test_sums(layout, dtype, on_device, generator):
    """Sizes are around those of steps and chunks. Some sums are overwritten."""
    step, chunk = 8 * 32 * kernels.WARPS, kernels.CHUNK
    shapes = [(), (1,), (9,), (step - 1,), (2 * step + 3,), (chunk + 9,), (3, 5, 7), (0, 3)]
    accumulators = [random_tensor(shape, BF16, generator, layout) for shape in shapes]
    gradients = [random_tensor(shape, BF16, generator).to(DEVICE, dtype) for shape in shapes]
    flags = [index % 3 == 1 for index in range(len(shapes))]
    noise = noise_for(len(shapes))
    factors = number(0.5, on_device), flags, number(0.25, on_device)
    expected, results = ([like(each) for each in accumulators] for _ in range(2))
    norms = reference.scale_accumulate_(expected, gradients, *factors, 2.0, noise)
    found = backend.triton.accumulate_(results, gradients, *factors, 2.0, noise)
    assert all(map(torch.equal, results, expected))
    assert torch.linalg.vector_norm(found) == pytest.approx(torch.linalg.vector_norm(norms).item())


@pytest.mark.sweep
@pytest.mark.parametrize("layout", TABLES)
@pytest.mark.parametrize("columns", [24, 33, 1030])
@pytest.mark.parametrize("by_frequency", [False, True], ids=["sum", "mean"])
def test_rows(layout, columns, by_frequency, generator):
    """Rows have one run or several. Blocks of eight elements may or may not start with a row."""
    indices = random_indices((150,), 5, "mixed", generator)
    matrix = random_tensor((5, columns), BF16, generator, device=DEVICE)
    gradients = random_tensor((150, columns), BF16, generator, device=DEVICE)
    results = []
    for rows in (reference.accumulate_rows_, backend.triton.accumulate_rows_):
        table = lay_out(matrix, layout)
        rows(table, indices.to(DEVICE), gradients, 0.5, 3, by_frequency, noise_for(1))
        results.append(table)
    assert torch.equal(*results)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "apart"])
@pytest.mark.parametrize("shape", [(66, 72), (20, 33)], ids=str)
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
def test_products_of_groups(dtype, layout, shape, on_device, generator):
    """Sums of small integers are exact in any order. One expert has no rows."""
    rows, columns = shape
    matrices = random_tensor((3, rows, columns), BF16, generator, device=DEVICE)
    left, right = (
        torch.randint(-8, 9, (50, size), generator=generator).to(DEVICE, dtype) for size in (rows, columns)
    )
    ends = offsets_of((20, 0, 30), DEVICE)
    spans = (0, 20), (20, 20), (20, 50)
    products = torch.stack([left[a:b].float().t() @ right[a:b].float() for a, b in spans])
    for scale, keep in ((1.0, 1.0), (0.0625, 0.5), (0.0625, 0.0)):
        expected = None
        for accumulate_ in (grouped._accumulate_eagerly_, backend.grouped_accumulate_):
            if layout == "transposed":
                sums = matrices.mT.contiguous().mT
            else:
                room = torch.cat([matrices] * 2, dim=2) if layout == "apart" else matrices.clone()
                sums = room[:, :, :columns]
            factors = number(scale, on_device), number(keep, on_device)
            accumulate_(sums, left, right, ends, *factors, noise_for(1))
            expected = sums if expected is None else expected
            assert torch.equal(sums, expected)
        total = (products * scale + matrices.float() * keep)[:, :3, :5]
        found = expected[:, :3, :5]
        assert oracle.patterns(found) == oracle.expected(total, found, SEED, noise_for(1).streams[0])
