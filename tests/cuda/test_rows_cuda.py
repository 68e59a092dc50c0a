"""Sums into the rows of a table on a GPU: against float64, and bit for bit against the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from cases import PAIR_IDS, PAIRS
from row_cases import GRADIENTS, SHAPE_IDS, SHAPES, TABLES, assert_rows, random_case, random_indices

from fusedacc import backends, norms, rows

pytestmark = pytest.mark.cuda


@pytest.fixture(params=["cuda", "triton", "eager"])
def backend(request):
    problem = backends.obstacle(request.param, torch.device("cuda"), torch.float32, torch.float32)
    if problem is not None:
        pytest.skip(f"the {request.param} backend cannot run here: {problem}")
    return request.param


def needs_kernels():
    problem = backends.obstacle("cuda", torch.device("cuda"), torch.float32, torch.float32)
    if problem is not None:
        pytest.skip(f"the cuda backend cannot run here: {problem}")


def bits(tensor):
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.cpu().contiguous().view(kind)


def on_cpu(table, indices, gradients, scale, **options):
    """What the CPU makes of it."""
    result = table.cpu()
    scale = scale.cpu() if isinstance(scale, torch.Tensor) else scale
    rows.accumulate_rows_(result, indices.cpu(), gradients.cpu(), scale, backend="cpu", **options)
    return result


@pytest.mark.parametrize("case", [*SHAPES, ((5000,), 300, 768, "mixed")], ids=[*SHAPE_IDS, "large"])
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_every_pair_and_shape_equals_the_cpu(pair, case, backend, generator):
    scale = torch.tensor(-1.7, device="cuda")
    for padding_idx, by_frequency, factor in ((None, False, 0.3), (case[1] - 1, True, scale)):
        table, indices, gradients = random_case(case, pair, generator, device="cuda")
        before = table.clone()
        options = {"padding_idx": padding_idx, "scale_grad_by_freq": by_frequency}
        rows.accumulate_rows_(table, indices, gradients, factor, **options, backend=backend)
        assert_rows(table, before, indices, gradients, factor, padding_idx, by_frequency)
        if backend != "eager":
            assert torch.equal(bits(table), bits(on_cpu(before, indices, gradients, factor, **options)))


@pytest.mark.parametrize("table_layout", TABLES)
@pytest.mark.parametrize("gradient_layout", GRADIENTS)
def test_every_layout(gradient_layout, table_layout, backend, generator):
    for pair in PAIRS:
        for case in (((2, 7), 9, 24, "random"), ((200,), 3, 5, "mixed"), ((150,), 3, 40, "one")):
            table, indices, gradients = random_case(
                case, pair, generator, table_layout, gradient_layout, "cuda"
            )
            before, base = table.clone(), table._base
            rows.accumulate_rows_(table, indices.int(), gradients, 0.7, backend=backend)
            assert_rows(table, before, indices, gradients, 0.7)
            if base is not None:
                table.zero_()
                assert not base.any()


def test_indices_that_are_no_rows_are_passed_over(generator):
    for backend in ("cuda", "triton"):
        table, gradients = torch.zeros(5, 8, device="cuda"), torch.ones(70, 8, device="cuda")
        indices = torch.full((70,), 5, device="cuda")
        indices[3], indices[4], indices[5] = -1, 2, 4
        rows.accumulate_rows_(table, indices, gradients, backend=backend)
        assert table[:, 0].tolist() == [0, 0, 1, 0, 1]
        assert rows.row_partials(table, indices, backend=backend).count_nonzero() == 2


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_count_each_row_once(dtype, norm_type, backend, generator):
    for case in (((2, 7), 9, 24, "random"), ((200,), 3, 5, "mixed"), ((9,), 20, 20_001, "random")):
        for layout in TABLES:
            table, indices, _ = random_case(case, (dtype, dtype), generator, layout, device="cuda")
            partials = rows.row_partials(table, indices, norm_type, backend=backend)
            norm, found = norms.finish([partials], norm_type, torch.float64, backend)
            wanted = torch.linalg.vector_norm(table[indices.unique()].double(), norm_type)
            assert norm.item() == pytest.approx(wanted.item(), rel=2e-5)
            assert found.item() == 0.0


def test_nothing_waits_and_runs_repeat_to_the_bit(backend, generator):
    indices = random_indices((6000,), 500, "mixed", generator).cuda()
    gradients = torch.randn(6000, 256, device="cuda")
    scale = torch.tensor(0.5, device="cuda")
    results = []
    for _ in range(3):
        table = torch.zeros(500, 256, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            rows.accumulate_rows_(
                table, indices, gradients, scale, padding_idx=3, scale_grad_by_freq=True, backend=backend
            )
            partials = rows.row_partials(table, indices, backend=backend)
            norms.finish([partials], 2.0, torch.float32, backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append(table)
    assert all(torch.equal(table, results[0]) for table in results)


def test_captured_in_a_graph(backend, generator):
    table, indices, gradients = random_case(((300,), 40, 64, "mixed"), PAIRS[0], generator, device="cuda")
    scale = torch.tensor(0.5, device="cuda")

    def step():
        rows.accumulate_rows_(table, indices, gradients, scale, backend=backend)
        return rows.row_partials(table, indices, backend=backend)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        partials = step()
    for factor in (0.25, -2.0):
        scale.fill_(factor)
        indices.copy_(random_indices((300,), 40, "mixed", generator))
        before = table.clone()
        graph.replay()
        torch.cuda.synchronize()
        assert_rows(table, before, indices, gradients, factor)
        norm, _ = norms.finish([partials], 2.0, torch.float64, backend)
        wanted = table[indices.unique()].double().norm().item()
        assert norm.item() == pytest.approx(wanted, rel=2e-5)


def test_opcheck(generator):
    for pair in PAIRS:
        table, indices, gradients = random_case(((7,), 5, 4, "random"), pair, generator, device="cuda")
        arguments = (table, indices, gradients, None, 0.3, 2, True)
        torch.library.opcheck(torch.ops.fusedacc.accumulate_rows_.default, arguments)
        torch.library.opcheck(torch.ops.fusedacc.row_partials.default, (table, indices, 2.0))
        flag = torch.tensor(True, device="cuda")
        torch.library.opcheck(torch.ops.fusedacc.clear_if_.default, (table, flag))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("count", [3, 8195, 3 * 2**22 + 5])
def test_a_flag_on_the_device_clears_a_table(count, shift):
    needs_kernels()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for flag in (True, False, math.nan, 0.0, -0.0, 2.0):
            room = torch.ones(shift + count + 9, dtype=dtype, device="cuda")
            torch.ops.fusedacc.clear_if_(room[shift : shift + count], torch.tensor(flag, device="cuda"))
            wanted = torch.ones_like(room)
            if flag != 0:
                wanted[shift : shift + count] = 0
            assert torch.equal(room, wanted)


def test_a_flag_must_be_on_the_device():
    needs_kernels()
    with pytest.raises(RuntimeError, match="flag is not on cuda:0"):
        torch.ops.fusedacc.clear_if_(torch.ones(4, device="cuda"), torch.tensor(True))


def test_zeros_are_restored_without_waiting(backend):
    named = torch.tensor([3, 0, 3, 5], device="cuda")
    for noise in (0.0, 1e-3, math.nan):
        table = torch.zeros(1000, 40, device="cuda")
        table[named] = 7.0
        table.data.add_(noise)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            rows.restore_zeros_(table, named, backend=backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not table.any()


def test_a_table_of_more_than_2_to_the_31_elements(backend):
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of device memory")
    table = torch.zeros(2**21 + 3, 1024, dtype=torch.bfloat16, device="cuda")
    last = table.shape[0] - 1
    indices = torch.tensor([last, 0, last, 2**21], device="cuda")
    rows.accumulate_rows_(table, indices, torch.ones(4, 1024, device="cuda"), backend=backend)
    assert table[[0, 2**21, last], 1023].tolist() == [1, 1, 2]
    assert table[:, 0].count_nonzero() == 3
