"""Tables made all zeros by their rows, and as a whole where a sample or a flag says that is not enough."""

from __future__ import annotations

import math

import pytest
import torch
from loops import NoHostRead
from row_cases import TABLES, lay_out

from fusedacc import backends, ops, rows

NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

needs_library = pytest.mark.skipif(ops.load_error() is not None, reason="the native library is not there")


def clear_if_(table, flag):
    torch.ops.fusedacc.clear_if_(table, flag)


# The operator


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1, 1), (3, 5), (2, 3, 4), (1024, 1025)], ids=str)
def test_a_flag_that_is_set_clears_everything_and_no_neighbour(dtype, shape):
    numel = math.prod(shape)
    for shift in (0, 1, 7, 8):
        for flag, is_set in ((True, True), (False, False), (NAN, True), (0.0, False)):
            room = torch.ones(shift + numel + 9, dtype=dtype)
            clear_if_(room[shift : shift + numel].view(shape), torch.tensor(flag))
            wanted = torch.ones_like(room)
            if is_set:
                wanted[shift : shift + numel] = 0
            assert torch.equal(room, wanted)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_sets_a_flag(dtype):
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    for value in (0.0, -0.0, 1.0, -1.0, least, -least, info.max, INF, -INF, NAN):
        table = torch.ones(5)
        clear_if_(table, torch.tensor(value, dtype=dtype))
        assert table.any().item() is (value == 0)


@needs_library
def test_memory_without_gaps_in_any_order():
    table = torch.ones(4, 6).t()
    clear_if_(table, torch.tensor(True))
    assert not table.any()
    clear_if_(torch.ones(0, 3), torch.tensor(True))


ROOM = torch.ones(12)
REFUSED = {
    "gaps": (torch.ones(4, 6)[:, :5], torch.tensor(True), "table has gaps or overlaps itself"),
    "overlapping": (ROOM.as_strided((3, 4), (2, 1)), torch.tensor(True), "table has gaps or overlaps itself"),
    "integers": (torch.ones(4).int(), torch.tensor(True), "table has another dtype; allowed: float32"),
    "a number of flags": (torch.ones(4), torch.tensor([True]), "flag has 1 dimensions; it must have none"),
    "an integer": (torch.ones(4), torch.tensor(1), "flag has another dtype; allowed: .* and bool"),
    "a flag inside": (ROOM, ROOM[5], "flag overlaps the table"),
    "another device": (torch.ones(4), torch.tensor(True, device="meta"), "is on meta|on another device"),
}


@needs_library
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named_and_nothing_is_written(case):
    table, flag, message = REFUSED[case]
    with pytest.raises(RuntimeError, match=message):
        clear_if_(table, flag)
    assert table.all()


@needs_library
def test_opcheck():
    for dtype in DTYPES:
        for flag in (torch.tensor(True), torch.tensor(0.0)):
            arguments = (torch.ones(4, 3, dtype=dtype), flag)
            torch.library.opcheck(torch.ops.fusedacc.clear_if_.default, arguments)


# The function


def table_of(count, columns, named, dtype=torch.float32):
    """Zeros but for the rows that are named."""
    table = torch.zeros(count, columns, dtype=dtype)
    table[named] = 7.0
    return table


NAMED = torch.tensor([[3, 0], [3, 5]])
SPOILERS = {
    "nothing": lambda table: None,
    "a constant": lambda table: table.add_(1e-3),
    "noise": lambda table: table.add_(torch.randn(table.shape)),
    "nan": lambda table: table.mul_(NAN),
    "inf": lambda table: table.mul_(INF),
    "one row that is looked at": lambda table: table[-1].fill_(NAN),
    "one column that is looked at": lambda table: table[:, 0].sub_(1.0),
}


@pytest.mark.parametrize("spoil", SPOILERS)
@pytest.mark.parametrize("count", [7, 63, 64, 65, 127, 128, 129, 1000])
def test_zeros_whatever_was_done_to_the_whole(spoil, count, cpu_backend):
    for columns in (1, 16, 17, 40):
        table = table_of(count, columns, NAMED)
        SPOILERS[spoil](table.data)
        version = table._version
        rows.restore_zeros_(table, NAMED.int(), backend=cpu_backend)
        assert not table.any()
        assert table._version > version


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [*TABLES, "transposed"])
def test_tables_of_any_dtype_and_layout(dtype, layout, cpu_backend):
    matrix = lay_out(table_of(20, 24, NAMED, dtype), layout)
    room = matrix if matrix._base is None else matrix._base
    around = room.count_nonzero() - matrix.count_nonzero()
    backend = "auto" if layout == "transposed" else cpu_backend
    matrix.data.add_(1.0)
    rows.restore_zeros_(matrix, NAMED, backend=backend)
    assert not matrix.any()
    assert room.count_nonzero() == around


@needs_library
def test_only_the_rows_that_are_named_are_written_where_the_others_are_zero():
    """An element outside of the sample shows it: nobody looks there, and nobody writes there."""
    table = table_of(1000, 40, NAMED)
    table[6, 30] = table[-1, 16] = 1.0
    table[2, 0] = NAN
    rows.restore_zeros_(table, NAMED, backend="cpu")
    assert table.count_nonzero() == 3


def test_as_many_rows_named_as_there_are_clear_the_whole(cpu_backend):
    table = torch.ones(4, 20)
    rows.restore_zeros_(table, torch.tensor([1, 1, 1, 1]), backend=cpu_backend)
    assert not table.any()


def test_no_rows_and_empty_tables(cpu_backend):
    none = torch.zeros(0, dtype=torch.int64)
    table = torch.zeros(30, 4)
    rows.restore_zeros_(table, none, backend=cpu_backend)
    table.data.fill_(NAN)
    rows.restore_zeros_(table, none, backend=cpu_backend)
    assert not table.any()
    for shape in ((0, 4), (30, 0)):
        rows.restore_zeros_(torch.zeros(shape), none, backend=cpu_backend)


def test_what_is_wrong_is_named():
    table = torch.zeros(30, 4)
    with pytest.raises(ValueError, match="fast"):
        rows.restore_zeros_(table, NAMED, backend="fast")
    if ops.load_error() is None:
        with pytest.raises(IndexError):
            rows.restore_zeros_(table, torch.tensor([30]), backend="cpu")


def test_a_table_that_autograd_knows(cpu_backend):
    weight = torch.nn.Parameter(torch.ones(30, 4))
    rows.restore_zeros_(weight, NAMED, backend=cpu_backend)
    assert not weight.any()
    assert weight.is_leaf


def test_nothing_is_read_by_the_host(cpu_backend):
    table = table_of(100, 20, NAMED)
    with NoHostRead():
        rows.restore_zeros_(table, NAMED, backend=cpu_backend)
    assert not table.any()


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_in_a_full_graph(backend):
    if backends.obstacle(backend, torch.device("cpu"), torch.float32, torch.float32) is not None:
        pytest.skip(f"the {backend} backend cannot run here")
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(table, indices):
        rows.restore_zeros_(table, indices, backend=backend)
        return table + 1

    for noise in (0.0, NAN):
        table = table_of(100, 20, NAMED)
        table.data.add_(noise)
        assert torch.equal(step(table, NAMED), torch.ones(100, 20))
        assert not table.any()
    torch.compiler.reset()
