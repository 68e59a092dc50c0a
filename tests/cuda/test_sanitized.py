"""Small sums of every kind for compute-sanitizer, checked on the CPU.

`benchmarks/gpu_run.sh` runs these tests under compute-sanitizer.
"""

import gpu
import pytest
import torch
from cases import PAIRS, assert_matches_oracle, copies, random_lists
from row_cases import assert_rows, random_case

from fusedacc import functional
from fusedacc.kernels import registry
from fusedacc.kernels.lists import accumulate_rows_
from fusedacc.kernels.rounding import Noise

pytestmark = pytest.mark.cuda

SHAPES = [(), (0, 3), (5,), (129, 65), (2, 3, 4, 5), (8195,)]
LAYOUTS = [
    ("contiguous", "contiguous"),
    ("misaligned", "contiguous"),
    ("transposed", "channels_last"),
    ("gaps", "expanded"),
]


@pytest.fixture(params=["cuda", "triton"])
def backend(request):
    return gpu.needs(request.param)


def on_cpu(tensors):
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize(("layout", "gradient_layout"), LAYOUTS)
@pytest.mark.parametrize("prepared", [False, True], ids=["fresh", "plan"])
def test_sums(backend, layout, gradient_layout, prepared, generator):
    accumulators, gradients = random_lists(
        PAIRS, SHAPES, generator, layout=layout, gradient_layout=gradient_layout, device="cuda"
    )
    before = copies(on_cpu(accumulators))
    scale = torch.tensor(0.75, device="cuda") if prepared else 0.75
    overwrite = [index % 3 == 0 for index in range(len(accumulators))]
    if prepared:
        functional.prepare(accumulators, backend=backend)(gradients, scale, overwrite=overwrite)
    else:
        functional.scale_accumulate_(accumulators, gradients, scale, overwrite=overwrite, backend=backend)
    # With backend="triton", PyTorch adds tensors with gaps, and rounds the product.
    fused = backend == "cuda"
    assert_matches_oracle(on_cpu(accumulators), before, on_cpu(gradients), 0.75, overwrite, fused=fused)


def test_overwriting_reads_no_uninitialized_memory(backend, generator):
    values, gradients = random_lists(PAIRS, SHAPES, generator, device="cuda")
    sums, fused = [torch.empty_like(value) for value in values], backend == "cuda"
    functional.scale_accumulate_(sums, gradients, 0.7, overwrite=True, backend=backend)
    assert_matches_oracle(on_cpu(sums), on_cpu(values), on_cpu(gradients), 0.7, True, fused=fused)


@pytest.mark.parametrize(("layout", "gradient_layout"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_that_are_rounded_stochastically(backend, dtype, layout, gradient_layout, generator):
    layouts = {"layout": layout, "gradient_layout": gradient_layout}
    sums, gradients = random_lists([(dtype, torch.bfloat16)], SHAPES, generator, **layouts, device="cuda")
    before, flags = copies(sums), [index % 3 == 0 for index in range(len(sums))]
    noise = Noise(5, list(range(len(sums))))
    run = registry.get(backend).prepare(sums)
    run(gradients, 0.5, flags, 0.25, noise)
    # Each result is one of the two neighbours of the exact value.
    lists = map(on_cpu, (sums, before, gradients))
    for ours, old, fresh, flag in zip(*lists, flags, strict=True):
        exact = fresh.double() * 0.5 + (0 if flag else old.double() * 0.25)
        assert ((ours.double() - exact).abs() <= exact.abs() * 2.0**-7 + 1e-30).all()


@pytest.mark.parametrize("table_layout", ["contiguous", "misaligned", "aligned apart"])
@pytest.mark.parametrize("case", [((3, 5), 7, 33, "random"), ((200,), 3, 40, "mixed"), ((65,), 2, 8, "one")])
def test_rows(backend, case, table_layout, generator):
    for pair in PAIRS:
        table, indices, gradients = random_case(case, pair, generator, table_layout, device="cuda")
        before = table.clone()
        options = {"padding_idx": 1, "scale_grad_by_freq": True}
        accumulate_rows_(table, indices, gradients, 0.7, **options, backend=backend)
        assert_rows(table, before, indices, gradients, 0.7, 1, True)
        outside = indices.clone().fill_(7)
        accumulate_rows_(table, outside, gradients, backend=backend)
