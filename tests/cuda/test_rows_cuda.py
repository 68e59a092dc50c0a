"""Sums into the rows of a table on a GPU: compared with float64, and bit for bit with the CPU."""

import pytest
import torch
from cases import PAIR_IDS, PAIRS, assert_same_bits
from gpu import captured, needs_memory, nothing_waits
from row_cases import GRADIENTS, SHAPE_IDS, SHAPES, TABLES, assert_rows, random_case, random_indices

from fusedacc.kernels import registry, selftest
from fusedacc.kernels.lists import accumulate_rows_, select_for_rows

pytestmark = pytest.mark.cuda


def on_cpu(table, indices, gradients, scale, **options):
    """Return the result of the CPU."""
    result = table.cpu()
    scale = scale.cpu() if isinstance(scale, torch.Tensor) else scale
    accumulate_rows_(result, indices.cpu(), gradients.cpu(), scale, backend="cpu", **options)
    return result


@pytest.mark.sweep
@pytest.mark.parametrize("case", [*SHAPES, ((5000,), 300, 768, "mixed")], ids=[*SHAPE_IDS, "large"])
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_every_pair_and_shape_equals_the_cpu(pair, case, backend, generator):
    scale = torch.tensor(-1.7, device="cuda")
    for padding_idx, by_frequency, factor in ((None, False, 0.3), (case[1] - 1, True, scale)):
        table, indices, gradients = random_case(case, pair, generator, device="cuda")
        before = table.clone()
        options = {"padding_idx": padding_idx, "scale_grad_by_freq": by_frequency}
        accumulate_rows_(table, indices, gradients, factor, **options, backend=backend)
        assert_rows(table, before, indices, gradients, factor, padding_idx, by_frequency)
        if backend != "eager":  # with "cuda" Triton adds
            assert_same_bits([table], [on_cpu(before, indices, gradients, factor, **options)])


@pytest.mark.sweep
@pytest.mark.parametrize("table_layout", TABLES)
@pytest.mark.parametrize("gradient_layout", GRADIENTS)
def test_every_layout(gradient_layout, table_layout, backend, generator):
    for pair in PAIRS:
        for case in (((2, 7), 9, 24, "random"), ((200,), 3, 5, "mixed"), ((150,), 3, 40, "one")):
            table, indices, gradients = random_case(
                case, pair, generator, table_layout, gradient_layout, "cuda"
            )
            before, base = table.clone(), table._base
            accumulate_rows_(table, indices.int(), gradients, 0.7, backend=backend)
            assert_rows(table, before, indices, gradients, 0.7)
            if base is not None:
                table.zero_()
                assert not base.any()


def test_indices_out_of_range_are_skipped(generator):
    for backend in ("cuda", "triton"):
        table, gradients = torch.zeros(5, 8, device="cuda"), torch.ones(70, 8, device="cuda")
        indices = torch.full((70,), 5, device="cuda")
        indices[3], indices[4], indices[5] = -1, 2, 4
        accumulate_rows_(table, indices, gradients, backend=backend)
        assert table[:, 0].tolist() == [0, 0, 1, 0, 1]


def test_nothing_waits_and_every_run_gives_the_same_bits(backend, generator):
    indices = random_indices((6000,), 500, "mixed", generator).cuda()
    gradients = torch.randn(6000, 256, device="cuda")
    options = {"padding_idx": 3, "scale_grad_by_freq": True, "backend": backend}
    scale = torch.tensor(0.5, device="cuda")
    tables = [torch.zeros(500, 256, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    for table in tables:
        with nothing_waits():
            accumulate_rows_(table, indices, gradients, scale, **options)
    assert all(torch.equal(table, tables[0]) for table in tables)


def test_captured_in_a_graph(backend, generator):
    table, indices, gradients = random_case(((300,), 40, 64, "mixed"), PAIRS[0], generator, device="cuda")
    scale = torch.tensor(0.5, device="cuda")

    def step():
        accumulate_rows_(table, indices, gradients, scale, backend=backend)

    graph, _ = captured(step)
    for factor in (0.25, -2.0):
        scale.fill_(factor)
        indices.copy_(random_indices((300,), 40, "mixed", generator))
        before = table.clone()
        graph.replay()
        torch.cuda.synchronize()
        assert_rows(table, before, indices, gradients, factor)


@pytest.mark.parametrize("asked", ["auto", "cuda", "triton"])
def test_triton_adds_rows_also_for_cuda_and_plain_torch_without_it(asked, monkeypatch):
    device, dtype = torch.device("cuda"), torch.float32
    chosen = select_for_rows(device, dtype, dtype, asked)
    assert chosen.backend.name == "triton"
    assert ("which has no kernel for rows of a table" in chosen.reason) == (asked == "cuda")
    if asked == "cuda":
        with selftest.suspended():
            monkeypatch.setattr(registry.get("triton"), "obstacle", lambda *_: "not here")
            chosen = select_for_rows(device, dtype, dtype, asked)
        assert chosen.backend.name == "eager"
        assert chosen.reason.endswith("; not triton: not here")


def test_the_operator_takes_tensors_on_a_cpu_only(generator):
    table, indices, gradients = random_case(((7,), 5, 4, "random"), PAIRS[0], generator, device="cuda")
    with pytest.raises(RuntimeError, match="table is on cuda:0; it must be on cpu"):
        torch.ops.fusedacc.accumulate_rows_(table, indices, gradients)


def test_a_table_of_more_than_2_to_the_31_elements(backend):
    needs_memory(10 * 2**30)
    table = torch.zeros(2**21 + 3, 1024, dtype=torch.bfloat16, device="cuda")
    last = table.shape[0] - 1
    indices = torch.tensor([last, 0, last, 2**21], device="cuda")
    accumulate_rows_(table, indices, torch.ones(4, 1024, device="cuda"), backend=backend)
    assert table[[0, 2**21, last], 1023].tolist() == [1, 1, 2]
    assert table[:, 0].count_nonzero() == 3
