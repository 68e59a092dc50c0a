"""Constants that Python and csrc share are equal. The test reads them from the headers."""

import re
from pathlib import Path

import pytest
import torch

from fusedacc.kernels import constants, library, loop_settings, rounding
from fusedacc.kernels.constants import GemmMethod, Multiplier
from fusedacc.kernels.dtypes import DTYPES, PAIRS, dtype_name

STOCHASTIC = "StochasticBFloat16"
SOURCES = Path(__file__).resolve().parents[2] / "csrc"


def found(file: str, pattern: str) -> str:
    """Return the pattern's group from a file of csrc."""
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
        ("common/work.h", "kRowRun", constants.ROW_RUN),
        ("cpu/gemm.cpp", "kSplitRows", constants.SPLIT_ROWS),
    ],
)
def test_numbers(file, name, own):
    assert int(found(file, rf"constexpr \w+ {name} = (\d+);")) == own


def test_classes_of_tokens():
    listed = found("cpu/gemm.h", r"kTokenClasses\[\] = \{([\d, ]+)\};")
    assert tuple(map(int, listed.split(", "))) == constants.TOKEN_CLASSES


@pytest.mark.parametrize(
    ("file", "own"), [("cpu/gemm.h", GemmMethod), ("autograd/immediate_add.h", Multiplier)]
)
def test_enumerations(file, own):
    names = [each.name.title().replace("_", "") for each in sorted(own)]
    assert enumerators(file, own.__name__) == [f"k{name}" for name in names]


def test_dtypes_and_their_pairs():
    names = {dtype_name(dtype): dtype for dtype in DTYPES}
    rows = re.findall(r"ROW\((\w+), k(\w+),", (SOURCES / "common/dtypes.h").read_text())
    assert [name for name, _ in rows] == list(names)
    of = {enumerator: names[name] for name, enumerator in rows}
    table = found("common/dtypes.h", r"kPairs\[\] = \{([^;]*)\};")
    pairs = re.findall(r"\{Dtype::k(\w+), Dtype::k(\w+)\}", table)
    assert len(pairs) == len(set(pairs))
    nearest = [pair for pair in pairs if pair[1] != STOCHASTIC]
    assert {(of[gradient], of[accumulator]) for gradient, accumulator in nearest} == PAIRS
    rounded = {gradient for gradient, accumulator in nearest if accumulator == "BFloat16"}
    assert {gradient for gradient, accumulator in pairs if accumulator == STOCHASTIC} == rounded


def test_random_bits():
    file = "common/functors.h"
    assert int(found(file, r"kRounds = (\d+);")) == rounding.ROUNDS
    assert int(found(file, r"kElements = (\d+);")) == rounding.BLOCK
    numbers = rounding._MULTIPLIERS, rounding._WEYL
    for name, own in zip(("kMultipliers", "kWeyl"), numbers, strict=True):
        listed = found(file, rf"{name}\[\] = \{{([^}}]+)\}};").replace("u", "").split(", ")
        assert [int(number, 16) for number in listed] == [number % 2**32 for number in own]


def test_what_holds_until_a_trial():
    assert int(found("cpu/lists.cpp", r"least_share\{(\d+)\}")) == loop_settings.GRAIN_SIZES[-1]
    default = loop_settings.PREFETCH_BYTES[loop_settings.DEFAULT_PREFETCH]
    assert int(found("cpu/loops.h", r"kAheadBytes = (\d+);")) == default
    assert 1 << int(found("cpu/lists.cpp", r"kLargeNorm = 1 << (\d+);")) == loop_settings.LARGE_NORM


@pytest.mark.skipif(library.load_error() is not None, reason=str(library.load_error()))
def test_the_words_of_a_plan():
    accumulators = [torch.zeros((3, 4, 5)[: index % 4], dtype=DTYPES[index % 4]) for index in range(9)]
    accumulators += [torch.zeros(0, 7), torch.zeros(4, 6).t()]
    words = torch.ops.fusedacc.prepare(accumulators).tolist()
    assert len(words) == constants.plan_words(accumulators)
    for index, tensor in enumerate(accumulators):
        assert constants.plan_entry(words, index) == (tensor.data_ptr(), tensor.numel(), tensor.dtype)
