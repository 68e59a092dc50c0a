"""Ways to do `accumulator += scale * gradient`: those of `bench`, and those of other packages."""

import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from fusedacc.commands.bench.comparison import COPY
from fusedacc.commands.bench.layers import Products, Three
from fusedacc.commands.bench.lists import SCALE, Additions, Lists
from fusedacc.commands.bench.work import OURS, STOCK, YARDSTICK, BenchVariant, calling
from fusedacc.commands.measuring.records import PEAK
from fusedacc.commands.measuring.timing import Run
from fusedacc.functional import prepare
from fusedacc.kernels import registry

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
    own = additions(work) if isinstance(work, Additions) else products(work)
    listed = [dataclasses.replace(v, name=NAMES[v.name]) for v in work.variants(backends) if v.name in NAMES]
    listed = [each for each in (*listed, *own) if each.name in names]
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
    apex = missing("apex axpby", work.device)
    return [
        BenchVariant("add_ same dtype", YARDSTICK, _same_dtype, obstacle=same),
        *([] if apex else [BenchVariant("apex axpby", STOCK, _apex_axpby, SCALE)]),
    ]


def _same_dtype(tensors: Lists) -> Run:
    others = [torch.full_like(accumulator, 0.01) for accumulator in tensors[0]]

    def run() -> None:
        for accumulator, other in zip(tensors[0], others, strict=True):
            accumulator.add_(other, alpha=SCALE)

    return run


def _apex_axpby(tensors: Lists) -> Run:
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
        BenchVariant("product then fusedacc", OURS, _product_then_plan),
        *(BenchVariant(name, STOCK, calling(make())) for name, make in able.items()),
    ]


def _product_then_plan(operands: Three) -> Run:
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
