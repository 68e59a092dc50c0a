"""The CUDA kernels as the compiler leaves them, for which no GPU is needed: wide accesses, no spills."""

from __future__ import annotations

import functools
import re
from collections import Counter

import pytest

from machine_code.compile import NVCC, nvcc_compiled
from machine_code.kernels import COMMON, pairs

pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc: not on PATH, CUDA_HOME or CUDACXX")

#: By the pairs' numbers: the dtype of gradients, that of sums, and whether these are rounded stochastically.
TABLE = pairs()
PAIRS = range(len(TABLE))
#: By the numbers of `NormKind`.
NORMS = range((COMMON / "norm_functors.h").read_text().count("    case NormKind::"))
#: Those whose sums are rounded stochastically.
STOCHASTIC = tuple(pair for pair in PAIRS if TABLE[pair][2])
#: The pairs of a dtype with itself, whose norm kernels also read alone.
OWN_PAIRS = tuple(pair for pair in PAIRS if TABLE[pair][0] == TABLE[pair][1] and not TABLE[pair][2])
#: The bits of each side, and the pairs one of whose sides is half as wide as the other.
BITS = [[int(name.lstrip("abflot")) for name in names[:2]] for names in TABLE]
NARROW_GRADIENT = tuple(pair for pair in PAIRS if 2 * BITS[pair][0] == BITS[pair][1])
NARROW_SUM = tuple(pair for pair in PAIRS if BITS[pair][0] == 2 * BITS[pair][1])
#: A Hopper multiprocessor has 65,536 registers: 64 a thread leave it four blocks of 256 threads.
MAX_REGISTERS = 64
#: Bytes of arguments of launches over few tensors, over some, and over many (the limit from CUDA 12.1 on).
FEW, SOME, MANY = 656, 4096, 32764
#: How many tensors there is room for, and in how many bytes. All bytes are sent with each launch.
CAPACITIES = {"flat": {21: FEW, 144: SOME, 1167: MANY}, "strided": {5: FEW, 255: MANY}}
NORM_CAPACITIES = {"flat": {16: FEW, 907: MANY}, "strided": {255: MANY}}
#: The same with a stream of random bits for each tensor.
STREAM_CAPACITIES = {"flat": {16: FEW, 111: SOME, 907: MANY}, "strided": {5: FEW, 255: MANY}}
STREAM_NORM_CAPACITIES = {"flat": {12: FEW, 742: MANY}, "strided": {255: MANY}}
#: By source: what finds a kernel's name.
NAMES = {
    "accumulate": r"(flat_kernel|strided_kernel)ILi(\d+E)\w*?BatchILi(\d+)E",
    "norm": r"((?:flat|strided|finish)_norm_kernel)I(?:Li(\d+E))?\w*?NormKindE(\d)E"
    r"(?:Lb(\dE)\w*?BatchILi(\d+)E)?",
    "rows": r"(row_kernel)ILi(\d+E)Lb(\d)ELb(\d)",
}
#: Accesses in PTX.
SIXTEEN, EIGHT = r"\.global\.(?:v4\.[ubf]32|v2\.[ubf]64)", r"\.global\.(?:v2\.[ubf]32|v4\.[ub]16)"
#: A multiplier of Philox, once in each of its rounds.
MULTIPLIER, ROUNDS = r"-766435501|3528531795|0xD2511F53", 7


def capacities(pair: int) -> dict[str, dict[int, int]]:
    return STREAM_CAPACITIES if pair in STOCHASTIC else CAPACITIES


def norm_capacities(pair: int) -> dict[str, dict[int, int]]:
    return STREAM_NORM_CAPACITIES if pair in STOCHASTIC else NORM_CAPACITIES


#: By source and by the kernel's name, such as `flat_kernel1E1167`: bytes of its arguments.
KERNELS = {
    "accumulate": {
        f"{kind}_kernel{pair}E{capacity}": size
        for pair in PAIRS
        for kind, sizes in capacities(pair).items()
        for capacity, size in sizes.items()
    },
    "norm": {
        f"{kind}_norm_kernel{pair}E{norm}{reads}E{capacity}": size
        for norm in NORMS
        for reads, pairs in ((0, PAIRS), (1, OWN_PAIRS))
        for pair in pairs
        for kind, sizes in norm_capacities(pair).items()
        for capacity, size in sizes.items()
    }
    | {f"finish_norm_kernel{norm}": MANY for norm in NORMS},
    # By pair, aligned or not, the first launch and the second.
    "rows": {f"row_kernel{pair}E{which}": 0 for pair in PAIRS for which in ("00", "01", "10", "11")},
}


@functools.cache
def kernels(name: str) -> dict[str, str]:
    """Each kernel's PTX by its name."""
    found = {}
    for body in re.split(
        r"(?=\.visible \.entry|\.entry )", (nvcc_compiled(name) / f"{name}.ptx").read_text()
    )[1:]:
        match = re.search(NAMES[name], body)
        assert match is not None
        found["".join(filter(None, match.groups()))] = body
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_arguments_registers_and_spills(name: str) -> None:
    assert set(kernels(name)) == set(KERNELS[name])
    for kernel, body in kernels(name).items():
        assert ".local" not in body, kernel  # a thread's copy of the arguments' table would show here
        most = KERNELS[name][kernel]
        if most:
            size = re.search(r"\.param \.align 8 \.b8 \w+\[(\d+)\]", body)
            assert size is not None
            assert most - 200 < int(size[1]) <= most
    said = (nvcc_compiled(name) / "said").read_text()
    assert "warning" not in said
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) == len(KERNELS[name])
    assert max(registers) <= MAX_REGISTERS
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert frames == [("0", "0", "0")] * len(registers)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_wider_side_moves_16_bytes_at_a_time(pair: int) -> None:
    """A step is one access of each side, so that neighbouring threads' writes leave no gaps between them."""
    body = kernels("accumulate")[f"flat_kernel{pair}E{max(capacities(pair)['flat'])}"]
    gradient = EIGHT if pair in NARROW_GRADIENT else SIXTEEN
    total = EIGHT if pair in NARROW_SUM else SIXTEEN
    # Four steps together, then two, then one; and all of that again where sums are overwritten, unread.
    # After a head, steps that are rounded stochastically go one by one.
    steps = 4 + 2 + 1 + (pair in STOCHASTIC)
    expected = Counter({gradient: 2 * steps}) + Counter({total: steps})
    assert expected == {kind: len(re.findall("ld" + kind, body)) for kind in {gradient, total}}
    assert len(re.findall("st" + total, body)) == 2 * steps
    # A step's random bits are made at once, by one Philox, after a head by two; and one for single elements.
    # A few products of a loop's first round may stand before the loop.
    made = 2 * ROUNDS * (4 + 2 + 1 + 2 + 1) if pair in STOCHASTIC else 0
    most = made + 2 * ROUNDS if made else 0
    assert made <= len(re.findall(MULTIPLIER, body)) <= most


@pytest.mark.parametrize("norm", NORMS)
def test_norms_read_16_bytes_at_a_time(norm: int) -> None:
    for pair in OWN_PAIRS:
        body = kernels("norm")[f"flat_norm_kernel{pair}E{norm}1E907"]
        assert len(re.findall("ld" + SIXTEEN, body)) >= 4
        assert not re.search(r"st\.global\.(?![fub]64)", body)
    for pair in PAIRS:
        body = kernels("norm")[f"flat_norm_kernel{pair}E{norm}0E{max(norm_capacities(pair)['flat'])}"]
        assert len(re.findall(f"ld(?:{SIXTEEN}|{EIGHT})", body)) >= 3
        assert len(re.findall("st" + SIXTEEN, body)) >= 2


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_move_16_bytes_at_a_time_and_are_added_by_one_fma_after_a_correct_division(pair: int) -> None:
    wide = r"\.global(?:\.nc)?\.(?:v4\.[ubf]32|v2\.[ubf]64|v2\.[ubf]32|v4\.[ub]16)"
    bodies = {which: kernels("rows")[f"row_kernel{pair}E{which}"] for which in ("00", "01", "10", "11")}
    # The first gradient, four at a time, one at a time, and the table.
    assert len(re.findall("ld" + wide, bodies["10"])) >= 7
    assert len(re.findall("st" + wide, bodies["10"])) >= 2
    assert len(re.findall("ld" + wide, bodies["11"])) >= 3
    kind = "f64" if pair == 3 else "f32"
    for body in bodies.values():
        assert f"fma.rn.{kind}" in body
        assert f"div.rn.{kind}" in body
        assert not re.search(r"div\.(full|approx)|\.ftz", body)
