"""The eager backend's arithmetic: rounded as the contract says, with no more temporaries than promised."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from cases import PAIR_IDS, PAIRS, random_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedacc.kernels import dtypes, reference


class Recorder(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def operators(accumulator, gradient, scale, overwrite):
    with Recorder() as recorder:
        reference.scale_accumulate_([accumulator], [gradient], scale, overwrite)
    return recorder.names


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
def test_no_needless_pass_and_no_needless_temporary(pair):
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


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"), reason="no fused multiply-add here"
)
def test_float32_sums_are_rounded_once(generator):
    """Against exact fractions: the float32 nearest to the exact product plus the accumulator."""
    accumulator = random_tensor((200,), torch.float32, generator)
    gradient = random_tensor((200,), torch.float32, generator)
    scale = torch.tensor(0.3)
    for given in (float(scale), scale):
        result = accumulator.clone()
        reference.scale_accumulate_([result], [gradient], given, False)
        for value, before, fresh in zip(
            result.tolist(), accumulator.tolist(), gradient.tolist(), strict=True
        ):
            true = Fraction(before) + Fraction(scale.item()) * Fraction(fresh)
            neighbours = [torch.nextafter(torch.tensor(value), torch.tensor(to)) for to in (-1e9, 1e9)]
            error = abs(Fraction(value) - true)
            assert all(error <= abs(Fraction(other.item()) - true) for other in neighbours)
