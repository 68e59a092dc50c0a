"""Sums into the rows of a table on a CPU, with every backend that can run here, against float64."""

import math

import pytest
import torch
from backends import cpu_backends
from cases import PAIR_IDS, PAIRS, bits, native
from loops import NoHostRead
from row_cases import GRADIENTS, SHAPE_IDS, SHAPES, TABLES, assert_rows, lay_out, random_case, random_indices

from fusedacc.kernels import reference
from fusedacc.kernels.lists import accumulate_rows_, select_for_table

INF, NAN = math.inf, math.nan
#: (padding_idx, scale_grad_by_freq, scale).
SETTINGS = [
    (None, False, 0.3),
    ("last", True, torch.tensor(-1.7)),
    (-1, False, 1.0),
    (0, True, torch.tensor(0.5, dtype=torch.float64)),
]


@pytest.mark.sweep
@pytest.mark.parametrize("case", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("setting", SETTINGS, ids=["plain", "last row", "from the end", "first row"])
def test_every_pair_and_shape(setting, pair, case, cpu_backend, generator):
    padding_idx, by_frequency, scale = setting
    padding_idx = case[1] - 1 if padding_idx == "last" else padding_idx
    table, indices, gradients = random_case(case, pair, generator)
    before, version = table.clone(), table._version
    options = {"padding_idx": padding_idx, "scale_grad_by_freq": by_frequency}
    accumulate_rows_(table, indices, gradients, scale, **options, backend=cpu_backend)
    assert_rows(table, before, indices, gradients, scale, padding_idx, by_frequency)
    assert table._version > version


@pytest.mark.sweep
@pytest.mark.parametrize("table_layout", TABLES)
@pytest.mark.parametrize("gradient_layout", GRADIENTS)
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_every_layout(pair, gradient_layout, table_layout, cpu_backend, generator):
    for case in (((2, 7), 9, 24, "random"), ((70,), 3, 5, "mixed")):
        table, indices, gradients = random_case(case, pair, generator, table_layout, gradient_layout)
        before, base = table.clone(), table._base
        accumulate_rows_(table, indices, gradients, 0.7, backend=cpu_backend)
        assert_rows(table, before, indices, gradients, 0.7)
        if base is not None:
            table.zero_()
            assert not base.any(), "memory outside the rows was written"


def test_pytorch_adds_to_rows_that_are_not_dense(generator):
    table, indices, gradients = random_case(((6,), 5, 4, "random"), PAIRS[0], generator)
    turned = lay_out(table, "transposed")
    accumulate_rows_(turned, indices, gradients, 0.7)
    assert_rows(turned, table, indices, gradients, 0.7)
    chosen = select_for_table(turned, gradients.dtype)
    assert chosen.backend.name == "eager"
    assert "do not lie side by side" in chosen.reason
    for backend in set(cpu_backends()) - {"eager"}:
        with pytest.raises(RuntimeError, match="table has stride 5 in its second dimension"):
            accumulate_rows_(turned, indices, gradients, backend=backend)


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_backends_give_the_same_bits(pair, generator):
    """With scale 1 the multiply-add is an addition, which the interpreter does not round twice."""
    for case, by_frequency in ((((150,), 6, 17, "mixed"), True), (((3, 5), 9, 130, "random"), False)):
        table, indices, gradients = random_case(case, pair, generator)
        options = {"padding_idx": 2, "scale_grad_by_freq": by_frequency}
        results = []
        for backend in cpu_backends():
            results.append(table.clone())
            accumulate_rows_(results[-1], indices, gradients, **options, backend=backend)
        assert all(torch.equal(bits(result), bits(results[0])) for result in results)


@native
@pytest.mark.parametrize("kind", ["random", "one", "mixed"])
def test_any_number_of_threads_gives_the_same_bits(kind, generator, threads):
    indices = random_indices((3000,), 700, kind, generator)
    gradients = torch.randn(3000, 200, generator=generator)
    sums = []
    for count in (1, 2, 3):
        threads(count)
        sums.append(torch.zeros(700, 200))
        accumulate_rows_(sums[-1], indices, gradients, 0.3, backend="cpu")
    assert all(torch.equal(found, sums[0]) for found in sums)
    assert_rows(sums[0], torch.zeros(700, 200), indices, gradients, 0.3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter
def test_inf_and_nan_stay_in_their_rows(cpu_backend):
    table, gradients = torch.ones(5, 3), torch.ones(5, 3)
    indices = torch.tensor([1, 2, 2, 3, 4])
    gradients[0, 0], gradients[1, 1], gradients[2, 1], gradients[3, 2] = NAN, INF, -INF, INF
    gradients[4] = NAN
    accumulate_rows_(table, indices, gradients, 0.5, padding_idx=4, backend=cpu_backend)
    assert torch.equal(table[0], torch.ones(3))
    assert torch.equal(table[4], torch.ones(3))
    assert table.isnan().nonzero().tolist() == [[1, 0], [2, 1]]
    assert table.isinf().nonzero().tolist() == [[3, 2]]


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=native), "eager"])
def test_an_index_out_of_range_is_refused_before_anything_is_written(backend, bad, dtype):
    table, indices = torch.ones(5, 3), torch.tensor([[0, 1], [2, 3], [4, bad]], dtype=dtype)
    told = rf"indices\[5\] is {bad}; allowed: 0 to 4" if backend == "cpu" else "out of range"
    with pytest.raises(RuntimeError if backend == "cpu" else IndexError, match=told):
        accumulate_rows_(table, indices, torch.ones(3, 2, 3), backend=backend)
    assert torch.equal(table, torch.ones(5, 3))
    assert table._version == 0


@pytest.mark.skipif("triton" not in cpu_backends(), reason="the triton backend cannot run here")
@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1])
def test_asynchronous_kernels_skip_an_index_that_is_out_of_range(bad):
    table = torch.zeros(5, 3)
    accumulate_rows_(table, torch.tensor([0, bad, 4]), torch.ones(3, 3), backend="triton")
    assert table.tolist() == [[1.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3, [1.0] * 3]


@native
def test_the_host_reads_nothing(generator):
    """On a CPU the compiled operator checks the indices."""
    table, indices, gradients = random_case(((2, 7), 9, 4, "random"), PAIRS[0], generator)
    before, flat, fresh = table.clone(), indices.reshape(-1), gradients.reshape(-1, 4)
    with NoHostRead():
        accumulate_rows_(table, indices, gradients, torch.tensor(0.5), padding_idx=3)
        reference.accumulate_rows_(before, flat, fresh, torch.tensor(0.5), 3, True)


# The operator


@native
@pytest.mark.parametrize("pair", PAIRS[1::6], ids=PAIR_IDS[1::6])
@pytest.mark.parametrize("numbers", [(None, 0.3, -1, False), (torch.tensor(0.3), 1.0, 2, True)], ids=str)
def test_opcheck(numbers, pair, generator):
    arguments = *random_case(((7,), 5, 4, "random"), pair, generator), *numbers
    torch.library.opcheck(torch.ops.fusedacc.accumulate_rows_.default, arguments)


ROOM = torch.zeros(40)
REFUSED = {
    "vector": ({"table": torch.zeros(5)}, "table has 1 dimensions; it must have 2"),
    "integers": ({"table": torch.zeros(5, 3).int()}, "gradients has float32 and the table another dtype"),
    "overlapping": ({"table": ROOM.as_strided((5, 3), (2, 1))}, "rows of 3 elements that are 2 apart"),
    "with gaps": ({"table": torch.zeros(5, 6)[:, ::2]}, "table has stride 2 in its second dimension"),
    "floating indices": ({"indices": torch.zeros(2)}, "indices must be int64 or int32"),
    "short indices": ({"indices": torch.zeros(2).short()}, "indices must be int64 or int32"),
    "indices in a row": ({"indices": torch.zeros(1, 2).long()}, "indices has 2 dimensions; it must have 1"),
    "no row": ({"indices": torch.tensor([0, 5])}, r"indices\[1\] is 5; allowed: 0 to 4"),
    "shape": ({"gradients": torch.ones(3, 2)}, r"gradients has shape \[3, 2\]; it must be \[2, 3\]"),
    "a dimension more": ({"gradients": torch.ones(1, 2, 3)}, "gradients has 3 dimensions; it must have 2"),
    "gradients with gaps": ({"gradients": torch.ones(2, 6)[:, ::2]}, "gradients has stride 2 in its second"),
    "pair": ({"gradients": torch.ones(2, 3).double()}, "gradients has float64 and the table float32"),
    "in the table": (
        {"table": ROOM[:15].view(5, 3), "gradients": ROOM[14:20].view(2, 3)},
        "gradients overlaps the table in memory",
    ),
    "scale's shape": ({"scale_tensor": torch.ones(1)}, "scale must be a number or a 0-dim tensor"),
    "scale's dtype": ({"scale_tensor": torch.tensor(1)}, "scale is a tensor of a dtype that is not"),
}


@native
@pytest.mark.parametrize("case", REFUSED)
def test_the_operator_checks_its_arguments_before_it_writes(case):
    changed, message = REFUSED[case]
    right = {"table": torch.zeros(5, 3), "indices": torch.tensor([0, 4]), "gradients": torch.ones(2, 3)}
    arguments = {**right, **changed}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fusedacc.accumulate_rows_(**arguments)
    assert not arguments["table"].any()
