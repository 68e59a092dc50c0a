"""Constants in Python equal those in csrc. The tests read csrc's from its sources."""

import re
from pathlib import Path

import pytest
import torch
from cases import native

from fusedacc.kernels import constants, rounding
from fusedacc.kernels.constants import GemmMethod, ProductMethod
from fusedacc.kernels.dtypes import DTYPES, PAIRS, dtype_name

STOCHASTIC = "StochasticBFloat16"
SOURCES = Path(__file__).resolve().parents[2] / "csrc"


def found(file: str, pattern: str) -> str:
    """Return the pattern's group from a file of csrc."""
    match = re.search(pattern, (SOURCES / file).read_text())
    assert match is not None, f"{file} does not match {pattern}"
    return match[1]


@pytest.mark.parametrize(
    ("file", "pattern", "own"),
    [
        ("common/work.h", r"constexpr \w+ kMaxDims = (\d+);", constants.MAX_DIMS),
        ("common/work.h", r"constexpr \w+ kChunkElements = (\d+);", constants.CHUNK_ELEMENTS),
        ("common/work.h", r"constexpr \w+ kRowRun = (\d+);", constants.ROW_RUN),
        ("common/functors.h", r"kRounds = (\d+);", rounding.ROUNDS),
        ("common/functors.h", r"kElements = (\d+);", rounding.BLOCK),
        ("cpu/gemm.h", r"kGemmMethods = (\d+);", len(GemmMethod)),
    ],
)
def test_numbers(file, pattern, own):
    assert int(found(file, pattern)) == own


def test_classes_of_tokens():
    listed = found("cpu/gemm.h", r"kTokenClasses\[\] = \{([\d, ]+)\};")
    assert tuple(map(int, listed.split(", "))) == constants.TOKEN_CLASSES


@pytest.mark.parametrize(("file", "own"), [("cpu/gemm.h", GemmMethod), ("autograd/engine.h", ProductMethod)])
def test_enumerations(file, own):
    names = [each.name.title().replace("_", "") for each in sorted(own)]
    listed = found(file, rf"enum class {own.__name__} : \w+ \{{([^}}]+)\}};")
    without_comments = re.sub(r"//.*", "", listed)
    assert re.findall(r"k\w+", without_comments) == [f"k{name}" for name in names]


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
    for name, own in (("kMultipliers", rounding._MULTIPLIERS), ("kWeyl", rounding._WEYL)):
        listed = found("common/functors.h", rf"{name}\[\] = \{{([^}}]+)\}};").replace("u", "").split(", ")
        assert [int(number, 16) for number in listed] == [number % 2**32 for number in own]


@native
def test_the_words_of_a_plan():
    accumulators = [torch.zeros((3, 4, 5)[: index % 4], dtype=DTYPES[index % 4]) for index in range(9)]
    accumulators += [torch.zeros(0, 7), torch.zeros(4, 6).t()]
    words = torch.ops.fusedacc.prepare(accumulators).tolist()
    assert len(words) == constants.plan_words(accumulators)
    for index, tensor in enumerate(accumulators):
        assert constants.plan_entry(words, index) == (tensor.data_ptr(), tensor.numel(), tensor.dtype)
