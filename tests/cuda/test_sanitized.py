"""Small sums of every kind, checked on the CPU, so that a sanitizer has little but the kernels to look at.

`benchmarks/gpu_run.sh 2` runs these tests under compute-sanitizer.
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
    # What has gaps is added by plain torch, which rounds the product, where Triton is asked.
    assert_matches_oracle(
        on_cpu(accumulators), before, on_cpu(gradients), 0.75, overwrite, fused=backend == "cuda"
    )


def test_overwriting_reads_no_memory_that_nothing_has_written(backend, generator):
    values, gradients = random_lists(PAIRS, SHAPES, generator, device="cuda")
    accumulators = [torch.empty_like(value) for value in values]
    functional.scale_accumulate_(accumulators, gradients, 0.7, overwrite=True, backend=backend)
    assert_matches_oracle(
        on_cpu(accumulators), on_cpu(values), on_cpu(gradients), 0.7, True, fused=backend == "cuda"
    )


@pytest.mark.parametrize(("layout", "gradient_layout"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_that_are_rounded_stochastically(backend, dtype, layout, gradient_layout, generator):
    pairs = [(dtype, torch.bfloat16)]
    sums, gradients = random_lists(
        pairs, SHAPES, generator, layout=layout, gradient_layout=gradient_layout, device="cuda"
    )
    before, flags = copies(sums), [index % 3 == 0 for index in range(len(sums))]
    noise = Noise(5, list(range(len(sums))))
    run = registry.get(backend).prepare(sums)
    assert run(gradients, 0.5, flags, 0.25, 2.0, noise).isfinite().all()
    # Between the neighbours that 16 random bits choose from.
    for index, (ours, old, fresh) in enumerate(
        zip(on_cpu(sums), on_cpu(before), on_cpu(gradients), strict=True)
    ):
        exact = fresh.double() * 0.5 + (0 if flags[index] else old.double() * 0.25)
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
