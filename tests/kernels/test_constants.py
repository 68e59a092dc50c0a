"""What Python and csrc both know is the same: read out of the headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fusedacc.kernels import constants, grain_size, library
from fusedacc.kernels.constants import DTYPE_NUMBERS, Multiplier, Way
from fusedacc.kernels.dtypes import PAIRS

SOURCES = Path(__file__).resolve().parents[2] / "csrc"


def found(file: str, pattern: str) -> str:
    """What the pattern's group is in a file of csrc."""
    match = re.search(pattern, (SOURCES / file).read_text())
    assert match is not None, f"{file} has nothing like {pattern}"
    return match[1]


def enumerators(file: str, name: str) -> list[str]:
    return found(file, rf"enum class {name} : \w+ \{{ ([\w, ]+) \}};").split(", ")


@pytest.mark.parametrize(
    ("file", "name", "own"),
    [
        ("common/work.h", "kMaxDims", constants.MAX_DIMS),
        ("common/work.h", "kChunkElements", constants.CHUNK_ELEMENTS),
        ("common/row_work.h", "kRowRun", constants.ROW_RUN),
        ("cpu/gemm.cpp", "kSplitRows", constants.SPLIT_ROWS),
    ],
)
def test_numbers(file, name, own):
    assert int(found(file, rf"constexpr \w+ {name} = (\d+);")) == own


def test_classes_of_tokens():
    listed = found("cpu/gemm.h", r"kTokenClasses\[\] = \{([\d, ]+)\};")
    assert tuple(map(int, listed.split(", "))) == constants.TOKEN_CLASSES


@pytest.mark.parametrize(("file", "own"), [("cpu/gemm.h", Way), ("autograd/immediate_add.h", Multiplier)])
def test_enumerations(file, own):
    assert enumerators(file, own.__name__) == [f"k{each.name.title()}" for each in sorted(own)]


def test_dtypes_and_their_pairs():
    names = ["kFloat32", "kBFloat16", "kFloat16", "kFloat64"]
    assert enumerators("common/dtypes.h", "Dtype") == [*names, "kOther"]
    dtypes = dict(zip(names, DTYPE_NUMBERS, strict=True))
    assert [str(dtype)[6:] for dtype in DTYPE_NUMBERS] == [name[1:].lower() for name in names]
    listed = re.findall(
        r"\{Dtype::(\w+), Dtype::(\w+)\}", found("common/dtypes.h", r"kPairs\[\] = \{([^;]+)\};")
    )
    assert sorted(listed) == sorted(set(listed))
    assert {(dtypes[gradient], dtypes[accumulator]) for gradient, accumulator in listed} == PAIRS


def test_the_grain_that_holds_until_a_trial():
    assert int(found("cpu/lists.cpp", r"least_share\{(\d+)\}")) == grain_size.GRAIN_SIZES[-1]


@pytest.mark.skipif(library.load_error() is not None, reason=str(library.load_error()))
def test_the_words_of_a_plan():
    accumulators = [torch.zeros((3, 4, 5)[: index % 4], dtype=DTYPE_NUMBERS[index % 4]) for index in range(9)]
    accumulators += [torch.zeros(0, 7), torch.zeros(4, 6).t()]
    words = torch.ops.fusedacc.prepare(accumulators).tolist()
    assert len(words) == constants.plan_words(accumulators)
    for index, tensor in enumerate(accumulators):
        assert constants.plan_entry(words, index) == (tensor.data_ptr(), tensor.numel(), tensor.dtype)
