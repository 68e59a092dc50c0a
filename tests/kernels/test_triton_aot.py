"""The Triton kernels compiled ahead of time, with no GPU: for sm_90 (vector accesses, registers, spills), and
for AMD's gfx942.

The compiler runs in a process of its own, because this one may have Triton interpreted.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sweeps
from build_cache import cached, contents
from cases import PAIR_IDS, PAIRS

import fusedacc

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

ROOT = Path(fusedacc.__file__).parents[1]
NAMES = [(str(gradient)[6:], str(accumulator)[6:]) for gradient, accumulator in PAIRS]
NOISY_GRADIENTS = ("bfloat16", "float32")
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# A Hopper SM has 65,536 registers: at 64 per thread, eight blocks of 128 fit.
MOST_REGISTERS = 64
# By bytes of an operand. Of programs of four warps with 128 registers a thread, four fit; of eight warps with
# 80 registers, three.
MOST_GROUPED_REGISTERS = {8: 128, 4: 80, 2: 128}

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
from fusedacc.kernels.triton.kernels import add_long_rows, add_runs

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
    if target == "gfx942":
        # As launches on ROCm have it: no number of registers.
        hip = {"num_warps": options["num_warps"]}
        kernel = triton.compile(source, target=GPUTarget("hip", target, 64), options=hip)
        return {"amdgcn": kernel.asm["amdgcn"], "shared": kernel.metadata.shared}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(kernel.asm["ptx"])
        ptx.flush()
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", ptx.name, "-o", "/dev/null"]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {"ptx": kernel.asm["ptx"], "shared": kernel.metadata.shared, "usage": usage}

results = []
for target, name, *arguments in json.loads(sys.argv[1]):
    results.append(globals()[name](*arguments))
with open(sys.argv[2], "w") as file:
    json.dump(results, file)
"""

BOTH = ("add_runs", "add_long_rows")
#: What is compiled: the target, a function of the program, and its arguments.
WANTED = [
    *(("sm_90", "accumulation", *pair) for pair in NAMES),
    *(("sm_90", "rows", *pair, kernel) for pair in NAMES for kernel in BOTH),
    *(("sm_90", "grouped", *pair, on_device, "ieee") for pair in NAMES for on_device in (False, True)),
    ("sm_90", "grouped", "float32", "float32", False, "tf32"),
    *(("sm_90", "norm", dtype, kind) for dtype in NORM_DTYPES for kind in ("2", "inf")),
    *(("sm_90", "end", dtype, kind) for dtype in ("float32", "float64") for kind in ("2", "inf")),
    *(("sm_90", "join", kind) for kind in ("2", "inf")),
]
#: The same with stochastic rounding into bfloat16.
NOISY = [
    *(("sm_90", "accumulation", dtype, "bfloat16", True) for dtype in NOISY_GRADIENTS),
    *(
        ("sm_90", "rows", dtype, "bfloat16", kernel, True, eights)
        for dtype in NOISY_GRADIENTS
        for kernel in BOTH
        for eights in (False, True)
    ),
    *(("sm_90", "grouped", dtype, "bfloat16", False, "ieee", True, True) for dtype in NOISY_GRADIENTS),
]
AMD_NAMES = NAMES if sweeps.FULL else [("bfloat16", "float32"), ("float64", "float64")]
#: For MI300, where `auto` takes Triton under ROCm; none of it has run there.
AMD = [
    *(("gfx942", "accumulation", *pair) for pair in AMD_NAMES),
    ("gfx942", "accumulation", "float32", "bfloat16", True),
    *(("gfx942", "rows", *pair, kernel) for pair in AMD_NAMES for kernel in BOTH),
    *(("gfx942", "grouped", *pair, False, "ieee") for pair in AMD_NAMES),
    *(("gfx942", "norm", dtype, "2") for dtype in (NORM_DTYPES if sweeps.FULL else ("float32", "float64"))),
    *(("gfx942", *what) for what in (("norm", "float32", "inf"), ("end", "float32", "2"))),
    *(("gfx942", *what) for what in (("end", "float64", "inf"), ("join", "2"))),
]


@functools.cache
def compiled() -> dict[tuple, dict]:
    """Compile all that is wanted, once for all runs of the tests."""
    wanted = WANTED + NOISY + AMD
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    def compile_in(folder: Path) -> None:
        command = [sys.executable, "-c", COMPILE, json.dumps(wanted), str(folder / "compiled.json")]
        done = subprocess.run(
            command, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    triton = importlib.metadata.version("triton")
    made_from = [COMPILE, json.dumps(wanted), triton, *contents(ROOT / "fusedacc" / "kernels")]
    results = json.loads((cached("triton", made_from, compile_in) / "compiled.json").read_text())
    return dict(zip(wanted, results, strict=True))


def for_sm_90(*what: object) -> dict:
    return compiled()[("sm_90", *what)]


def accesses(ptx):
    """How often each kind of access to global memory stands in the code: {("ld", "v4.b32"): 2, ...}."""
    return Counter(re.findall(r"\b(ld|st)\.global\.(v\d\.b\d+|b\d+)", ptx))


def wide_accesses(ptx):
    return {access: count for access, count in accesses(ptx).items() if "v" in access[1]}


def registers_of(result):
    """How many registers a kernel uses that spills none and has no local memory."""
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in result["usage"]
    assert ".local" not in result["ptx"]
    return int(re.search(r"Used (\d+) registers", result["usage"])[1])


@pytest.mark.parametrize("pair", NAMES, ids=PAIR_IDS)
def test_a_step_is_16_bytes_of_the_wider_side(pair):
    """One access of each side, so that neighbouring threads' writes leave no gaps between them."""
    result = for_sm_90("accumulation", *pair)
    widest = max(BYTES[dtype] for dtype in pair)
    sixteen = "v2.b64" if widest == 8 else "v4.b32"
    kinds = ["v2.b32" if BYTES[dtype] < widest else sixteen for dtype in pair]
    order = re.findall(r"\b(ld|st)\.global\.(v\d\.b\d+)", result["ptx"])
    assert {kind for access, kind in order if access == "st"} == {kinds[1]}
    assert {kind for access, kind in order if access == "ld"} == set(kinds)
    # Four steps' loads before the first is stored, and then loops of single steps.
    assert Counter(order[:8]) == Counter({("ld", kinds[0]): 4}) + Counter({("ld", kinds[1]): 4})
    assert order[8:12] == [("st", kinds[1])] * 4
    assert result["shared"] == 0
    assert ".shared" not in result["ptx"]
    assert registers_of(result) <= MOST_REGISTERS


@pytest.mark.parametrize("pair", NAMES, ids=PAIR_IDS)
def test_arithmetic_is_one_fma_rounded_to_nearest(pair):
    ptx = for_sm_90("accumulation", *pair)["ptx"]
    kind = "f64" if pair[1] == "float64" else "f32"
    assert re.search(rf"\bfma\.rn\.{kind}\b", ptx)
    assert not re.search(r"\badd(\.\w+)?\.f(32|64)\b", ptx)
    assert ".ftz" not in ptx
    conversions = set(re.findall(r"\bcvt\.(\w+)\.b?f16(?:x2)?\.f32\b", ptx))
    assert conversions == ({"rn"} if BYTES[pair[1]] == 2 else set())


@pytest.mark.parametrize("gradient", NOISY_GRADIENTS)
def test_noise_costs_no_access_no_spill_no_exchange(gradient):
    """Eight elements a thread, whose bits it makes by itself: loads of four steps, stores, loops of one."""
    loads = 2 if gradient == "float32" else 1
    result = for_sm_90("accumulation", gradient, "bfloat16", True)
    found = re.findall(r"\b(ld|st)\.global\.v4\.b32", result["ptx"])
    assert found == ["ld"] * 4 * (loads + 1) + ["st"] * 4 + ["ld"] * (loads + 1) + ["st"]
    assert result["shared"] == 0
    for what in NOISY:
        if what[2] == gradient:
            result = compiled()[what]
            most = MOST_GROUPED_REGISTERS[BYTES[gradient]] if what[1] == "grouped" else MOST_REGISTERS
            assert registers_of(result) <= most
            assert ".rn.bf16" not in result["ptx"]


@pytest.mark.parametrize("kind", ["2", "inf"])
@pytest.mark.parametrize("dtype", NORM_DTYPES)
def test_norms_read_16_bytes_at_a_time(dtype, kind):
    """The main loop's loads, and as many for each of the two loops of the second, rare pass."""
    result = for_sm_90("norm", dtype, kind)
    passes = 1 if kind == "inf" else 3
    wide = "v2.b64" if dtype == "float64" else "v4.b32"
    assert wide_accesses(result["ptx"]) == {("ld", wide): passes * NORM_DTYPES[dtype]}
    registers_of(result)


@pytest.mark.parametrize("kind", ["2", "inf"])
def test_partial_norms_are_joined_16_bytes_at_a_time(kind):
    result = for_sm_90("join", kind)
    assert accesses(result["ptx"])["ld", "v2.b64"] == 4 * (1 if kind == "inf" else 3)
    for each in (result, *(for_sm_90("end", dtype, kind) for dtype in ("float32", "float64"))):
        registers_of(each)


def test_kernels_compile_for_amd():
    for what in AMD:
        code = compiled()[what]["amdgcn"]
        assert "gfx942" in code
        if what[1] == "accumulation":
            kind = "f64" if what[3] == "float64" else "f32"
            # v_fma_mix_f32 takes float16 as it is.
            assert re.search(rf"v_(pk_)?fma(c|_mix)?_{kind}", code), what


@pytest.mark.parametrize("pair", NAMES, ids=PAIR_IDS)
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
@pytest.mark.parametrize("pair", NAMES, ids=PAIR_IDS)
def test_groups_move_16_bytes_at_a_time_within_registers(pair, on_device):
    """Sums, once each way, and operands, straight into shared memory; no atomics."""
    result = for_sm_90("grouped", *pair, on_device, "ieee")
    operand, total = (BYTES[dtype] for dtype in pair)
    rows, columns, _, warps = result["tile"]
    sixteen = "v2.b64" if total == 8 else "v4.b32"
    steps = rows * columns * total // (16 * 32 * warps)
    assert wide_accesses(result["ptx"]) == {("ld", sixteen): steps, ("st", sixteen): steps}
    assert accesses(result["ptx"]).total() == 2 * steps + (4 if on_device else 2)
    copies = re.findall(r"\bcp\.async\.c[ag]\.shared\.global \[.*\], \[.*\], (\w+)", result["ptx"])
    # float64 is turned over on the way, element by element.
    assert set(copies) == ({"0x10", "0x8"} if operand == 8 else {"0x10"})
    assert not re.search(r"\b(atom|red)\.", result["ptx"])
    assert registers_of(result) <= MOST_GROUPED_REGISTERS[operand]


@pytest.mark.parametrize("what", [what[2:] for what in WANTED if what[1] == "grouped"], ids=str)
def test_tensor_cores_multiply_groups(what):
    """All but float32, which is multiplied exactly unless torch is told otherwise."""
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
