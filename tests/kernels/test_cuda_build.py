"""The CUDA kernels as the compiler leaves them, for which no GPU is needed: wide accesses, no spills."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
PAIRS = range(10)
#: Those whose sums are rounded stochastically.
STOCHASTIC = (8, 9)


def capacities(pair: int, kind: str) -> tuple[int, ...]:
    return (STREAM_CAPACITIES if pair in STOCHASTIC else CAPACITIES)[kind]


def norm_capacities(pair: int, kind: str) -> tuple[int, ...]:
    return (STREAM_NORM_CAPACITIES if pair in STOCHASTIC else NORM_CAPACITIES)[kind]


def find_disassembler() -> str | None:
    """cuobjdump, of a CUDA toolkit or of Triton's package."""
    triton = importlib.util.find_spec("triton")
    folders = ["/usr/local/cuda/bin"]
    if triton is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=os.pathsep.join(folders))


CUOBJDUMP = find_disassembler()
#: A Hopper multiprocessor has 65,536 registers: 64 a thread leave it four blocks of 256 threads.
MAX_REGISTERS = 64
#: Tensors that a launch's arguments have room for: few, some and many. All bytes are sent with each launch.
CAPACITIES = {"flat": (21, 144, 1167), "strided": (5, 255)}
NORM_CAPACITIES = {"flat": (16, 907), "strided": (255,)}
#: The same with a stream for each tensor.
STREAM_CAPACITIES = {"flat": (16, 111, 907), "strided": (5, 255)}
STREAM_NORM_CAPACITIES = {"flat": (12, 742), "strided": (255,)}
#: The pairs of a dtype with itself, whose kernels also read alone; two norms, flat and strided; two ends.
OWN_PAIRS = (0, 3, 4, 5)
KERNELS = sum(map(len, CAPACITIES.values())) * len(PAIRS)
NORM_KERNELS = 2 * sum(map(len, NORM_CAPACITIES.values())) * (len(PAIRS) + len(OWN_PAIRS)) + 2
#: By pair, aligned or not, the first launch and the second.
ROW_KERNELS = 4 * len(PAIRS)
#: Arguments of one launch from CUDA 12.1 on, and of launches over fewer tensors.
MAX_ARGUMENT_BYTES, SOME_BYTES, FEW_BYTES = 32764, 4096, 656
#: Accesses in PTX, and the pairs one of whose sides is half as wide as the other.
SIXTEEN, EIGHT = r"\.global\.(?:v4\.[ubf]32|v2\.[ubf]64)", r"\.global\.(?:v2\.[ubf]32|v4\.[ub]16)"
NARROW_GRADIENT, NARROW_SUM = (1, 2), (6, 7, 9)
#: A multiplier of Philox, once in each of its rounds.
MULTIPLIER, ROUNDS = r"-766435501|3528531795|0xD2511F53", 7

pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc not found")


@dataclass(frozen=True)
class Compiled:
    """A source of `csrc/cuda/` for sm_90: its PTX, its machine code, and what the compiler has said."""

    ptx: str
    cubin: Path
    said: str

    def kernels(self, pattern: str) -> dict[str, str]:
        """Each kernel's PTX by the groups of `pattern`, which finds its name."""
        assert "warning" not in self.said
        found = {}
        for body in re.split(r"(?=\.visible \.entry|\.entry )", self.ptx)[1:]:
            match = re.search(pattern, body)
            assert match is not None
            found["".join(filter(None, match.groups()))] = body
        return found


def compile_kernels(folder: Path, name: str) -> Compiled:
    output = folder / f"{name}.cubin"
    command = [
        NVCC,
        "-std=c++17",
        "-O3",
        "-fmad=false",
        "-Werror",
        "all-warnings",
        "-Xcompiler",
        "-Wall,-Wextra",
        "-arch=sm_90",
        "-cubin",
        "-Xptxas",
        "-v",
        "--keep",  # the PTX too
        "--keep-dir",
        str(folder),
    ]
    source = str(ROOT / "csrc" / "cuda" / f"{name}.cu")
    result = subprocess.run(
        [*command, source, "-o", str(output)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return Compiled((folder / f"{name}.ptx").read_text(), output, result.stdout + result.stderr)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compiled]:
    """Compiles a source once."""
    return functools.cache(lambda name: compile_kernels(tmp_path_factory.mktemp(name), name))


@pytest.fixture(scope="module")
def kernels(compiled: Callable[[str], Compiled]) -> dict[str, str]:
    """By kind, pair and capacity, such as `flat_kernel1E1167`."""
    pattern = r"(flat_kernel|strided_kernel)ILi(\d+E)\w*?BatchILi(\d+)E"
    return compiled("accumulate").kernels(pattern)


@pytest.fixture(scope="module")
def norm_kernels(compiled: Callable[[str], Compiled]) -> dict[str, str]:
    """By kind, pair, norm, whether it only reads, and capacity, such as `flat_norm_kernel1E01E907`."""
    pattern = r"((?:flat|strided|finish)_norm_kernel)I(?:Li(\d+E))?\w*?NormKindE(\d)E"
    pattern += r"(?:Lb(\dE)\w*?BatchILi(\d+)E)?"
    return compiled("norm").kernels(pattern)


@pytest.fixture(scope="module")
def row_kernels(compiled: Callable[[str], Compiled]) -> dict[str, str]:
    """By kind, pair, and whether rows are aligned and long, such as `row_kernel1E10`."""
    pattern = r"(row_kernel)ILi(\d+E)Lb(\d)ELb(\d)"
    return compiled("rows").kernels(pattern)


def test_there_is_a_flat_and_a_strided_kernel_for_every_pair(kernels: dict[str, str]) -> None:
    assert set(kernels) == {
        f"{kind}_kernel{pair}E{capacity}"
        for kind in CAPACITIES
        for pair in PAIRS
        for capacity in capacities(pair, kind)
    }


@pytest.mark.parametrize("pair", PAIRS)
def test_the_wider_side_moves_16_bytes_at_a_time(kernels: dict[str, str], pair: int) -> None:
    """A step is one access of each side, so that neighbouring threads' writes leave no gaps between them."""
    body = kernels[f"flat_kernel{pair}E{capacities(pair, 'flat')[-1]}"]
    gradient = EIGHT if pair in NARROW_GRADIENT else SIXTEEN
    total = EIGHT if pair in NARROW_SUM else SIXTEEN
    # Four steps together, then two, then one; and all of that again where sums are overwritten, unread.
    # After a head, steps that are rounded stochastically go one by one.
    steps = 4 + 2 + 1 + (pair in STOCHASTIC)
    expected = Counter({gradient: 2 * steps}) + Counter({total: steps})
    assert expected == {kind: len(re.findall("ld" + kind, body)) for kind in {gradient, total}}
    assert len(re.findall("st" + total, body)) == 2 * steps


@pytest.mark.parametrize("pair", STOCHASTIC)
def test_a_step_s_random_bits_are_made_at_once(kernels: dict[str, str], pair: int) -> None:
    """By one Philox, after a head by two; and one for what is passed singly."""
    body = kernels[f"flat_kernel{pair}E{capacities(pair, 'flat')[-1]}"]
    made = 2 * ROUNDS * (4 + 2 + 1 + 2 + 1)
    # A few products of a loop's first round may stand before the loop.
    assert made <= len(re.findall(MULTIPLIER, body)) <= made + 2 * ROUNDS
    assert not any(re.search(MULTIPLIER, kernels[f"flat_kernel{other}E1167"]) for other in range(8))


@pytest.mark.skipif(CUOBJDUMP is None, reason="cuobjdump not found")
def test_all_loads_of_several_steps_are_issued_before_the_first_is_used(
    compiled: Callable[[str], Compiled],
) -> None:
    """In the machine code: somewhere between two stores or jumps, all of a loop's loads, then arithmetic."""
    assert CUOBJDUMP is not None
    command = [CUOBJDUMP, "--dump-sass", str(compiled("accumulate").cubin)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for body in code.split("Function : ")[1:]:
        name = re.search(r"flat_kernelILi(\d)E\w*BatchILi(?:1167|907)E", body.partition("\n")[0])
        if name is not None:
            loops = re.split(r"\b(?:BRA|EXIT|STG[.\w]*)\b", body)
            issued = [
                len(re.findall(r"LDG\.E\.\S*(?:64|128)", re.split(r"[FD]MUL|[FD]FMA", loop)[0]))
                for loop in loops
            ]
            found[int(name[1])] = max(issued)
    # Of eight, for four steps; bfloat16 into its own leaves no register for the last, and where its random
    # bits are made too, none for half of them.
    assert set(found) == set(PAIRS)
    assert found.pop(8) >= 4
    assert min(found.values()) >= 7


@pytest.mark.parametrize("norm", [0, 1])
def test_norms_read_16_bytes_at_a_time(norm_kernels: dict[str, str], norm: int) -> None:
    assert len(norm_kernels) == NORM_KERNELS
    wide = r"\.global\.(?:v4\.[ubf]32|v2\.[ubf]64)"
    for pair in OWN_PAIRS:
        body = norm_kernels[f"flat_norm_kernel{pair}E{norm}1E907"]
        assert len(re.findall("ld" + wide, body)) >= 4
        assert not re.search(r"st\.global\.(?![fub]64)", body)
    for pair in PAIRS:
        body = norm_kernels[f"flat_norm_kernel{pair}E{norm}0E{norm_capacities(pair, 'flat')[-1]}"]
        assert len(re.findall(f"ld(?:{wide}|{EIGHT})", body)) >= 3
        assert len(re.findall("st" + wide, body)) >= 2


def test_norms_take_their_arguments_in_place(norm_kernels: dict[str, str]) -> None:
    for name, body in norm_kernels.items():
        size = re.search(r"\.param \.align 8 \.b8 \w+\[(\d+)\]", body)
        assert size is not None
        most = FEW_BYTES if name.endswith(("E16", "E12")) else MAX_ARGUMENT_BYTES
        assert most - 200 < int(size[1]) <= most
        assert ".local" not in body


@pytest.mark.parametrize("pair", PAIRS)
def test_aligned_rows_move_16_bytes_of_the_wider_side_at_a_time(
    row_kernels: dict[str, str], pair: int
) -> None:
    assert len(row_kernels) == ROW_KERNELS
    wide = r"\.global(?:\.nc)?\.(?:v4\.[ubf]32|v2\.[ubf]64|v2\.[ubf]32|v4\.[ub]16)"
    body = row_kernels[f"row_kernel{pair}E10"]
    # The first gradient, four at a time, one at a time, and the table.
    assert len(re.findall("ld" + wide, body)) >= 7
    assert len(re.findall("st" + wide, body)) >= 2
    joined = row_kernels[f"row_kernel{pair}E11"]
    assert len(re.findall("ld" + wide, joined)) >= 3
    assert all(".local" not in kernel for kernel in row_kernels.values())


def test_rows_are_added_by_one_fma_after_a_correct_division(row_kernels: dict[str, str]) -> None:
    for pair in PAIRS:
        kind = "f64" if pair == 3 else "f32"
        for which in ("00", "01", "10", "11"):
            body = row_kernels[f"row_kernel{pair}E{which}"]
            assert f"fma.rn.{kind}" in body
            assert f"div.rn.{kind}" in body
            assert not re.search(r"div\.(full|approx)|\.ftz", body)


@pytest.mark.parametrize("kind", ["flat", "strided"])
def test_arguments_fit_one_launch_and_are_read_in_place(kernels: dict[str, str], kind: str) -> None:
    limits = {21: FEW_BYTES, 16: FEW_BYTES, 5: FEW_BYTES, 144: SOME_BYTES, 111: SOME_BYTES}
    for pair, index in itertools.product(PAIRS, range(len(CAPACITIES[kind]))):
        capacity = capacities(pair, kind)[index]
        body = kernels[f"{kind}_kernel{pair}E{capacity}"]
        size = re.search(r"\.param \.align 8 \.b8 \w+\[(\d+)\]", body)
        assert size is not None
        most = limits.get(capacity, MAX_ARGUMENT_BYTES)
        assert most - 200 < int(size[1]) <= most
        # A copy of the table to a thread's own memory would show here.
        assert ".local" not in body


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("accumulate", KERNELS),
        ("norm", NORM_KERNELS),
        ("rows", ROW_KERNELS),
    ],
)
def test_registers_and_spills(name: str, count: int, compiled: Callable[[str], Compiled]) -> None:
    said = compiled(name).said
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) == count
    assert max(registers) <= MAX_REGISTERS
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert len(frames) == len(registers)
    assert set(frames) == {("0", "0", "0")}


def test_the_bench_of_variants_compiles_without_warnings(tmp_path: Path) -> None:
    source, program = ROOT / "benchmarks" / "suites" / "gpu_variants.cu", tmp_path / "variants"
    flags = [
        "-std=c++17",
        "-O3",
        "-fmad=false",
        "-arch=sm_90",
        "-Werror",
        "all-warnings",
        "-Xcompiler",
        "-Wall",
    ]
    result = subprocess.run(
        [NVCC, *flags, source, "-o", program], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert program.exists()
