"""The checks of a self-test: a backend's results against plain torch in float64, on the CPU.

Each check returns what is wrong, or None. Tensors lie in a larger memory, at aligned and other addresses, and
nothing around them may change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from . import reference
from .constants import NORM_KINDS
from .dtypes import Number, computation_dtype
from .registry import Backend
from .rounding import Noise, streams

#: Offsets of an accumulator and its gradient from a multiple of 16 bytes, in elements.
OFFSETS = ((0, 0), (1, 0), (0, 3), (5, 2))
#: Shapes with offsets: whole vectors of every width and remainders, several blocks, and several parts of a
#: norm. The last gradient is transposed in memory.
CASES: tuple[tuple[tuple[int, ...], tuple[int, int]], ...] = (
    *(((size,), offsets) for size in (1, 2, 7, 8, 63, 513) for offsets in OFFSETS),
    ((4097,), (1, 0)),
    ((9001,), (0, 0)),
    ((33, 65), (0, 0)),
)
#: Elements around each tensor that must not change.
MARGIN = 16
#: Exact in every dtype, so that they are not rounded.
SCALE = 0.375
BETA = 0.75
_SEED = 5


class Lists:
    """Accumulators and gradients: views of one memory each."""

    def __init__(self, *memories: Tensor) -> None:
        self.memories = memories
        self.accumulators: list[Tensor] = []
        self.gradients: list[Tensor] = []
        for first, second, shape in _places():
            size = math.prod(shape)
            self.accumulators.append(memories[0][first : first + size].view(shape))
            gradient = memories[1][second : second + size]
            self.gradients.append(gradient if len(shape) == 1 else gradient.view(shape[::-1]).t())

    def to(self, target: torch.device | torch.dtype) -> Lists:
        """Return a copy on another device, or in another dtype."""
        return Lists(*(memory.to(target, copy=True) for memory in self.memories))


def _places() -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield where each accumulator and its gradient begin in their memories, and their shape."""
    start = 0
    for shape, (first, second) in CASES:
        yield start + MARGIN + first, start + MARGIN + second, shape
        start += (math.prod(shape) + 3 * MARGIN) // MARGIN * MARGIN


def lists(gradient_dtype: torch.dtype, accumulator_dtype: torch.dtype) -> Lists:
    """Return random numbers, the same on every call, on the CPU."""
    first, _, shape = list(_places())[-1]
    make = _random()
    size = first + math.prod(shape) + MARGIN
    return Lists(*(make(size).to(dtype) for dtype in (accumulator_dtype, gradient_dtype)))


def _random() -> Callable[..., Tensor]:
    """Return a function from a shape to random numbers in float32."""
    generator = torch.Generator(device="cpu").manual_seed(_SEED)
    return functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")


def differences(result: Tensor, expected: Tensor, allowed: Tensor) -> str | None:
    """Return how many elements are off by more than is allowed, nan included; None if none is."""
    error = (result.detach().cpu().double() - expected).abs()
    bad = int((~(error <= allowed)).sum())
    return f"{bad} of {result.numel()} elements are wrong" if bad else None


def sums(
    backend: Backend, device: torch.device, gradient: torch.dtype, accumulator: torch.dtype
) -> str | None:
    """Check all that a backend does with gradients and accumulators of these dtypes."""
    checks: dict[str, Callable[..., str | None]] = {
        "addition": addition,
        "overwriting": _overwriting,
        "scale on the device": _device_scale,
        "prepared list": _prepared,
        "norm": _norm,
    }
    if accumulator == gradient == torch.bfloat16:
        checks["stochastic rounding"] = _stochastic
    if device.type == "cuda" and backend.name != "eager":
        checks["captured window"] = _captured
    for name, check in checks.items():
        made = lists(gradient, accumulator)
        problem = check(backend, made, made.to(device))
        if problem is not None:
            return f"{name}: {problem}"
    return None


def _wrong_sums(
    lists: Lists,
    there: Lists,
    scale: float = SCALE,
    beta: float | Sequence[float] = 1.0,
    roundings: int = 1,
) -> str | None:
    """Compare `there` with beta * accumulator + scale * gradient of `lists`. Also check the memory around."""
    wide = lists.to(torch.float64)
    allowed = Lists(*map(torch.zeros_like, wide.memories))
    own = lists.memories[0].dtype
    of_sum = torch.finfo(own)
    of_term = torch.finfo(computation_dtype(own))
    betas = [beta] * len(lists.accumulators) if isinstance(beta, float) else beta
    for total, term, most, own_beta in zip(
        wide.accumulators, wide.gradients, allowed.accumulators, betas, strict=True
    ):
        largest = torch.maximum((own_beta * total).abs(), (scale * term).abs())
        total.mul_(own_beta).add_(term, alpha=scale)
        most.copy_(total.abs() * of_sum.eps + 2 * largest * of_term.eps + of_sum.tiny).mul_(roundings)
    return differences(there.memories[0], wide.memories[0], allowed.memories[0])


def addition(backend: Backend, lists: Lists, there: Lists) -> str | None:
    """Check one addition. there: a copy of the lists, on the device."""
    backend.accumulate_(there.accumulators, there.gradients, SCALE, False)
    return _wrong_sums(lists, there)


def _overwriting(backend: Backend, lists: Lists, there: Lists) -> str | None:
    """Every second accumulator is overwritten: it holds nan and must not be read."""
    flags = [index % 2 == 0 for index in range(len(lists.accumulators))]
    for flag, here, other in zip(flags, lists.accumulators, there.accumulators, strict=True):
        if flag:
            here.zero_()
            other.fill_(math.nan)
    backend.accumulate_(there.accumulators, there.gradients, SCALE, flags, BETA)
    return _wrong_sums(lists, there, beta=[0.0 if flag else BETA for flag in flags])


def _device_scale(backend: Backend, lists: Lists, there: Lists) -> str | None:
    device = there.memories[0].device
    scale, beta = (torch.tensor(value, dtype=torch.float32).to(device) for value in (SCALE, BETA))
    backend.accumulate_(there.accumulators, there.gradients, scale, False, beta)
    return _wrong_sums(lists, there, beta=BETA)


def _prepared(backend: Backend, lists: Lists, there: Lists) -> str | None:
    run = backend.prepare(there.accumulators)
    run(there.gradients, SCALE, True)
    run(there.gradients, SCALE, False)
    return _wrong_sums(lists, there, scale=2 * SCALE, beta=0.0, roundings=3)


def _stochastic(backend: Backend, lists: Lists, there: Lists) -> str | None:
    """Every backend must give the same bits."""
    noise = Noise(_SEED, streams(len(lists.accumulators), 1))
    backend.accumulate_(there.accumulators, there.gradients, 1.0, False, noise=noise)
    reference.scale_accumulate_(lists.accumulators, lists.gradients, 1.0, False, noise=noise)
    expected = lists.memories[0].double()
    return differences(there.memories[0], expected, torch.zeros_like(expected))


def _norm(backend: Backend, lists: Lists, there: Lists) -> str | None:
    for kind in NORM_KINDS:
        partials = backend.norm_partials(there.accumulators, kind.norm_type)
        problem = _wrong_norm(_joined(backend, there, partials, kind.norm_type), there, kind.norm_type)
        if problem is not None:
            return problem
    there.accumulators[-1].view(-1)[-1] = math.inf
    partials = backend.norm_partials(there.accumulators, 2.0)
    norm, not_finite = backend.finish_norm([partials], 2.0, torch.float32)
    if (norm.item(), not_finite.item()) != (math.inf, 1.0):
        return f"with an inf element it is {norm.item()}; not finite: {not_finite.item()}"
    return None


def _joined(backend: Backend, there: Lists, partials: Tensor, norm_type: float = 2.0) -> tuple[Tensor, ...]:
    return backend.finish_norm([partials], norm_type, computation_dtype(there.accumulators[0].dtype))


def _wrong_norm(joined: tuple[Tensor, ...], there: Lists, norm_type: float = 2.0) -> str | None:
    norm, not_finite = joined
    elements = torch.cat([total.cpu().double().reshape(-1) for total in there.accumulators])
    expected = torch.linalg.vector_norm(elements, norm_type).item()
    # Parts of the squares are summed in the norm's dtype.
    most = 100 * torch.finfo(norm.dtype).eps * expected
    if not abs(norm.item() - expected) <= most or not_finite.item() != 0.0:
        return f"the {norm_type:g}-norm is {norm.item()}, not {expected}; not finite: {not_finite.item()}"
    return None


def _captured(backend: Backend, lists: Lists, there: Lists) -> str | None:
    """A window in a CUDA graph: overwrite with the first gradient, add the second, then take the norm."""
    run = backend.prepare(there.accumulators)
    device = there.memories[0].device
    scale = torch.ones((), device=device)

    def window() -> tuple[Tensor, ...]:
        run(there.gradients, scale, True)
        run(there.gradients, scale, False)
        return _joined(backend, there, backend.norm_partials(there.accumulators, 2.0))

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        window()  # compiles and allocates
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as data loaders, may continue.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        joined = window()
    there.memories[0].copy_(lists.memories[0])
    scale.fill_(SCALE)
    graph.replay()
    return _wrong_sums(lists, there, scale=2 * SCALE, beta=0.0, roundings=3) or _wrong_norm(joined, there)


def rows(
    backend: Backend, device: torch.device, gradient: torch.dtype, accumulator: torch.dtype
) -> str | None:
    """Check sums into rows of a table, some of which occur many times."""
    assert backend.accumulate_rows_ is not None
    make = _random()
    table = make(40, 65).to(accumulator)
    gradients = make(200, 65).to(gradient)
    indices = (make(200).abs() * 10).long().clamp_(max=29)
    indices[:90] = 7
    there = table.to(device, copy=True)
    backend.accumulate_rows_(there, indices.to(device), gradients.to(device), SCALE, 3, False)
    taken = (indices != 3).double().unsqueeze(1)
    terms, sizes = (
        torch.zeros(40, 65, dtype=torch.float64, device="cpu").index_add_(0, indices, term * taken)
        for term in (gradients.double(), gradients.double().abs())
    )
    sizes = table.double().abs() + SCALE * sizes
    eps = torch.finfo(computation_dtype(accumulator)).eps
    return _wrong_products(there, table.double() + SCALE * terms, sizes * len(indices) * eps)


def product(
    multiply: Callable[..., None], device: torch.device, operand: torch.dtype, accumulator: torch.dtype
) -> str | None:
    """Check sum <- beta * sum + scale * left^T right."""
    return _products(multiply, device, operand, accumulator, (65, 129), 37)


def grouped(
    multiply: Callable[..., None], device: torch.device, operand: torch.dtype, accumulator: torch.dtype
) -> str | None:
    """Check the same for experts without rows, with one and with many, and rows of no expert."""
    ends = (20, 20, 21, 90)
    offsets = torch.tensor(ends, dtype=torch.int32, device="cpu").to(device)

    def whole(total: Tensor, left: Tensor, right: Tensor, scale: Number, beta: float) -> None:
        multiply(total, left, right, offsets, scale, beta)

    return _products(whole, device, operand, accumulator, (4, 33, 65), 100, ends)


def _products(
    multiply: Callable[..., None],
    device: torch.device,
    operand: torch.dtype,
    accumulator: torch.dtype,
    shape: tuple[int, ...],
    tokens: int,
    ends: Sequence[int] = (),
) -> str | None:
    make = _random()
    total = make(shape).to(accumulator)
    left, right = (make(tokens, size).to(operand) for size in shape[-2:])
    expected = _multiplied(left.double(), right.double(), ends)
    sizes = _multiplied(left.double().abs(), right.double().abs(), ends)
    on_device = torch.tensor(SCALE, dtype=torch.float32, device="cpu").to(device)
    for scale, beta in ((SCALE, 1.0), (on_device, 1.0), (SCALE, 0.0)):
        there = total.to(device, copy=True) if beta else torch.full_like(total, math.nan, device=device)
        multiply(there, left.to(device), right.to(device), scale, beta)
        kept = beta * total.double()
        # TF32, and bfloat16 on some CPUs, round operands or products.
        allowed = (kept.abs() + SCALE * sizes) * 2.0**-8
        problem = _wrong_products(there, kept + SCALE * expected, allowed)
        if problem is not None:
            where = "on the device" if isinstance(scale, Tensor) else "a number"
            return f"scale {where}, beta {beta:g}: {problem}"
    return None


def _multiplied(left: Tensor, right: Tensor, ends: Sequence[int]) -> Tensor:
    """Return left^T right, or one product per expert."""
    if not ends:
        return left.t() @ right
    starts = (0, *ends[:-1])
    return torch.stack([left[s:e].t() @ right[s:e] for s, e in zip(starts, ends, strict=True)])


def _wrong_products(result: Tensor, expected: Tensor, allowed: Tensor) -> str | None:
    """Compare; `allowed` is the error before the result is rounded."""
    return differences(result, expected, allowed + expected.abs() * torch.finfo(result.dtype).eps)


def softmax(
    join: Callable[..., None], turn: Callable[..., None], device: torch.device, operand: torch.dtype
) -> str | None:
    """Check the passes over a slice of logits, as `softmax.passes_of` returns them."""
    from . import softmax as passes

    generator = torch.Generator(device="cpu").manual_seed(_SEED)
    sizes = (5, 1203), (4, 5), (1203,)
    logits, numbers, weights = (
        torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for size in sizes
    )
    logits = (4 * logits).to(operand)
    compute = passes.compute_dtype(operand)
    numbers[0] = 8.0
    target = torch.tensor([7, 8, -100, 1209, 1210], device="cpu")
    statistics = numbers.to(device, compute, copy=True)
    gradient = logits.to(device, operand, copy=True)
    factors = numbers.to(device, compute)
    by_class = weights.to(device, compute)
    join(statistics, gradient, target.to(device), 7, by_class)
    turn(gradient, factors, target.to(device), 7, by_class)
    expected_statistics = numbers.double()
    expected_gradient = logits.double()
    plain_join, plain_turn = passes.passes_of("eager")
    plain_join(expected_statistics, logits.double(), target, 7, weights.double())
    plain_turn(expected_gradient, numbers.double(), target, 7, weights.double())
    problem = differences(statistics, expected_statistics, 2.0**-16 * (1 + expected_statistics.abs()))
    return problem or differences(gradient, expected_gradient, 2.0**-8 * (1 + expected_gradient.abs()))
