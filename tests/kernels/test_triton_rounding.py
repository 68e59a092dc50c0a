"""Stochastic rounding in the Triton backend gives the eager backend's bits.

Scales are powers of two and gradients are bfloat16, because the interpreter also rounds the product.
"""

import pytest
import torch
from cases import LAYOUTS, random_tensor

from fusedacc.kernels import reference, registry
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
    reference.scale_accumulate_(expected, gradients, *factors, noise)
    backend.triton.accumulate_(results, gradients, *factors, noise)
    assert all(map(torch.equal, results, expected))
