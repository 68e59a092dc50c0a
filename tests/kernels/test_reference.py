"""The eager backend calls no more operators than necessary."""

import pytest
import torch
from cases import PAIR_IDS, PAIRS
from loops import Operators

from fusedacc.kernels import dtypes, reference


def operators(accumulator, gradient, scale, overwrite):
    with Operators() as called:
        reference.scale_accumulate_([accumulator], [gradient], scale, overwrite)
    return [name.split(".")[1] for name in called.names]


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_no_unnecessary_pass_or_temporary(pair):
    gradient, accumulator = torch.ones(4, dtype=pair[0]), torch.ones(4, dtype=pair[1])
    assert operators(accumulator, gradient, 1.0, False) == ["add_"]
    assert operators(accumulator, gradient, 1.0, True) == ["copy_"]
    if dtypes.computation_dtype(pair[1]) == pair[1]:
        assert operators(accumulator, gradient, 0.5, False) == ["add_"]
        assert operators(accumulator, gradient, 0.5, True) == ["copy_", "mul_"]
    else:
        assert operators(accumulator, gradient, 0.5, False) == ["_to_copy", "add_", "copy_"]
        widened = ["mul"] if pair[0] == torch.float32 else ["_to_copy", "mul_"]
        assert operators(accumulator, gradient, 0.5, True) == [*widened, "copy_"]
