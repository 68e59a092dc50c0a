"""A layer's weight gradient, multiplied straight into its sum so that the gradient is never stored.

    accumulator <- keep * accumulator + scale * left^T right

The product is summed in float32 (float64 for float64). A 16-bit accumulator is rounded to once, others once
per part of the tokens. Exceptions for products of bfloat16 into float32: if a trial (`tuning`) finds that
faster on this CPU, the product is rounded to bfloat16 first, as torch does; and AVX512-BF16 counts subnormal
numbers as zero. See `GemmMethod` for the methods.

The native library multiplies on a CPU. The eager backend is plain torch on any device, and the only one on
CUDA; torch's settings decide stream, workspace, determinism and TF32.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from . import checks, library, matmul_eager, registry, tuning
from .constants import SPLIT_ROWS, TOKEN_CLASSES, GemmMethod, Multiplier
from .dtypes import TRIED_PRODUCTS, Number, pair_name
from .lists import bump_versions
from .native import as_argument
from .rounding import Noise
from .tuning import Choice
from .tuning_trial import Decision

Run = Callable[[Tensor, Tensor, Tensor, Number, Number, Noise | None], None]


#: Backends for products, the preferred first.
_NAMES = ("cpu", "eager")


@dataclass(frozen=True)
class Selection:
    """How to multiply: the backend, its method in words, and why it was chosen.

    Attributes:
        run: `run(accumulator, left, right, scale, keep, noise)` does the work of `gemm_accumulate_`. For
            grouped products (`grouped`) the offsets follow the operands.
        multiplier: the same for the native modules: a `Multiplier`, or the operator's method.
    """

    name: str
    how: str
    reason: str
    run: Callable[..., None]
    multiplier: int = Multiplier.PYTHON

    @property
    def in_place(self) -> bool:
        """Whether the product needs no temporary memory."""
        return self.multiplier == Multiplier.BLAS or self.multiplier - Multiplier.OPERATOR in _IN_PLACE


#: Methods that need no temporary memory.
_IN_PLACE = (GemmMethod.SPLIT, GemmMethod.RANK_K, GemmMethod.MIXED)


def gemm_accumulate_(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    scale: Number = 1.0,
    keep: Number = 1.0,
    *,
    backend: str = "auto",
) -> None:
    """accumulator <- keep * accumulator + scale * left^T right, without a temporary of that size.

    Autograd does not record it; the accumulator's version is bumped. It allocates a few MB at most, and a
    copy of an operand of which neither rows nor columns are dense. A trial takes 64 MiB while it runs.

    The arguments come from a layer's backward and are not checked here. The native operator refuses unsafe
    ones before anything is modified; torch's products refuse what they cannot do.

    The accumulator is [M, N] with dense rows or columns (the row stride may exceed N). left [n, M] and right
    [n, N] are of one dtype, with any strides, share no memory with it, and n may be 0. Dtype pairs are those
    of `dtypes.PAIRS`. scale and keep are floats, or 0-dim floating tensors on the accumulator's device, read
    there. If keep is 0, the accumulator is not read and may be uninitialized. Backends are "auto", "cpu" and
    "eager"; "cuda" and "triton" have no product, so torch multiplies. Raises as `registry.select`.
    """
    if backend == "auto" and not (checks.is_plain(accumulator) and checks.is_plain(left)):
        backend = "eager"
    chosen = select(accumulator.device, accumulator.dtype, left.dtype, backend, tokens=left.shape[0])
    chosen.run(accumulator, left, right, scale, keep, None)


def select(
    device: torch.device,
    accumulator_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    backend: str = "auto",
    *,
    tokens: int,
    kept: MutableMapping[str, str] | None = None,
    stochastic: bool = False,
    in_slices: bool = False,
) -> Selection:
    """Select how to multiply operands of one dtype into an accumulator of another on a device; errors as
    `registry.select`.

    tokens: rows of the operands. kept: earlier decisions to keep, as for `tuning.choose`. stochastic: whether
    the sum is rounded stochastically; then no product is rounded before. in_slices: whether temporary memory
    is scarce, as for the slices of a head.
    """
    name, reason = _backend(backend, device, accumulator_dtype, operand_dtype)
    if name == "eager":
        matmul_eager.passes(device, operand_dtype)
        return Selection(name, _IN_TORCH, reason, matmul_eager.accumulate_)
    pair = accumulator_dtype, operand_dtype
    if in_slices and _loops_multiply_slices(*pair):
        return _on_cpu(*pair, GemmMethod.RANK_K, f"{reason}; {_SCARCE}")
    choice = None if stochastic else choice_of(*pair, class_of(tokens))
    if choice is None:
        return _on_cpu(*pair, GemmMethod.WHOLE, reason)
    decision = tuning.choose(choice, kept)
    because = f"{reason}; {_because(choice, decision)}"
    return _on_cpu(*pair, GemmMethod[decision.candidate.upper()], because)


def _because(choice: Choice, decision: Decision) -> str:
    return f"with {choice.name.partition(', ')[2]} {decision}"


def _loops_multiply_slices(accumulator: torch.dtype, operand: torch.dtype) -> bool:
    """Return whether our own loops multiply the slices of a head on a CPU, whatever a trial has found.

    Other methods need temporary memory for casts or for rounded products. Without it slices are larger, which
    saves more time unless oneDNN is much faster than our loops.
    """
    is_narrow = accumulator == torch.float32 and operand.itemsize == 2
    return is_narrow and (multiplies_pairs() or not multiplies_bfloat16())


_SCARCE = "they need no temporary memory, which is scarce for the slices of a head"


def describe(
    device: torch.device,
    accumulator_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    backend: str,
    kept: Mapping[str, str],
    stochastic: bool = False,
    in_slices: bool = False,
) -> tuple[str, str]:
    """Return the backend, and in words how it multiplies and why, by number of tokens if that matters.

    Arguments as for `select`. Decisions that are not in `kept` are not made for this.
    """
    name, reason = _backend(backend, device, accumulator_dtype, operand_dtype)
    if name == "eager":
        return name, f"{_IN_TORCH}; {reason}"
    pair = accumulator_dtype, operand_dtype
    if in_slices and _loops_multiply_slices(*pair):
        return name, f"{_HOW[GemmMethod.RANK_K]}; {reason}; {_SCARCE}"
    found = [] if stochastic else [choice_of(*pair, number) for number in range(len(TOKEN_CLASSES) + 1)]
    choices = [choice for choice in found if choice is not None]
    by_class = []
    for choice in choices:
        if kept.get(choice.name) in choice.candidates:
            how = _on_cpu(*pair, GemmMethod[kept[choice.name].upper()], "").how
            by_class.append(f"{how}, {_because(choice, tuning.choose(choice, dict(kept)))}")
    if not by_class:
        how = _on_cpu(*pair, GemmMethod.WHOLE, "").how
        by_class = ["a trial will decide how" if choices else how]
    return name, "; ".join([*by_class, reason])


def _backend(
    backend: str, device: torch.device, accumulator: torch.dtype, operand: torch.dtype
) -> tuple[str, str]:
    """Return the backend for a pair, and why."""
    asked = registry.requested(backend)
    return registry.select_for_products(*asked, "products", _NAMES, device, accumulator, operand)


def _on_cpu(accumulator: torch.dtype, operand: torch.dtype, method: GemmMethod, reason: str) -> Selection:
    multiplier, how = Multiplier.OPERATOR + method, _HOW[method]
    run: Callable[..., None] = _RUNS[method]
    if method is GemmMethod.ROUNDED and accumulator == torch.float32:
        how = "parts of torch's bfloat16 product, added one by one"
    elif method is GemmMethod.WHOLE and operand.itemsize > 2 and operand == accumulator:
        how, multiplier, run = "BLAS into the sum", Multiplier.BLAS, _blas
    elif method is GemmMethod.WHOLE and accumulator.itemsize > 2:
        how = "BLAS into the sum, of operands cast to float32 in parts"
    return Selection("cpu", how, reason, run, multiplier)


_IN_TORCH = "torch's product"
#: What each method does, unless the dtypes say more.
_HOW = {
    GemmMethod.WHOLE: "BLAS into float32 copies of parts of the sum",
    GemmMethod.SPLIT: "BLAS into the sum, rows shared out among the threads",
    GemmMethod.ROUNDED: "oneDNN into the sum",
    GemmMethod.RANK_K: "loops of our own into the sum",
    GemmMethod.MIXED: "MKL's bfloat16 product into the sum",
}


def _blas(
    accumulator: Tensor, left: Tensor, right: Tensor, scale: Number, keep: Number, noise: Noise | None = None
) -> None:
    # torch's own call costs less host time than the operator, unless a factor is a tensor.
    if isinstance(scale, Tensor) or isinstance(keep, Tensor):
        _native(accumulator, left, right, scale, keep)
    else:
        with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
            accumulator.addmm_(left.t(), right, beta=keep, alpha=scale)


def _native(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    scale: Number,
    keep: Number,
    noise: Noise | None = None,
    method: int = GemmMethod.WHOLE,
) -> None:
    if left.shape[0] == 0:
        matmul_eager.keep_only(accumulator, keep, noise)
        return
    last = *as_argument(scale), *as_argument(keep), method, *(noise or ())
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        torch.ops.fusedacc.gemm_accumulate_.default(accumulator, left, right, *last)
    bump_versions([accumulator])


_RUNS = {method: functools.partial(_native, method=int(method)) for method in GemmMethod}


#: Tokens of a trial by class, and the shapes of its sums.
_TRIED = (8, 32, 64, 192)
_SHAPES = (1024, 1024), (1024, 1024), (1024, 1024), (512, 512)
#: Bytes of a trial's sums. They take turns, as those of a model do, so that no cache holds the next one.
_SUMS_BYTES = 64 << 20
#: Our loops may multiply bfloat16 into bfloat16 in the first so many classes, which have few tokens.
_RANK_K_CLASSES = 2
#: Parts per thread at least if a product is split, as in csrc/cpu/gemm.cpp.
_PARTS_PER_THREAD = 2
#: Values of ONEDNN_MAX_CPU_ISA with which oneDNN multiplies bfloat16 by float32 instructions.
_WITHOUT_BFLOAT16 = frozenset(
    ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
)


def class_of(tokens: int) -> int:
    """Return the number of a class. Products with tokens of one class use one method."""
    return bisect_left(TOKEN_CLASSES, tokens)


def in_words(number: int) -> str:
    """Return a class in words, as in the names of choices."""
    if number == len(TOKEN_CLASSES):
        return f"over {TOKEN_CLASSES[-1]} tokens"
    first = TOKEN_CLASSES[number - 1] + 1 if number else 1
    return f"{first} to {TOKEN_CLASSES[number]} tokens"


def choice_of(accumulator: torch.dtype, operand: torch.dtype, number: int) -> Choice | None:
    """Return the choice of a method for this product; None if there is only one."""
    features = multiplies_bfloat16(), multiplies_pairs()
    return _choice(accumulator, operand, number, torch.get_num_threads(), *features)


@functools.cache
def _choice(
    accumulator: torch.dtype,
    operand: torch.dtype,
    number: int,
    threads: int,
    has_bfloat16: bool,
    has_pairs: bool,
) -> Choice | None:
    methods = methods_of(accumulator, operand, number, threads)
    if len(methods) == 1:
        return None
    # Splitting needs a trial: it takes a quarter less time on some processors, and more on others.
    default = GemmMethod.WHOLE
    if operand == torch.bfloat16:
        if has_pairs and accumulator == torch.float32:
            default = GemmMethod.RANK_K
        elif has_bfloat16:
            default = GemmMethod.RANK_K if number == 0 else GemmMethod.ROUNDED
    shape = _SHAPES[number]
    if GemmMethod.SPLIT in methods:
        shape = max(shape[0], SPLIT_ROWS * _PARTS_PER_THREAD * threads), shape[1]
    return Choice(
        f"product of {pair_name(operand, accumulator)}, {in_words(number)}",
        tuple(method.name.lower() for method in methods),
        default.name.lower(),
        functools.partial(_trial, accumulator, operand, _TRIED[number], shape, methods),
    )


def methods_of(
    accumulator: torch.dtype, operand: torch.dtype, number: int, threads: int
) -> tuple[GemmMethod, ...]:
    """Return the methods for a pair of dtypes and a class of tokens."""
    if operand == torch.bfloat16:
        # With few tokens, adding a rounded product costs a second pass over the sum.
        own_loops = (GemmMethod.RANK_K,) if accumulator == torch.float32 or number < _RANK_K_CLASSES else ()
        mixed = (GemmMethod.MIXED,) if accumulator == torch.float32 and _multiplies_mixed() else ()
        # Without bfloat16 instructions, oneDNN may allocate a float32 copy of the whole sum.
        rounded = (GemmMethod.ROUNDED,) if multiplies_bfloat16() else ()
        return (GemmMethod.WHOLE, *rounded, *own_loops, *mixed)
    if operand == accumulator == torch.float32 and number < len(TOKEN_CLASSES):
        # BLAS waits for the sum's memory, which our loops prefetch. With more tokens that is a small share.
        split = (GemmMethod.SPLIT,) if number == len(TOKEN_CLASSES) - 1 and threads > 1 else ()
        return (GemmMethod.WHOLE, *split, GemmMethod.RANK_K)
    return (GemmMethod.WHOLE,)


def _trial(
    accumulator: torch.dtype,
    operand: torch.dtype,
    tokens: int,
    shape: tuple[int, int],
    methods: tuple[GemmMethod, ...],
) -> dict[str, Callable[[], object]]:
    left, right = trial_operands(tokens, shape, operand)
    count = max(1, _SUMS_BYTES // (shape[0] * shape[1] * accumulator.itemsize))
    # Not zeros, whose memory is only mapped when a candidate writes to it. The allocator returns one large
    # block to the system, but keeps several smaller ones.
    sums = itertools.cycle(torch.ones(count, *shape, dtype=accumulator, device="cpu").unbind())
    multiply = torch.ops.fusedacc.gemm_accumulate_.default

    def run(method: GemmMethod) -> None:
        multiply(next(sums), left, right, None, 1.0, None, 1.0, int(method))

    return {method.name.lower(): functools.partial(run, method) for method in methods}


def trial_operands(tokens: int, sizes: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Return random operands of a product, for a trial."""
    generator = torch.Generator().manual_seed(0)
    values = (torch.empty(tokens, size, device="cpu").uniform_(-1, 1, generator=generator) for size in sizes)
    return [each.to(dtype) for each in values]


def choices() -> list[Choice]:
    """Return all choices of this machine."""
    found = [choice_of(*pair, number) for pair in TRIED_PRODUCTS for number in range(len(TOKEN_CLASSES) + 1)]
    return [choice for choice in found if choice is not None]


def multiplies_bfloat16() -> bool:
    """Return whether the processor has bfloat16 instructions and oneDNN may use them."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BFLOAT16:
        return False
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return False
    return _has("_is_amx_tile_supported") or _has("_is_avx512_bf16_supported")


def multiplies_pairs() -> bool:
    """Return whether fusedacc's loops use AVX512-BF16, and oneDNN has nothing faster."""
    return _has_pairs() and not (_has("_is_amx_tile_supported") and multiplies_bfloat16())


@functools.cache
def _has_pairs() -> bool:
    return library.load_error() is None and library.built_with()["cpu_capability"] == "avx512_bf16"


@functools.cache
def _has(feature: str) -> bool:
    """Return whether `torch.cpu` knows the query of a feature, and the processor has it."""
    return getattr(torch.cpu, feature, lambda: False)()


@functools.cache
def _multiplies_mixed() -> bool:
    """Return whether torch's BLAS multiplies bfloat16 into float32. Trials decide whether that is fast."""
    if library.load_error() is not None:
        return False
    return ctypes.CFUNCTYPE(ctypes.c_bool)(library.address_of("fusedacc_multiplies_mixed"))()
