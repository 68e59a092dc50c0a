"""Ways to do `accumulator += scale * gradient` over lists of tensors: ours, torch's and other packages'.

A new competitor is one `Provider` in the registry `ACCUMULATE`. `products.py` has those that compute the
gradient too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fusedacc.commands.bench.work import grad_dtype_obstacle, parameter_with
from fusedacc.functional import prepare, scale_accumulate_
from fusedacc.kernels import registry
from fusedacc.kernels.dtypes import computation_dtype

from ..harness import measure
from ..harness.results import first_line

Make = Callable[[Sequence[Tensor], Sequence, float], Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class Provider:
    """One way to accumulate.

    `make(accumulators, gradients, scale)` returns a function without arguments that accumulates once; it may
    allocate and compile, and so may that function's first call.
    `moved(accumulators, gradients)`: bytes of one call by hand, each operand of each operator once.
    `unavailable(device)` and `unsupported(accumulators, gradients)`: why it cannot run, or None.
    `kept` and `temporary` (of the itemsizes of accumulator and gradient): bytes per element held between
    calls, and during one. `counted`: its operators pass torch's dispatcher, and no others do, so that
    `fusedacc.traffic.TrafficMeter` tells what it moves. `compiled`: by torch.compile, slow to start.
    """

    name: str
    description: str
    make: Make | None = None
    moved: Callable[[Sequence[Tensor], Sequence], int] = lambda accumulators, gradients: 0
    unavailable: Callable[[torch.device], str | None] = lambda device: None
    unsupported: Callable[[Sequence[Tensor], Sequence], str | None] = lambda accumulators, gradients: None
    kept: Callable[[int, int], int] = lambda accumulator, gradient: 0
    temporary: Callable[[int, int], int] = lambda accumulator, gradient: 0
    counted: bool = True
    compiled: bool = False
    note: str = ""


def per_element(
    formula: Callable[[int, int, int], int],
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], int]:
    """Bytes of a list from bytes per element, by the itemsizes of accumulator, gradient and computation."""

    def moved(accumulators: Sequence[Tensor], gradients: Sequence[Tensor]) -> int:
        return sum(
            acc.numel() * formula(acc.itemsize, gradient.itemsize, computation_dtype(acc.dtype).itemsize)
            for acc, gradient in zip(accumulators, gradients, strict=True)
        )

    return moved


fused = per_element(lambda a, g, c: g + 2 * a)

# Lists beside the accumulators, of their shapes and dtypes, which all providers of one set of tensors share.
_scratch: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def scratch(accumulators: Sequence[Tensor], name: str) -> list[Tensor]:
    """The list of that name, made of tensors like the accumulators on the first call."""
    lists = _scratch.setdefault(accumulators[0], {})
    if name not in lists:
        lists[name] = [torch.full_like(accumulator, 0.01) for accumulator in accumulators]
    return lists[name]


def flat(accumulators: Sequence[Tensor], name: str) -> Tensor:
    """One tensor of as many elements as the whole list."""
    if len(accumulators) == 1:
        return (accumulators if name == "sum" else scratch(accumulators, name))[0].view(-1)
    lists = _scratch.setdefault(accumulators[0], {})
    if ("flat", name) not in lists:
        elements = sum(accumulator.numel() for accumulator in accumulators)
        lists["flat", name] = accumulators[0].new_full((elements,), 0.01)
    return lists["flat", name]


def copy(accumulators: Sequence[Tensor], gradients: Sequence, scale: float) -> Callable[[], object]:
    return functools.partial(flat(accumulators, "out").copy_, flat(accumulators, "sum"))


def triad(accumulators: Sequence[Tensor], gradients: Sequence, scale: float) -> Callable[[], object]:
    a, b = flat(accumulators, "sum"), flat(accumulators, "other")
    return lambda: torch.add(a, b, alpha=scale, out=a)


def times_accumulators(factor: int) -> Callable[[Sequence[Tensor], Sequence], int]:
    return lambda accumulators, gradients: factor * sum(accumulator.nbytes for accumulator in accumulators)


# Ours


def plan(backend: str) -> Make:
    def make(accumulators: Sequence[Tensor], gradients: Sequence[Tensor], scale: float):
        return functools.partial(prepare(accumulators, backend=backend), gradients, scale)

    return make


def fresh_lists(backend: str) -> Make:
    def make(accumulators: Sequence[Tensor], gradients: Sequence[Tensor], scale: float):
        return lambda: scale_accumulate_(list(accumulators), list(gradients), scale, backend=backend)

    return make


def ours(backend: str) -> Iterable[Provider]:
    def unavailable(device: torch.device) -> str | None:
        return registry.obstacle(backend, device, torch.float32, torch.float32)

    def unsupported(accumulators: Sequence[Tensor], gradients: Sequence[Tensor]) -> str | None:
        kinds = {(a.device, a.dtype, g.dtype) for a, g in zip(accumulators, gradients, strict=True)}
        return next(filter(None, (registry.obstacle(backend, *kind) for kind in kinds)), None)

    # A 16-bit sum is widened, added to and narrowed again by plain torch.
    eager = per_element(lambda a, g, c: g + 2 * a + (4 * c if a < c else 0))
    columns = {
        "moved": eager if backend == "eager" else fused,
        "unavailable": unavailable,
        "unsupported": unsupported,
        "temporary": (lambda a, g: 8 if backend == "eager" else 0),
        # A launch of Triton is no operator, and an eager plan's checks are: on addresses, in small tensors.
        "counted": backend not in ("triton", "eager"),
    }
    name = f"fusedacc {backend}"
    yield Provider(name, f"a prepared plan of the {backend} backend", plan(backend), **columns)
    if backend != "eager":
        description = f"scale_accumulate_ with new lists on every call, {backend} backend"
        yield Provider(f"{name} fresh lists", description, fresh_lists(backend), **columns)


# torch's


def loop(step: Callable[[Tensor, Tensor, float], object]) -> Make:
    """A step per tensor."""

    def make(accumulators: Sequence[Tensor], gradients: Sequence[Tensor], scale: float):
        def run() -> None:
            for accumulator, gradient in zip(accumulators, gradients, strict=True):
                step(accumulator, gradient, scale)

        return run

    return make


def by_hand(accumulator: Tensor, gradient: Tensor, scale: float) -> None:
    accumulator += gradient.to(computation_dtype(accumulator.dtype)) * scale


def same_dtype(accumulators: Sequence[Tensor], gradients: Sequence[Tensor], scale: float):
    return loop(lambda acc, other, s: acc.add_(other, alpha=s))(
        accumulators, scratch(accumulators, "other"), scale
    )


def foreach(accumulators: Sequence[Tensor], gradients: Sequence[Tensor], scale: float):
    return lambda: torch._foreach_add_(accumulators, gradients, alpha=scale)


def foreach_cast(accumulators: Sequence[Tensor], gradients: Sequence[Tensor], scale: float):
    copies = scratch(accumulators, "out")

    def run() -> None:
        torch._foreach_copy_(copies, gradients)
        torch._foreach_add_(accumulators, copies, alpha=scale)

    return run


def autograd(accumulators: Sequence[Tensor], gradients: Sequence[Tensor], scale: float):
    """Parameters in the gradients' dtype whose `.grad` is the accumulator, each a whole graph by itself."""
    scaled = [gradient * scale for gradient in gradients]
    # The parameters' values, which are never read, are the gradients.
    parameters = [parameter_with(g, a) for a, g in zip(accumulators, scaled, strict=True)]
    return lambda: torch.autograd.backward(parameters, scaled)


def foreach_add(accumulators: list[Tensor], gradients: list[Tensor], scale: float) -> None:
    torch._foreach_add_(accumulators, gradients, alpha=scale)


@functools.cache
def _compiled() -> Callable[[list[Tensor], list[Tensor], float], None]:
    return torch.compile(foreach_add, dynamic=False, fullgraph=True)


def compiled(accumulators: Sequence[Tensor], gradients: Sequence[Tensor], scale: float):
    return functools.partial(_compiled(), list(accumulators), list(gradients), scale)


def no_compiler(device: torch.device) -> str | None:
    if device.type == "cpu" and importlib.util.find_spec("torch._inductor") is not None:
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            return first_line(error)
    return None


def equal_dtypes(accumulators: Sequence[Tensor], gradients: Sequence[Tensor]) -> str | None:
    if all(a.dtype == g.dtype for a, g in zip(accumulators, gradients, strict=True)):
        return "the dtypes are equal: nothing to cast"
    return None


# Other packages'


def not_installed(module: str, package: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{package} is not installed"


def only(reason: str, module: str, package: str) -> Callable[[torch.device], str]:
    """Never available: not installed, or else for that reason."""
    return lambda device: not_installed(module, package) or reason


def needs_cuda(module: str, package: str) -> Callable[[torch.device], str | None]:
    def unavailable(device: torch.device) -> str | None:
        return not_installed(module, package) or (
            None if device.type == "cuda" else f"{package} has CUDA kernels only"
        )

    return unavailable


def apex_axpby(accumulators: Sequence[Tensor], gradients: Sequence[Tensor], scale: float):
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    # The kernel writes 1 into `overflow` for a gradient (argument 1) that is not finite.
    overflow = torch.zeros(1, dtype=torch.int32, device=accumulators[0].device)
    lists = [list(accumulators), list(gradients), list(accumulators)]
    return lambda: multi_tensor_applier(amp_C.multi_tensor_axpby, overflow, lists, 1.0, scale, 1)


COPY, TRIAD = measure.PEAK
PEAK = (
    Provider(COPY, "out.copy_(a), one tensor of as many elements", copy, times_accumulators(2)),
    Provider(TRIAD, "torch.add(a, b, alpha=s, out=a), likewise", triad, times_accumulators(3)),
)

_OPTIMI = "accumulates into the optimizer's state, so has no sum to compare: see benchmarks/suites/models.py"
_ENGINE = "adds only inside its weight-gradient product: see the product cases"

ACCUMULATE = {
    provider.name: provider
    for provider in (
        *PEAK,
        *(provider for backend in ("cpu", "cuda", "triton", "eager") for provider in ours(backend)),
        Provider("add_", "acc.add_(g, alpha=s), per tensor", loop(lambda a, g, s: a.add_(g, alpha=s)), fused),
        Provider(
            "add_ same dtype",
            "acc.add_(b, alpha=s) with b in the accumulator's dtype: another, larger gradient",
            same_dtype,
            per_element(lambda a, g, c: 3 * a),
            unsupported=equal_dtypes,
        ),
        Provider(
            "cast and add_",
            "acc.add_(g.to(acc.dtype), alpha=s), per tensor",
            loop(lambda a, g, s: a.add_(g.to(a.dtype), alpha=s)),
            per_element(lambda a, g, c: g + 4 * a),
            unsupported=equal_dtypes,
            temporary=lambda a, g: a,
        ),
        Provider(
            "by hand",
            "acc += g.float() * s, per tensor (in float64 for float64)",
            loop(by_hand),
            per_element(lambda a, g, c: (g + c if g < c else 0) + 2 * c + c + 2 * a),
            temporary=lambda a, g: 2 * max(4, a),
        ),
        Provider("torch._foreach_add_", "torch._foreach_add_(accs, gs, alpha=s)", foreach, fused),
        Provider(
            "foreach cast and add",
            "torch._foreach_copy_ into lists of the accumulators' dtype that are kept, then _foreach_add_",
            foreach_cast,
            per_element(lambda a, g, c: g + 4 * a),
            unsupported=equal_dtypes,
        ),
        Provider(
            "autograd grad_dtype",
            "autograd accumulates into .grad, parameter.grad_dtype being the accumulator's dtype",
            autograd,
            per_element(lambda a, g, c: 3 * a if a == g else g + 4 * a),
            unavailable=lambda device: grad_dtype_obstacle(),
            kept=lambda a, g: g,
            temporary=lambda a, g: a,
            note="gradients scaled before; a call of backward and one accumulation node per tensor included",
        ),
        Provider(
            "compiled foreach",
            "torch.compile of torch._foreach_add_ over the lists",
            compiled,
            fused,
            unavailable=no_compiler,
            counted=False,
            compiled=True,
        ),
        Provider(
            "apex axpby",
            "amp_C.multi_tensor_axpby by apex.multi_tensor_apply",
            apex_axpby,
            fused,
            unavailable=needs_cuda("amp_C", "Apex"),
            counted=False,
        ),
        Provider(
            "TransformerEngine",
            "its kernels for lists of tensors",
            unavailable=only(_ENGINE, "transformer_engine", "TransformerEngine"),
        ),
        Provider(
            "torch-optimi",
            "its optimizers' accumulation",
            unavailable=only(_OPTIMI, "optimi", "torch-optimi"),
        ),
        Provider(
            "bitsandbytes",
            "its optimizers with 8-bit state",
            unavailable=only("optimizers only, no accumulation kernel", "bitsandbytes", "bitsandbytes"),
        ),
    )
}
