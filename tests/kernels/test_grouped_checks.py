"""Invalid calls of grouped products, and the operator's registration with torch.compile."""

import re

import pytest
import torch
from cases import native
from gemm_cases import BACKENDS
from grouped_cases import METHODS, groups, operator
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedacc.kernels.grouped import grouped_accumulate_

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def make(*shape):
    return torch.ones(*shape)


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


OWN = torch.ones(12)
#: One expert's sum of 2 x 2, two experts', operands of one row and of three, and where the one expert ends.
ONE, TWO, ROW, ROWS, END = make(1, 2, 2), make(2, 2, 2), make(1, 2), make(3, 2), ends(1)
#: Invalid calls with the same message from both backends: accumulator, left, right and offsets.
REFUSED = [
    ((make(2, 2), ROW, ROW, END), "accumulator has 2 dimensions; it must have 3"),
    ((ONE, make(2), ROW, END), "left has 1 dimensions; it must have 2"),
    ((ONE, ROW, ROW, END.view(1, 1)), "offsets has 2 dimensions; it must have 1"),
    ((ONE, make(1, 3), ROW, END), r"left has shape \[1, 3\] but accumulator has \[1, 2, 2\]"),
    ((ONE, ROW, make(1, 3), END), r"right has shape \[1, 3\] but accumulator has \[1, 2, 2\]"),
    ((ONE, ROW, make(2, 2), END), "right has 2 rows but left has 1"),
    ((ONE, ROW, ROW.to(BF16), END), "right has bfloat16 but left has float32"),
    ((ONE, ROW.double(), ROW.double(), END), r"float64 (and accumulator|into) float32.*llowed"),
    ((OWN[:4].view(1, 2, 2), OWN[2:4].view(1, 2), ROW, END), "left overlaps accumulator in memory"),
    ((OWN[:4].view(1, 2, 2), ROW, OWN[2:4].view(1, 2), END), "right overlaps accumulator in memory"),
    ((ONE.expand(2, 2, 2), ROW, ROW, ends(1, 1)), "accumulator overlaps itself"),
    ((OWN.as_strided((2, 2, 2), (3, 2, 1)), ROW, ROW, ends(1, 1)), "accumulator overlaps itself"),
    ((ONE, ROW, ROW, END.long()), "offsets has int64; it must be int32"),
    ((ONE, ROW, ROW, END.float()), "offsets has float32; it must be int32"),
    ((TWO, ROW, ROW, END), "offsets has 1 elements; it must have 2"),
    ((TWO, ROW, ROW, ends(0, 2)), r"offsets\[1\] is 2; allowed: 0 to 1"),
    ((TWO, ROWS, ROWS, ends(2, 1)), r"offsets\[1\] is 1; allowed: 2 to 3"),
    ((TWO, ROWS, ROWS, ends(-1, 1)), r"offsets\[0\] is -1; allowed: 0 to 3"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arguments", "says"), REFUSED, ids=[re.sub(r"\W+", " ", says) for _, says in REFUSED]
)
def test_bad_arguments_are_refused_before_anything_is_written(backend, arguments, says):
    before = arguments[0].clone()
    with pytest.raises(RuntimeError, match=says):
        grouped_accumulate_(*arguments, 0.5, 0.5, backend=backend)
    assert torch.equal(arguments[0], before)


@native
@pytest.mark.parametrize(
    ("numbers", "method", "says"),
    [
        ((make(1), 1.0), {}, "scale must be a number or a 0-dim tensor"),
        ((1.0, torch.tensor(1)), {}, "beta is a tensor of a dtype"),
        ((1.0, 1.0), {"rank_k_tokens": -1}, "rank_k_tokens is -1; allowed: 0 to 100"),
        ((1.0, 1.0), {"rank_k_tokens": 101}, "rank_k_tokens is 101; allowed: 0 to 100"),
        ((1.0, 1.0), {"method": 4}, "method is 4; allowed: those of"),
    ],
)
def test_the_operator_checks_its_arguments(numbers, method, says):
    accumulator = torch.zeros(1, 2, 2)
    with pytest.raises(RuntimeError, match=says):
        operator(accumulator, ROW, ROW, END, *numbers, **method)
    with pytest.raises(RuntimeError, match=r"accumulator has strides \[8, 4, 2\]"):
        operator(make(1, 2, 4)[:, :, ::2], ROW, ROW, END)
    assert accumulator.eq(0).all()


# In graphs


@native
@pytest.mark.parametrize("pair", [(BF16, F32), (F64, F64)], ids=str)
@pytest.mark.parametrize(
    "numbers", [(None, 0.3, None, 0.0), (torch.tensor(0.3), 1.0, torch.tensor(0.5), 1.0)]
)
def test_opcheck(pair, numbers, generator):
    tensors = groups(pair, (5, 7), (3, 0, 9), generator, ("columns", "rows", "gaps"))
    for part in tensors[1:3]:
        part.nan_to_num_()  # the comparison includes memory that is not read
    arguments = *tensors, *numbers, *METHODS["mkl"].values()
    torch.library.opcheck(torch.ops.fusedacc.grouped_accumulate_.default, arguments)


@native
def test_fake_tensors_are_checked():
    with FakeTensorMode():
        grouped_accumulate_(make(2, 2, 3), make(4, 2), make(4, 3), ends(1, 4))
        with pytest.raises(RuntimeError, match="but accumulator has"):
            operator(make(2, 2, 3), make(4, 3), make(4, 3), ends(1, 4))
        with pytest.raises(RuntimeError, match="offsets has 1 elements; it must have 2"):
            operator(make(2, 2, 3), make(4, 2), make(4, 3), ends(1))
