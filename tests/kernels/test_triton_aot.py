"""Triton's kernels compiled ahead of time, without a GPU.

For sm_90: the kernels for rows and groups. `test_machine_code.py` checks the others.
For AMD's gfx942: all kernels.
"""

import functools
import json
import re
from collections import Counter

import pytest
import sweeps
from cases import PAIRS
from machine_code.compile import obstacle, resources, triton_compiled

pytestmark = pytest.mark.skipif(obstacle("triton") is not None, reason=str(obstacle("triton")))

NAMES = [(str(gradient)[6:], str(accumulator)[6:]) for gradient, accumulator in PAIRS]
if not sweeps.FULL:  # in `make test` float16 is left out, which is compiled as bfloat16 is
    NAMES = [names for names in NAMES if "float16" not in names]
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# A Hopper SM has 65,536 registers: at 64 per thread, eight blocks of 128 fit.
MOST_REGISTERS = 64
# By bytes of an operand. Of programs of four warps with 128 registers a thread, four fit; of eight warps with
# 80 registers, three.
MOST_GROUPED_REGISTERS = {8: 128, 4: 80, 2: 128}

BOTH = ("add_runs", "add_long_rows")
#: What is compiled: the target, a function of the program, and its arguments.
WANTED = [
    *(("sm_90", "rows", *pair, kernel) for pair in NAMES for kernel in BOTH),
    *(("sm_90", "grouped", *pair, on_device, "ieee") for pair in NAMES for on_device in (False, True)),
    ("sm_90", "grouped", "float32", "float32", False, "tf32"),
]
AMD_NAMES = NAMES if sweeps.FULL else [("bfloat16", "float32"), ("float64", "float64")]
#: For MI300, for which `auto` selects Triton. No test runs there.
AMD = [
    *(("gfx942", "accumulation", *pair) for pair in AMD_NAMES),
    ("gfx942", "accumulation", "float32", "bfloat16", True),
    *(("gfx942", "rows", *pair, kernel) for pair in AMD_NAMES for kernel in BOTH),
    *(("gfx942", "grouped", *pair, False, "ieee") for pair in AMD_NAMES),
    *(("gfx942", "norm", dtype, "2") for dtype in (BYTES if sweeps.FULL else ("float32", "float64"))),
    *(("gfx942", *what) for what in (("norm", "float32", "inf"), ("end", "float32", "2"))),
    *(("gfx942", *what) for what in (("end", "float64", "inf"), ("join", "2"))),
]


@functools.cache
def compiled() -> dict[tuple, dict]:
    """Compile all that is wanted, once for all runs of the tests."""
    wanted = WANTED + AMD
    folder = triton_compiled(tuple(wanted))
    results = json.loads((folder / "compiled.json").read_text())
    for result in results:
        if result["cubin"] is not None:
            (result["usage"],) = resources(folder / result["cubin"]).values()
    return dict(zip(wanted, results, strict=True))


def for_sm_90(*what: object) -> dict:
    return compiled()[("sm_90", *what)]


def accesses(ptx):
    """Count each kind of access to global memory: {("ld", "v4.b32"): 2, ...}."""
    return Counter(re.findall(r"\b(ld|st)\.global\.(v\d\.b\d+|b\d+)", ptx))


def registers_of(result):
    """Return the number of registers of a kernel, which must not spill or have local memory."""
    assert result["usage"]["STACK"] == result["usage"]["LOCAL"] == 0
    assert ".local" not in result["ptx"]
    return result["usage"]["REG"]


def test_kernels_compile_for_amd():
    for what in AMD:
        code = compiled()[what]["amdgcn"]
        assert "gfx942" in code
        if what[1] == "accumulation":
            kind = "f64" if what[3] == "float64" else "f32"
            # v_fma_mix_f32 takes float16 as it is.
            assert re.search(rf"v_(pk_)?fma(c|_mix)?_{kind}", code), what


@pytest.mark.parametrize("pair", NAMES, ids="-".join)
def test_rows_move_16_bytes_at_a_time_and_are_added_by_one_fma_after_a_correct_division(pair):
    """A step is 8 elements a thread: of a gradient (the first, and another), of a sum, of the table."""
    gradient, table = (BYTES[dtype] for dtype in pair)
    found = accesses(for_sm_90("rows", *pair, "add_runs")["ptx"])
    wide = "v2.b64" if table == 8 else "v4.b32"
    assert found["ld", wide] == (2 * gradient + table) * 8 // 16
    assert found["st", wide] == (max(table, 4) + table) * 8 // 16
    kind = "f64" if table == 8 else "f32"
    for kernel in BOTH:
        result = for_sm_90("rows", *pair, kernel)
        assert registers_of(result) <= MOST_REGISTERS
        assert re.search(rf"\bfma\.rn\.{kind}\b", result["ptx"])
        assert re.search(rf"\bdiv\.rn\.{kind}\b", result["ptx"])
        assert not re.search(r"\bdiv\.(full|approx)|\.ftz", result["ptx"])


@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "on the device"])
@pytest.mark.parametrize("pair", NAMES, ids="-".join)
def test_groups_move_16_bytes_at_a_time_within_registers(pair, on_device):
    """Sums, once each way, and operands, straight into shared memory; no atomics."""
    result = for_sm_90("grouped", *pair, on_device, "ieee")
    operand, total = (BYTES[dtype] for dtype in pair)
    rows, columns, _, warps = result["tile"]
    sixteen = "v2.b64" if total == 8 else "v4.b32"
    steps = rows * columns * total // (16 * 32 * warps)
    found = accesses(result["ptx"])
    wide = {access: count for access, count in found.items() if "v" in access[1]}
    assert wide == {("ld", sixteen): steps, ("st", sixteen): steps}
    assert found.total() == 2 * steps + (4 if on_device else 2)
    copies = re.findall(r"\bcp\.async\.c[ag]\.shared\.global \[.*\], \[.*\], (\w+)", result["ptx"])
    # float64 operands are transposed during the copy, element by element.
    assert set(copies) == ({"0x10", "0x8"} if operand == 8 else {"0x10"})
    assert not re.search(r"\b(atom|red)\.", result["ptx"])
    assert registers_of(result) <= MOST_GROUPED_REGISTERS[operand]


@pytest.mark.parametrize("what", [what[2:] for what in WANTED if what[1] == "grouped"], ids=str)
def test_tensor_cores_multiply_groups(what):
    """The exception is float32, which is multiplied exactly unless PyTorch allows TF32."""
    operand, accumulator, _, precision = what
    ptx = for_sm_90("grouped", *what)["ptx"]
    kinds = set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.(.*?) ", ptx))
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "tf32", "float64": "f64"}[operand]
    if operand == "float32" and precision == "ieee":
        assert not kinds
        assert re.search(r"\bfma\.rn\.f32\b", ptx)
    else:
        sums = "f64" if accumulator == "float64" else "f32"
        assert kinds
        assert all(re.search(rf"\.{sums}\.{short}\.{short}\b", kind) for kind in kinds), kinds
    assert ("wgmma" in ptx) == (short != "f64" and bool(kinds))
