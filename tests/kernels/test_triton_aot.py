"""The Triton kernels compiled ahead of time, with no GPU: for sm_90 (vector accesses, registers, spills), and
for AMD's gfx942.

The compiler runs in a process of its own, because this one may have Triton interpreted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from cases import PAIR_IDS, PAIRS

import fusedacc

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CASES = list(zip(PAIR_IDS, PAIRS, strict=True))
# A Hopper SM has 65,536 registers: at 64 per thread, eight blocks of 128 fit.
MOST_REGISTERS = 64

NORM_DTYPES = {"float64": 4, "float32": 2, "bfloat16": 1, "float16": 1}

COMPILE = """
import json, subprocess, sys, tempfile
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fusedacc.kernels.triton.kernels import (
    ADDING, WARPS, finish_norm, join_partials, norm_partials, scale_accumulate,
)
from fusedacc.kernels.triton.grouped_kernels import TILES, grouped_accumulate
from fusedacc.kernels.triton.row_kernels import add_long_rows, add_runs

def wide(dtype):
    return tl.float64 if dtype == "float64" else tl.float32

def accumulation(gradient, accumulator, noisy=False):
    types = {"table": "*i64", "calls": "*i64", "scale": "*fp64", "beta": "*fp64", "count": "i32"}
    constants = {
        "accumulator_dtype": getattr(tl, accumulator),
        "gradient_dtype": getattr(tl, gradient),
        "wide": wide(accumulator),
        "noisy": noisy,
    }
    return compiled(scale_accumulate, types, constants, 2, ADDING)

def norm(dtype, infinity):
    types = {"table": "*i64", "partials": "*fp64", "count": "i32"}
    constants = {"dtype": getattr(tl, dtype), "wide": wide(dtype), "infinity": infinity == "inf"}
    return compiled(norm_partials, types, constants, 2)

def end(dtype, infinity):
    types = {"partials": "*fp64", "count": "i32", "norm": "*fp" + dtype[-2:], "found": "*fp32"}
    return compiled(finish_norm, types, {"infinity": infinity == "inf"}, 1)

def join(infinity):
    types = {"partials": "*fp64", "count": "i32", "joined": "*fp64"}
    return compiled(join_partials, types, {"infinity": infinity == "inf"}, 1)

SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
ROWS = {"table_stride": "i32", "table_rows": "i32", "width": "i32", "rows": "*i64"}

def rows(gradient, accumulator, kernel, noisy=False, eights=False):
    sums = "fp64" if accumulator == "float64" else "fp32"
    table = {"table": "*" + SHORT[accumulator], **ROWS}
    if kernel == "add_runs":
        fresh = {"gradients": "*" + SHORT[gradient], "gradient_stride": "i32"}
        table |= {"order": "*i64", "count": "i32", **fresh}
    else:
        table |= {"count": "i32"}
    table |= {"scale": "*fp64", "padding": "i32", "sums": "*" + sums, "sum_stride": "i32"}
    table |= {"seed": "i64", "stream": "i64"}
    constants = {"by_frequency": True, "block": 1024, "noisy": noisy, "eights": eights}
    if kernel == "add_runs":
        constants["wide"] = wide(accumulator)
    other = ("table_rows", "count", "scale", "padding", "seed", "stream")
    whole = [name for name in table if name not in other]
    return compiled(globals()[kernel], table, constants, [list(table).index(name) for name in whole])

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

def grouped(operand, accumulator, on_device, precision, noisy=False, eights=False):
    *blocks, warps = TILES[BYTES[operand]]
    number = "*fp32" if on_device else "fp32"
    types = {"accumulator": "*" + SHORT[accumulator], "left": "*" + SHORT[operand]}
    types |= {"right": "*" + SHORT[operand], "offsets": "*i32", "scale": number, "keep": number}
    numbers = ("rows", "columns", "tokens", "expert_stride", "row_stride", "left_stride", "right_stride")
    types |= dict.fromkeys(numbers, "i32") | {"seed": "i64", "stream": "i64"}
    constants = {"scale_on_device": on_device, "keep_on_device": on_device, "wide": wide(accumulator)}
    constants |= dict(zip(("block_rows", "block_columns", "block_tokens"), blocks), precision=precision)
    constants |= {"noisy": noisy, "eights": eights}
    whole = [name for name in types if name not in ("scale", "keep", "tokens", "seed", "stream")]
    places = [list(types).index(name) for name in whole]
    result = compiled(grouped_accumulate, types, constants, places, {"num_warps": warps})
    return result | {"tile": TILES[BYTES[operand]]}

def compiled(function, types, constants, aligned, options={"num_warps": WARPS}):
    source = ASTSource(
        function,
        {**types, **{name: "constexpr" for name in constants}},
        constexprs=constants,
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index in (range(aligned) if isinstance(aligned, int) else aligned)
        },
    )
    if TARGET == "gfx942":
        # As launches on ROCm have it: no number of registers.
        hip = {"num_warps": options["num_warps"]}
        kernel = triton.compile(source, target=GPUTarget("hip", TARGET, 64), options=hip)
        return {"amdgcn": kernel.asm["amdgcn"], "shared": kernel.metadata.shared}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(kernel.asm["ptx"])
        ptx.flush()
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", ptx.name, "-o", "/dev/null"]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {"ptx": kernel.asm["ptx"], "shared": kernel.metadata.shared, "usage": usage}

TARGET = sys.argv[2]
print(json.dumps([globals()[name](*names) for name, *names in json.loads(sys.argv[1])]))
"""


def compile_all(wanted, target="sm_90"):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join(
        filter(None, [str(Path(fusedacc.__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(wanted), target],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled():
    names = [[str(dtype).removeprefix("torch.") for dtype in pair] for pair in PAIRS]
    results = compile_all([["accumulation", *pair] for pair in names])
    return dict(zip(PAIR_IDS, results, strict=True))


@pytest.fixture(scope="module")
def noisy():
    gradients = ("bfloat16", "float32")
    wanted = [("accumulation", each, "bfloat16", True) for each in gradients]
    kinds = [(kernel, eights) for kernel in ("add_runs", "add_long_rows") for eights in (False, True)]
    wanted += [
        ("rows", each, "bfloat16", kernel, True, eights) for each in gradients for kernel, eights in kinds
    ]
    wanted += [("grouped", each, "bfloat16", False, "ieee", True, True) for each in gradients]
    return dict(zip(wanted, compile_all(wanted), strict=True))


@pytest.fixture(scope="module")
def norms():
    wanted = [("norm", dtype, kind) for dtype in NORM_DTYPES for kind in ("2", "inf")]
    wanted += [("end", dtype, kind) for dtype in ("float32", "float64") for kind in ("2", "inf")]
    wanted += [("join", kind) for kind in ("2", "inf")]
    return dict(zip(wanted, compile_all(wanted), strict=True))


@pytest.fixture(scope="module")
def rows():
    names = [[str(dtype).removeprefix("torch.") for dtype in pair] for pair in PAIRS]
    wanted = [("rows", *pair, kernel) for pair in names for kernel in ("add_runs", "add_long_rows")]
    return dict(zip(wanted, compile_all(wanted), strict=True))


@pytest.fixture(scope="module")
def grouped():
    names = [[str(dtype).removeprefix("torch.") for dtype in pair] for pair in PAIRS]
    wanted = [("grouped", *pair, on_device, "ieee") for pair in names for on_device in (False, True)]
    wanted += [("grouped", "float32", "float32", False, "tf32")]
    return dict(zip(wanted, compile_all(wanted), strict=True))


def accesses(ptx):
    """How often each kind of access to global memory stands in the code: {("ld", "v4.b32"): 2, ...}."""
    return Counter(re.findall(r"\b(ld|st)\.global\.(v\d\.b\d+|b\d+)", ptx))


@pytest.mark.parametrize(("pair", "dtypes"), CASES, ids=PAIR_IDS)
def test_a_step_is_16_bytes_of_the_wider_side(pair, dtypes, compiled):
    """One access of each side, so that neighbouring threads' writes leave no gaps between them."""
    gradient_bytes, accumulator_bytes = (dtype.itemsize for dtype in dtypes)
    widest = max(gradient_bytes, accumulator_bytes)
    sixteen = "v2.b64" if widest == 8 else "v4.b32"
    kinds = ["v2.b32" if size < widest else sixteen for size in (gradient_bytes, accumulator_bytes)]
    ptx = compiled[pair]["ptx"]
    order = re.findall(r"\b(ld|st)\.global\.(v\d\.b\d+)", ptx)
    assert {kind for access, kind in order if access == "st"} == {kinds[1]}
    assert {kind for access, kind in order if access == "ld"} == set(kinds)
    # Four steps' loads before the first is stored, and then loops of single steps.
    assert Counter(order[:8]) == Counter({("ld", kinds[0]): 4}) + Counter({("ld", kinds[1]): 4})
    assert order[8:12] == [("st", kinds[1])] * 4


@pytest.mark.parametrize("pair", PAIR_IDS)
def test_no_spills_no_shared_memory_few_registers(pair, compiled):
    usage = compiled[pair]["usage"]
    assert compiled[pair]["shared"] == 0
    assert ".shared" not in compiled[pair]["ptx"]
    assert ".local" not in compiled[pair]["ptx"]
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in usage
    assert int(re.search(r"Used (\d+) registers", usage)[1]) <= MOST_REGISTERS


@pytest.mark.parametrize(("pair", "dtypes"), CASES, ids=PAIR_IDS)
def test_arithmetic_is_one_fma_rounded_to_nearest(pair, dtypes, compiled):
    ptx = compiled[pair]["ptx"]
    kind = "f64" if dtypes[1].itemsize == 8 else "f32"
    assert re.search(rf"\bfma\.rn\.{kind}\b", ptx)
    assert not re.search(r"\badd(\.\w+)?\.f(32|64)\b", ptx)
    assert ".ftz" not in ptx
    narrow = {"torch.bfloat16": "bf16", "torch.float16": "f16"}.get(str(dtypes[1]))
    conversions = set(re.findall(r"\bcvt\.(\w+)\.b?f16(?:x2)?\.f32\b", ptx))
    assert conversions == ({"rn"} if narrow else set())


def test_noise_costs_no_access_no_spill_no_exchange(noisy):
    """Eight elements a thread, whose bits it makes by itself: loads of four steps, stores, loops of one."""
    for gradient, loads in (("bfloat16", 1), ("float32", 2)):
        result = noisy["accumulation", gradient, "bfloat16", True]
        found = re.findall(r"\b(ld|st)\.global\.v4\.b32", result["ptx"])
        assert found == ["ld"] * 4 * (loads + 1) + ["st"] * 4 + ["ld"] * (loads + 1) + ["st"]
        assert result["shared"] == 0
    for (name, gradient, *_), result in noisy.items():
        grouped = {"bfloat16": MOST_GROUPED_REGISTERS[2], "float32": MOST_GROUPED_REGISTERS[4]}[gradient]
        uses_nothing_but_registers(result, grouped if name == "grouped" else MOST_REGISTERS)
        assert ".rn.bf16" not in result["ptx"]


@pytest.mark.parametrize("kind", ["2", "inf"])
@pytest.mark.parametrize("dtype", NORM_DTYPES)
def test_norms_read_16_bytes_at_a_time(dtype, kind, norms):
    """The main loop's loads, and as many for each of the two loops of the second, rare pass."""
    result = norms["norm", dtype, kind]
    found = {access: count for access, count in accesses(result["ptx"]).items() if "v" in access[1]}
    passes = 1 if kind == "inf" else 3
    wide = "v2.b64" if dtype == "float64" else "v4.b32"
    assert found == {("ld", wide): passes * NORM_DTYPES[dtype]}
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in result["usage"]
    assert ".local" not in result["ptx"]


@pytest.mark.parametrize("kind", ["2", "inf"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_end_of_a_norm_compiles(dtype, kind, norms):
    result = norms["end", dtype, kind]
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in result["usage"]
    assert ".local" not in result["ptx"]


@pytest.mark.parametrize("kind", ["2", "inf"])
def test_many_partial_norms_are_joined_16_bytes_at_a_time(kind, norms):
    result = norms["join", kind]
    assert accesses(result["ptx"])["ld", "v2.b64"] == 4 * (1 if kind == "inf" else 3)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in result["usage"]
    assert ".local" not in result["ptx"]


def test_every_kernel_compiles_for_amd():
    """For MI300, where `auto` takes Triton under ROCm; nothing of it has run there."""
    names = [[str(dtype).removeprefix("torch.") for dtype in pair] for pair in PAIRS]
    wanted = [["accumulation", *pair] for pair in names]
    wanted += [["rows", *pair, kernel] for pair in names for kernel in ("add_runs", "add_long_rows")]
    wanted += [["accumulation", "float32", "bfloat16", True]]
    wanted += [["grouped", *pair, False, "ieee"] for pair in names]
    wanted += [["norm", dtype, "2"] for dtype in NORM_DTYPES]
    wanted += [["norm", "float32", "inf"], ["end", "float32", "2"], ["end", "float64", "inf"], ["join", "2"]]
    results = compile_all(wanted, "gfx942")
    assert len(results) == len(wanted)
    for (name, *dtypes), result in zip(wanted, results, strict=True):
        assert "gfx942" in result["amdgcn"]
        if name == "accumulation":
            kind = "f64" if dtypes[1] == "float64" else "f32"
            # v_fma_mix_f32 takes float16 as it is.
            assert re.search(rf"v_(pk_)?fma(c|_mix)?_{kind}", result["amdgcn"]), dtypes


def uses_nothing_but_registers(result, most):
    usage = result["usage"]
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in usage
    assert ".local" not in result["ptx"]
    assert int(re.search(r"Used (\d+) registers", usage)[1]) <= most


@pytest.mark.parametrize(("pair", "dtypes"), CASES, ids=PAIR_IDS)
def test_rows_move_16_bytes_at_a_time(pair, dtypes, rows):
    """A step is 8 elements a thread: of a gradient (the first, and another), of a sum, of the table."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    table, gradient = dtypes[1].itemsize, dtypes[0].itemsize
    sums = 8 if table == 8 else 4
    runs = rows[("rows", *names, "add_runs")]
    found = accesses(runs["ptx"])
    wide = "v2.b64" if table == 8 else "v4.b32"
    assert found["ld", wide] == (2 * gradient + table) * 8 // 16
    assert found["st", wide] == (sums + table) * 8 // 16
    uses_nothing_but_registers(runs, 64)
    uses_nothing_but_registers(rows[("rows", *names, "add_long_rows")], 64)


@pytest.mark.parametrize(("pair", "dtypes"), CASES, ids=PAIR_IDS)
def test_rows_are_added_by_one_fma_after_a_correct_division(pair, dtypes, rows):
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    kind = "f64" if dtypes[1].itemsize == 8 else "f32"
    for kernel in ("add_runs", "add_long_rows"):
        ptx = rows[("rows", *names, kernel)]["ptx"]
        assert re.search(rf"\bfma\.rn\.{kind}\b", ptx)
        assert re.search(rf"\bdiv\.rn\.{kind}\b", ptx)
        assert not re.search(r"\bdiv\.(full|approx)", ptx)
        assert ".ftz" not in ptx


# Programs of four warps with 128 registers a thread: four on a multiprocessor; of eight warps with 80: three.
MOST_GROUPED_REGISTERS = {8: 128, 4: 80, 2: 128}


@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "on the device"])
@pytest.mark.parametrize(("pair", "dtypes"), CASES, ids=PAIR_IDS)
def test_groups_move_16_bytes_at_a_time_within_registers(pair, dtypes, on_device, grouped):
    """Sums, once each way, and operands, straight into shared memory; no atomics."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    result = grouped[("grouped", *names, on_device, "ieee")]
    rows, columns, _, warps = result["tile"]
    sixteen = "v2.b64" if dtypes[1].itemsize == 8 else "v4.b32"
    found = {access: count for access, count in accesses(result["ptx"]).items() if "v" in access[1]}
    steps = rows * columns * dtypes[1].itemsize // (16 * 32 * warps)
    assert found == {("ld", sixteen): steps, ("st", sixteen): steps}
    assert accesses(result["ptx"]).total() == 2 * steps + (4 if on_device else 2)
    copies = re.findall(r"\bcp\.async\.c[ag]\.shared\.global \[.*\], \[.*\], (\w+)", result["ptx"])
    # float64 is turned over on the way, element by element.
    assert set(copies) == ({"0x10", "0x8"} if dtypes[0].itemsize == 8 else {"0x10"})
    assert not re.search(r"\b(atom|red)\.", result["ptx"])
    uses_nothing_but_registers(result, MOST_GROUPED_REGISTERS[dtypes[0].itemsize])


def test_tensor_cores_multiply_groups(grouped):
    """All but float32, which is multiplied exactly unless torch is told otherwise."""
    for (_, operand, accumulator, _, precision), result in grouped.items():
        kinds = set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.(.*?) ", result["ptx"]))
        short = {"bfloat16": "bf16", "float16": "f16", "float32": "tf32", "float64": "f64"}[operand]
        if operand == "float32" and precision == "ieee":
            assert not kinds
            assert re.search(r"\bfma\.rn\.f32\b", result["ptx"])
        else:
            sums = "f64" if accumulator == "float64" else "f32"
            assert kinds, operand
            assert all(re.search(rf"\.{sums}\.{short}\.{short}\b", kind) for kind in kinds), kinds
        assert ("wgmma" in result["ptx"]) == (short != "f64" and bool(kinds))
