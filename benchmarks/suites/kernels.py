"""Every way to do `accumulator += scale * gradient`, by dtype pair and size: one tensor, lists, products.

Dtypes are gradient:accumulator. `fusedacc/commands/bench/comparison.py` checks, counts and times the cases,
as it does for `python -m fusedacc bench`, which has most of the providers. `copy` and `triad` measure the
peak bandwidth and always run. Consecutive calls use different sets of tensors, of at least 64 MiB in all, on
CUDA also four times the second-level cache. Cases called "the same" have one set for every call.

Code that does not pass torch's dispatcher gets the bytes of an ideal pass, and the note says so. `launches`
are the operators that move data.
"""

import dataclasses
import functools
import gc
import importlib.util
import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusedacc.commands.bench import cases as bench
from fusedacc.commands.bench import comparison
from fusedacc.commands.bench.cases import SCALE, STOCK, YARDSTICK, Additions, BenchVariant
from fusedacc.commands.bench.comparison import COPY, MEASURED, Effort
from fusedacc.commands.machine import available_memory
from fusedacc.commands.timing import Run
from fusedacc.functional import prepare
from fusedacc.kernels import registry
from fusedacc.kernels.dtypes import PAIRS

from .. import harness, records
from ..contestants.products import Operands, Products
from ..harness import Names, progress
from ..records import PEAK

BACKENDS = ("cpu", "cuda", "triton", "eager")
#: The providers of rows, by their names in `bench`.
NAMES = {
    COPY: PEAK[0],
    **{f"fusedacc {name}, prepared": f"fusedacc {name}" for name in BACKENDS},
    **{f"fusedacc {name}, fresh lists": f"fusedacc {name} fresh lists" for name in BACKENDS[:3]},
    "acc.add_(g, alpha=s)": "add_",
    "acc.add_(g.to(acc.dtype), alpha=s)": "cast and add_",
    **{f"acc += g.to({dtype}) * s": "by hand" for dtype in ("float32", "float64")},
    "torch._foreach_add_(accs, gs, alpha=s)": "torch._foreach_add_",
    "torch._foreach_copy_ to casts, _foreach_add_": "foreach cast and add",
    "autograd into .grad": "autograd grad_dtype",
    "torch.compile of _foreach_add_": "compiled foreach",
    **{f"fusedacc {name}, into the sum": f"fusedacc {name} into the sum" for name in BACKENDS},
    "torch.addmm(out_dtype=acc.dtype, out=acc)": "addmm out_dtype",
    "acc.addmm_(dy.t(), x)": "addmm_",
    "acc.add_(dy.t() @ x)": "product then add_",
    "acc.add_((dy.t() @ x).to(acc.dtype))": "product then cast and add_",
}
#: The modules of other packages, and how to name these.
MODULES = {
    "apex axpby": ("amp_C", "Apex"),
    "apex wgrad_gemm_accum": ("fused_weight_gradient_mlp_cuda", "Apex with --wgrad"),
    "TransformerEngine gemm": ("transformer_engine", "TransformerEngine"),
}
OWN = ("add_ same dtype", "product then fusedacc", *MODULES)
PROVIDERS = tuple(dict.fromkeys((*PEAK, *NAMES.values(), *OWN)))


def triad(elements: int, device: torch.device) -> Run:
    """Return `a += s * b` in place on float32 tensors: three operands of so many elements."""
    a, b = (torch.full((elements,), value, device=device) for value in (1.0, 0.01))
    return lambda: torch.add(a, b, alpha=SCALE, out=a)


def variants(work: Additions | Products, names: Sequence[str]) -> list[BenchVariant]:
    """Return the named variants of a case, with the providers' names, and the triad."""
    backends = [name for name in BACKENDS if missing(name, work.device) is None]
    only_here = additions(work) if isinstance(work, Additions) else products(work)
    listed = [dataclasses.replace(v, name=NAMES[v.name]) for v in work.variants(backends) if v.name in NAMES]
    listed = [variant for variant in (*listed, *only_here) if variant.name in names]
    # As many bytes as an ideal pass, like the copy that `bench` adds.
    yardstick = functools.partial(triad, max(1, work.moved // 12), work.device)
    return [BenchVariant(PEAK[1], YARDSTICK, lambda tensors: yardstick()), *listed]


def missing(name: str, device: torch.device) -> str | None:
    """Return why a backend of ours, or a package, cannot run on this device."""
    if name in BACKENDS:
        return registry.obstacle(name, device, torch.float32, torch.float32)
    if name.startswith("fusedacc "):
        return missing(name.split()[1], device)
    if name not in MODULES:
        return None
    module, package = MODULES[name]
    if importlib.util.find_spec(module) is None:
        return f"{package} is not installed"
    return None if device.type == "cuda" else f"{package} has CUDA kernels only"


def additions(work: Additions) -> list[BenchVariant]:
    """Return the additions that `bench` does not have."""
    same = "the dtypes are equal: nothing to cast" if work.gradient == work.accumulator else None
    apex = BenchVariant("apex axpby", STOCK, _apex_axpby, SCALE)
    able = [apex] if missing(apex.name, work.device) is None else []
    return [BenchVariant("add_ same dtype", YARDSTICK, _same_dtype, obstacle=same), *able]


def _same_dtype(tensors: bench.Lists) -> Run:
    others = [torch.full_like(accumulator, 0.01) for accumulator in tensors[0]]
    add = bench.pair_by_pair(lambda accumulator, other: accumulator.add_(other, alpha=SCALE))
    return lambda: add(tensors[0], others)


def _apex_axpby(tensors: bench.Lists) -> Run:
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    accumulators, gradients = tensors
    # The kernel writes 1 into `overflow` for a gradient (argument 1) that is not finite.
    overflow = torch.zeros(1, dtype=torch.int32, device=accumulators[0].device)
    lists = [list(accumulators), list(gradients), list(accumulators)]
    return lambda: multi_tensor_applier(amp_C.multi_tensor_axpby, overflow, lists, 1.0, SCALE, 1)


def products(work: Products) -> list[BenchVariant]:
    """Return ours in two steps, and those of other packages."""
    others = {"apex wgrad_gemm_accum": _apex_product, "TransformerEngine gemm": _transformer_engine}
    able = {name: make for name, make in others.items() if missing(name, work.device) is None}
    return [
        BenchVariant("product then fusedacc", bench.OURS, _product_then_plan),
        *(BenchVariant(name, STOCK, bench.calling(make())) for name, make in able.items()),
    ]


def _product_then_plan(operands: Operands) -> Run:
    accumulator, dy, x = operands
    add = prepare([accumulator])
    return lambda: add([dy.t() @ x])


def _apex_product() -> Any:
    from fused_weight_gradient_mlp_cuda import wgrad_gemm_accum_fp32

    return lambda accumulator, dy, x: wgrad_gemm_accum_fp32(x, dy, accumulator)


def _transformer_engine() -> Any:
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    how: dict[str, Any] = {"layout": "NT", "grad": True, "accumulate": True}
    if "workspace" in inspect.signature(general_gemm).parameters:
        from transformer_engine.pytorch.module.base import get_workspace

        how["workspace"] = get_workspace()
    return lambda accumulator, dy, x: general_gemm(x, dy, out=accumulator, out_dtype=accumulator.dtype, **how)


DTYPES = {f"{str(g)[6:]}:{str(a)[6:]}": (g, a) for g, a in sorted(PAIRS, key=str)}
MAIN_DTYPES = ("bfloat16:float32", "float32:float32")
PRODUCT_DTYPES = (*MAIN_DTYPES, "float16:float32")
_SINGLE = ("1Ki", "16Ki", "64Ki", "256Ki", "1Mi", "4Mi", "16Mi", "64Mi", "256Mi", "1Gi")
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_MIXED: bench.Shapes = ((1,), (3,), (64,), (1000,), (768,), (64, 3, 7, 7), (512, 512), (512, 1000))
LISTS: dict[str, bench.Shapes] = {
    **{name: ((int(name[:-2]) * _UNITS[name[-2:]],),) for name in _SINGLE},
    "1000x1000": ((1000,),) * 1000,
    "300x4": ((4,),) * 300,
    "300x(16x16)": ((16, 16),) * 300,
    "16x1Mi": ((2**20,),) * 16,
    "mixed": (*_MIXED,) * 8,
}
#: One set for every call: torch's records of the tensors stay in the caches.
_SAME = ("1000x1000 same", "300x4 same")
LISTS |= {name: LISTS[name.removesuffix(" same")] for name in _SAME}
#: The tokens, outputs and inputs of the layer.
_PRODUCTS = ((16, 32, 32), (512, 1024, 1024), (512, 4096, 1024), (2048, 4096, 4096))
PRODUCTS = {"product {}:{}x{}".format(*sizes): sizes for sizes in _PRODUCTS}
SIZES = (*LISTS, *PRODUCTS)
SWEEPS = {
    "quick": ("1Ki", "300x4", "product 16:32x32"),
    "short": ("1Ki", "64Ki", "1Mi", "64Mi", *list(LISTS)[len(_SINGLE) :], "product 512:1024x1024"),
    "full": (*LISTS, *list(PRODUCTS)[1:]),
}
#: The sizes of other dtypes than the main ones on CUDA, so that a full sweep ends in minutes.
OTHER_DTYPES_ON_CUDA = ("1Ki", "1Mi", "64Mi", "1000x1000", "mixed")
#: Fewer rounds than `bench`, because a sweep has many more cases.
EFFORTS = {
    "quick": Effort(
        "quick", seconds=0.0, least_rounds=3, most_rounds=3, most_sets=4, sample_seconds=0.0, cold_bytes=2**16
    ),
    "short": Effort("short", seconds=1.0, least_rounds=7, most_rounds=15, most_sets=512),
    "full": Effort("full", seconds=2.0, least_rounds=5, most_rounds=31, most_sets=512),
}
#: Longer lists take too long to compile.
MOST_COMPILED = 100
#: The share of the free memory that a case may take.
SHARE = 0.8

_FOREACH = "torch._foreach_add_"
#: Goals of a prepared plan. With new lists it may not be slower than foreach.
_PLAN_GOALS = {
    ("1000x1000 same", "bfloat16:float32"): 4.0,
    ("1000x1000 same", "float32:float32"): 1.5,
    ("300x4 same", "bfloat16:float32"): 1.0,
    ("300x4 same", "float32:float32"): 1.0,
    **{(size, dtypes): 0.0 for size in ("1000x1000", "300x4") for dtypes in MAIN_DTYPES},
}
#: By size, dtypes and provider.
GOALS: dict[tuple[str, str, str], tuple[records.Goal, ...]] = {
    ("64Mi", "float32:float32", "fusedacc cpu"): (records.Goal("add_"),),
    ("64Mi", "bfloat16:float32", "fusedacc cpu"): (
        records.Goal("add_ same dtype", 0.9, by_bandwidth=True),
        records.Goal("add_", 5.0),
    ),
    **{(*case, "fusedacc cpu"): (records.Goal(_FOREACH, goal),) for case, goal in _PLAN_GOALS.items()},
    **{(*case, "fusedacc cpu fresh lists"): (records.Goal(_FOREACH, 1.0),) for case in _PLAN_GOALS},
    **{
        ("1Gi", dtypes, f"fusedacc {backend}"): (records.Goal(PEAK[0], 0.92, by_bandwidth=True),)
        for dtypes in MAIN_DTYPES
        for backend in ("cuda", "triton")
    },
}


def work_of(size: str, dtypes: str, device: torch.device, effort: str) -> Additions | Products:
    """Return the work of a case. A quick run compiles only one case."""
    if size in PRODUCTS:
        return Products(*PRODUCTS[size], DTYPES[dtypes], device)
    compiled = dtypes in MAIN_DTYPES and len(LISTS[size]) <= MOST_COMPILED
    if effort == "quick":
        compiled = (size, dtypes) == ("1Ki", MAIN_DTYPES[0])
    return Additions(size, LISTS[size], DTYPES[dtypes], device, warm=size in _SAME, compiled=compiled)


def case_of(size: str, dtypes: str, work: bench.Work, sets: int) -> records.Case:
    rotated = f"{sets} sets in turn, {sets * work.set_bytes / 2**20:.3g} MiB"
    rotated = "the same on every call" if sets == 1 else rotated
    if size in PRODUCTS:
        tokens, outputs, inputs = PRODUCTS[size]
        name = f"product of {tokens} tokens, weight {outputs} x {inputs}"
        shapes = f"dy {tokens} x {outputs}, x {tokens} x {inputs}"
    else:
        listed = LISTS[size]
        sizes = sorted(map(math.prod, listed))
        shape = " x ".join(map(str, listed[0]))
        elements = records.count(sizes[0])
        if len(listed) == 1:
            name = f"{elements} elements in one tensor"
            shapes = f"1 tensor of {sizes[0]}"
        elif len(set(listed)) == 1:
            same = ", the same" if size in _SAME else ""
            name = f"{len(listed)} tensors of {shape if len(shape) < 8 else elements}{same}"
            shapes = f"{len(listed)} tensors of {shape}"
        else:
            name = f"{len(sizes)} tensors of mixed sizes"
            shapes = f"{len(sizes)} tensors of {sizes[0]} to {sizes[-1]}, {sum(sizes)} elements"
    mode = "product" if size in PRODUCTS else "accumulate"
    shapes = f"{shapes}; {rotated}" if sets else shapes
    return records.Case("kernels", name, mode, shapes, dtypes.replace(":", " into "))


def measure(work: Additions | Products, names: Sequence[str], effort: Effort) -> dict[str, Any]:
    """Return the facts of a case (`comparison.measure`), with the providers' names."""
    # On a CPU a large last-level cache may hold the sets.
    effort = dataclasses.replace(effort, most_times_cold=16 if work.device.type == "cuda" else 1)
    most = int(SHARE * available_memory(work.device))
    facts = comparison.measure(work, variants(work, names), effort, most)
    for entry in facts["ways"]:
        entry["name"] = NAMES[COPY] if entry["name"] == COPY else entry["name"]
        # Code that passes no dispatcher is taken to move what an ideal pass does.
        if entry["status"] == MEASURED and not entry["bytes"]:
            entry["bytes"] = work.moved
            entry["note"] = "bytes by formula"
    return facts


def rows(
    case: records.Case, facts: dict[str, Any], goals: Mapping[str, Sequence[records.Goal]]
) -> list[records.Row]:
    """Return the rows of a case. `goals`: by provider; goals against what did not run are dropped."""
    if facts["why"] is not None:
        return [records.cannot_run(case, "all", facts["why"])]
    able = {entry["name"]: entry for entry in facts["ways"] if entry["status"] == MEASURED}
    timed = []
    for name in (*PEAK, *(name for name in able if name not in PEAK)):
        entry = able[name]
        host = None if entry["host_seconds"] is None else 1e6 * entry["host_seconds"]
        held_to = tuple(goal for goal in goals.get(name, ()) if goal.against in able)
        about = {"launches": entry["calls"], "host_us": host, "note": entry["note"] or ""}
        timed.append(records.Variant(name, bytes=entry["bytes"], goals=held_to, **about))
    found = records.rows_of(case, timed, {name: entry["samples"] for name, entry in able.items()})
    others = [entry for entry in facts["ways"] if entry["status"] != MEASURED]
    return found + [records.cannot_run(case, entry["name"], entry["why"]) for entry in others]


def figures(
    results: records.Results,
    effort: str,
    *,
    providers: Names = None,
    dtypes: Names = None,
    sizes: Names = None,
) -> None:
    """Measure the sweep of that effort, or the given dtypes and sizes."""
    providers = providers or PROVIDERS
    on_gpu = results.device.type == "cuda"
    # The goal for a GPU has a size for which a CPU's short sweep has no time.
    sizes = sizes or (*SWEEPS[effort], *(["1Gi"] if on_gpu and effort == "short" else []))
    pairs = dtypes or (tuple(DTYPES) if effort == "full" else MAIN_DTYPES)
    left_out = set(LISTS) - set(OTHER_DTYPES_ON_CUDA) if on_gpu and dtypes is None else ()
    why = {name: missing(name, results.device) for name in providers}
    here = records.Case("kernels", "cannot run here")
    results.add([records.cannot_run(here, name, reason) for name, reason in why.items() if reason])
    cells = [
        (size, pair)
        for size, pair in itertools.product(sizes, pairs)
        if (size not in left_out or pair in MAIN_DTYPES) and (size in LISTS or pair in PRODUCT_DTYPES)
    ]
    for size, pair in progress(cells, "kernels", "case"):
        work = work_of(size, pair, results.device, effort)
        facts = measure(work, providers, EFFORTS[effort])
        goals = {
            name: of_provider
            for (of, dtypes_of, name), of_provider in GOALS.items()
            if (of, dtypes_of) == (size, pair)
        }
        results.add(rows(case_of(size, pair, work, facts["sets"]), facts, goals))
        torch._dynamo.reset()  # otherwise the next case counts as a recompilation
        gc.collect()


def main() -> None:
    names = {"providers": PROVIDERS, "dtypes": tuple(DTYPES), "sizes": SIZES}
    options, chosen_names = harness.parsed(harness.arguments(__doc__), **names)
    harness.run(figures, options, **chosen_names)


if __name__ == "__main__":
    main()
