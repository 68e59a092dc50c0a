"""The Triton kernel compiled ahead of time for sm_90, with no GPU: vector accesses, registers, spills.

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
# A Hopper SM has 65,536 registers for 2,048 threads: at 40 per thread, 12 of its 16 blocks of 128 fit.
MOST_REGISTERS = 40

NORM_DTYPES = {"float64": 4, "float32": 2, "bfloat16": 1, "float16": 1}

COMPILE = """
import json, subprocess, sys, tempfile
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fusedacc.backends.triton_kernels import WARPS, finish_norm, norm_partials, scale_accumulate

def wide(dtype):
    return tl.float64 if dtype == "float64" else tl.float32

def accumulation(gradient, accumulator):
    types = {"table": "*i64", "calls": "*i64", "scale": "*fp64", "keep": "*fp64", "count": "i32"}
    constants = {
        "accumulator_dtype": getattr(tl, accumulator),
        "gradient_dtype": getattr(tl, gradient),
        "wide": wide(accumulator),
    }
    return compiled(scale_accumulate, types, constants, 2)

def norm(dtype, infinity):
    types = {"table": "*i64", "partials": "*fp64", "count": "i32"}
    constants = {"dtype": getattr(tl, dtype), "wide": wide(dtype), "infinity": infinity == "inf"}
    return compiled(norm_partials, types, constants, 2)

def end(dtype, infinity):
    types = {"partials": "*fp64", "count": "i32", "norm": "*fp" + dtype[-2:], "found": "*fp32"}
    return compiled(finish_norm, types, {"infinity": infinity == "inf"}, 1)

def compiled(function, types, constants, aligned):
    source = ASTSource(
        function,
        {**types, **{name: "constexpr" for name in constants}},
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in range(aligned)},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(kernel.asm["ptx"])
        ptx.flush()
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", ptx.name, "-o", "/dev/null"]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {"ptx": kernel.asm["ptx"], "shared": kernel.metadata.shared, "usage": usage}

print(json.dumps([globals()[name](*names) for name, *names in json.loads(sys.argv[1])]))
"""


def compile_all(wanted):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join(
        filter(None, [str(Path(fusedacc.__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(wanted)],
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
def norms():
    wanted = [("norm", dtype, kind) for dtype in NORM_DTYPES for kind in ("2", "inf")]
    wanted += [("end", dtype, kind) for dtype in ("float32", "float64") for kind in ("2", "inf")]
    return dict(zip(wanted, compile_all(wanted), strict=True))


def accesses(ptx):
    """How often each kind of access to global memory stands in the code: {("ld", "v4.b32"): 2, ...}."""
    return Counter(re.findall(r"\b(ld|st)\.global\.(v\d\.b\d+|b\d+)", ptx))


@pytest.mark.parametrize(("pair", "dtypes"), CASES, ids=PAIR_IDS)
def test_every_main_access_is_16_bytes(pair, dtypes, compiled):
    """One step is 8 elements a thread, and each side moves them in as few 16-byte accesses as hold them."""
    gradient_bytes, accumulator_bytes = (dtype.itemsize for dtype in dtypes)
    wide = "v2.b64" if accumulator_bytes == 8 else "v4.b32"
    found = {kind: count for kind, count in accesses(compiled[pair]["ptx"]).items() if "v" in kind[1]}
    assert found == {
        ("ld", wide): (gradient_bytes + accumulator_bytes) * 8 // 16,
        ("st", wide): accumulator_bytes * 8 // 16,
    }


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
