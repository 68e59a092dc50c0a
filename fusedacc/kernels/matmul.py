"""A layer's weight gradient multiplied straight into its sum, so that it is never a tensor of its own.

    accumulator <- keep * accumulator + scale * left^T right

The product is summed in float32 (float64 for float64) and rounded once to the accumulator, with one
exception: where a trial (`tuning`) finds that faster on this CPU, a product of bfloat16 is rounded to
bfloat16, as torch rounds its own, before it is added to a float32 sum. `GemmMethod` has the methods.

On a CPU the extension multiplies. The eager backend is plain torch, on any device, and the only one on CUDA:
stream, workspace, determinism and TF32 are as torch is set.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from . import checks, library, matmul_eager, registry, tuning
from .choices import Choice, Decision
from .constants import SPLIT_ROWS, TOKEN_CLASSES, GemmMethod, Multiplier
from .dtypes import TRIED_PRODUCTS, dtype_name
from .lists import bump_versions
from .native import as_argument
from .rounding import Noise

Number = matmul_eager.Number
Run = Callable[[Tensor, Tensor, Tensor, Number, Number, Noise | None], None]

#: The backends that there are for products, the preferred first.
_NAMES = ("cpu", "eager")


@dataclass(frozen=True)
class Selection:
    """Who multiplies: the backend's name, what it does in words, and why it was chosen.

    `run(accumulator, left, right, scale, keep, noise)` is `gemm_accumulate_` without the choice; of grouped
    products (`grouped`) it takes the offsets after the operands, and is `grouped_accumulate_`.
    `multiplier`: the same for the native modules, a `Multiplier` or the operator's way.
    """

    name: str
    how: str
    reason: str
    run: Callable[..., None]
    multiplier: int = Multiplier.PYTHON


def gemm_accumulate_(
    accumulator: Tensor,
    left: Tensor,
    right: Tensor,
    scale: Number = 1.0,
    keep: Number = 1.0,
    *,
    backend: str = "auto",
    noise: Noise | None = None,
) -> None:
    """accumulator <- keep * accumulator + scale * left^T right, without a temporary as large as that.

    Not recorded by autograd; the accumulator's version is bumped. Beside the accumulator at most a few MB are
    allocated, and a copy of an operand of which neither rows nor columns lie without gaps.

    Arguments are those of a layer's backward, and not looked at here: the native operator refuses what would
    not be safe, before anything is modified, and torch's own products what they cannot do.

    Args:
        accumulator: [M, N], with rows or columns without gaps (a row may be longer than N); float32,
            bfloat16, float16 or float64.
        left: [n, M], any strides, its memory apart from the accumulator's; n may be 0.
        right: [n, N], likewise, of left's dtype. Dtype pairs as in `dtypes.PAIRS`.
        scale: a float, or a 0-dim floating tensor on the accumulator's device, read there.
        keep: likewise. Where it is 0, the accumulator is not read: it may be uninitialised.
        backend: "auto", "cpu" or "eager"; "cuda" and "triton" have no product, so that torch multiplies.
        noise: random bits of one stream: an accumulator of bfloat16 is rounded stochastically, once.

    Raises:
        ValueError: there is no such backend.
        RuntimeError: the backend that was asked for cannot run here, or refuses an argument.
    """
    if backend == "auto" and not (checks.is_plain(accumulator) and checks.is_plain(left)):
        backend = "eager"
    chosen = select(
        accumulator.device,
        accumulator.dtype,
        left.dtype,
        backend,
        tokens=left.shape[0],
        stochastic=noise is not None,
    )
    chosen.run(accumulator, left, right, scale, keep, noise)


def select(
    device: torch.device,
    accumulator_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    backend: str = "auto",
    *,
    tokens: int,
    kept: MutableMapping[str, str] | None = None,
    stochastic: bool = False,
) -> Selection:
    """Who multiplies operands of one dtype into an accumulator of another on a device, and why.

    Dtypes are a pair of `dtypes.PAIRS`; tokens are the operands' rows; `kept` is as `tuning.choose` has it. A
    stochastic sum takes no product that is rounded to nearest before.

    Raises:
        ValueError: the name, or the value of `FUSEDACC_BACKEND`, is no backend.
        RuntimeError: the backend that was asked for cannot run there.
    """
    name, reason = _backend(backend, device, accumulator_dtype, operand_dtype)
    if name == "eager":
        matmul_eager.passes(device, operand_dtype)
        return _in_torch(reason)
    choice = None if stochastic else choice_of(accumulator_dtype, operand_dtype, class_of(tokens))
    if choice is None:
        return _on_cpu(accumulator_dtype, operand_dtype, GemmMethod.WHOLE, reason)
    decision = tuning.choose(choice, kept)
    method = GemmMethod[decision.candidate.upper()]
    return _on_cpu(accumulator_dtype, operand_dtype, method, f"{reason}; {_because(choice, decision)}")


def _because(choice: Choice, decision: Decision) -> str:
    return f"with {choice.name.partition(', ')[2]} {decision}"


def describe(
    device: torch.device,
    accumulator_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    backend: str,
    kept: Mapping[str, str],
    stochastic: bool = False,
) -> tuple[str, str]:
    """The backend, and in words who multiplies and why, by tokens where it depends; arguments as `select`.

    What is not in `kept` has not come up yet, and is not tried for this.
    """
    name, reason = _backend(backend, device, accumulator_dtype, operand_dtype)
    if name == "eager":
        return name, f"{_in_torch(reason).how}; {reason}"
    by_class, undecided = [], False
    for number in range(len(TOKEN_CLASSES) + 1):
        choice = None if stochastic else choice_of(accumulator_dtype, operand_dtype, number)
        if choice is not None and choice.name not in kept:
            undecided = True
        elif choice is not None:
            method = GemmMethod[kept[choice.name].upper()]
            how = _on_cpu(accumulator_dtype, operand_dtype, method, "").how
            by_class.append(f"{how}, {_because(choice, tuning.choose(choice, dict(kept)))}")
    if not by_class:
        how = _on_cpu(accumulator_dtype, operand_dtype, GemmMethod.WHOLE, "").how
        by_class = ["a trial will tell how"] if undecided else [how]
    return name, "; ".join([*by_class, reason])


def _backend(
    backend: str, device: torch.device, accumulator: torch.dtype, operand: torch.dtype
) -> tuple[str, str]:
    """The backend for a pair, and why."""
    chosen = registry.select_for_products(
        *registry.requested(backend), "products", _NAMES, device, accumulator, operand
    )
    return chosen.candidate, chosen.reason


def _in_torch(reason: str) -> Selection:
    return Selection("eager", "torch's product", reason, matmul_eager.accumulate_)


def _on_cpu(accumulator: torch.dtype, operand: torch.dtype, method: GemmMethod, reason: str) -> Selection:
    multiplier, run, how = Multiplier.OPERATOR + method, _RUNS[method], _HOW[method]
    if method is GemmMethod.ROUNDED and accumulator == torch.float32:
        how = "parts of torch's bfloat16 product, added one by one"
    elif method is GemmMethod.WHOLE and operand.itemsize > 2 and operand == accumulator:
        how, multiplier, run = "BLAS into the sum", Multiplier.BLAS, _blas
    elif method is GemmMethod.WHOLE and accumulator.itemsize > 2:
        how = "BLAS into the sum, of operands cast to float32 in parts"
    return Selection("cpu", how, reason, run, multiplier)


#: What each method does, where the dtypes do not tell more.
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
    # The operator reads tensors without a word to the dispatcher; torch's own call costs the host less.
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
    way: int = GemmMethod.WHOLE,
) -> None:
    if left.shape[0] == 0:
        matmul_eager.keep_only(accumulator, keep, noise)
        return
    last = *as_argument(scale), *as_argument(keep), way, *(noise or ())
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        torch.ops.fusedacc.gemm_accumulate_.default(accumulator, left, right, *last)
    bump_versions([accumulator])


#: The operator by each of its methods.
_RUNS: dict[GemmMethod, Run] = {method: functools.partial(_native, way=int(method)) for method in GemmMethod}


#: Tokens, by class, and the sum's shape, of a trial.
_TRIED = (8, 32, 64, 192)
_SHAPE = 512, 512
#: The shape where loops of our own are tried. They are at their best while the sum fits a second-level cache,
#: but most of a model's time goes to sums that do not.
_BEYOND_CACHE = 2048, 1024
#: Of so many classes, each with few tokens, loops of our own may multiply bfloat16. They compute in float32.
_RANK_K_CLASSES = 2
#: Parts that a thread gets at least where a product is cut up, as in csrc/cpu/gemm.cpp.
_PARTS_PER_THREAD = 2
#: Values of ONEDNN_MAX_CPU_ISA under which it multiplies bfloat16 by float32's instructions.
_WITHOUT_BFLOAT16 = frozenset(
    ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
)


def class_of(tokens: int) -> int:
    """The number of a class: tokens of one class are multiplied by one method."""
    return bisect_left(TOKEN_CLASSES, tokens)


def in_words(number: int) -> str:
    """A class as it stands in the names of choices."""
    if number == len(TOKEN_CLASSES):
        return f"over {TOKEN_CLASSES[-1]} tokens"
    first = TOKEN_CLASSES[number - 1] + 1 if number else 1
    return f"{first} to {TOKEN_CLASSES[number]} tokens"


def choice_of(accumulator: torch.dtype, operand: torch.dtype, number: int) -> Choice | None:
    """The choice of a method for this product; None where only one exists."""
    return _choice(accumulator, operand, number, torch.get_num_threads(), multiplies_bfloat16())


@functools.cache
def _choice(
    accumulator: torch.dtype, operand: torch.dtype, number: int, threads: int, has_bfloat16: bool
) -> Choice | None:
    methods = methods_of(accumulator, operand, number, threads)
    if len(methods) == 1:
        return None
    # Splitting needs a trial: on some processors it takes a quarter less time, on others more.
    default = GemmMethod.WHOLE
    if GemmMethod.ROUNDED in methods and has_bfloat16:
        default = GemmMethod.RANK_K if number == 0 else GemmMethod.ROUNDED
    shape = _BEYOND_CACHE if GemmMethod.RANK_K in methods else _SHAPE
    if GemmMethod.SPLIT in methods:
        shape = max(shape[0], SPLIT_ROWS * _PARTS_PER_THREAD * threads), shape[1]
    return Choice(
        f"product of {dtype_name(operand)} into {dtype_name(accumulator)}, {in_words(number)}",
        tuple(method.name.lower() for method in methods),
        default.name.lower(),
        functools.partial(_trial, accumulator, operand, _TRIED[number], shape, methods),
    )


def methods_of(
    accumulator: torch.dtype, operand: torch.dtype, number: int, threads: int
) -> tuple[GemmMethod, ...]:
    """The methods for a pair of dtypes and a class of tokens."""
    if operand == torch.bfloat16:
        # With few tokens, parts of a product that is rounded first cost what two passes over the sum cost.
        own_loops = (GemmMethod.RANK_K,) if number < _RANK_K_CLASSES else ()
        mixed = (GemmMethod.MIXED,) if accumulator == torch.float32 and _multiplies_mixed() else ()
        return (GemmMethod.WHOLE, GemmMethod.ROUNDED, *own_loops, *mixed)
    if operand == accumulator == torch.float32 and 0 < number < len(TOKEN_CLASSES):
        # With fewer tokens BLAS packs nothing. With these it waits for the sum's memory, which our loops
        # fetch ahead. With more there is enough to do meanwhile.
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
    total = torch.zeros(shape, dtype=accumulator, device="cpu")
    operator = torch.ops.fusedacc.gemm_accumulate_.default
    return {
        method.name.lower(): functools.partial(
            operator, total, left, right, None, 1.0, None, 1.0, int(method)
        )
        for method in methods
    }


def trial_operands(tokens: int, sizes: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Random operands of a product, for a trial."""
    generator = torch.Generator().manual_seed(0)
    values = (torch.empty(tokens, size, device="cpu").uniform_(-1, 1, generator=generator) for size in sizes)
    return [each.to(dtype) for each in values]


def choices() -> list[Choice]:
    """All choices of this machine."""
    found = [choice_of(*pair, number) for pair in TRIED_PRODUCTS for number in range(len(TOKEN_CLASSES) + 1)]
    return [choice for choice in found if choice is not None]


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it, and oneDNN may use them."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _WITHOUT_BFLOAT16:
        return False
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return False
    return _has_bfloat16()


@functools.cache
def _multiplies_mixed() -> bool:
    """Whether torch's BLAS multiplies bfloat16 into float32; on which processors it is fast, trials tell."""
    if library.load_error() is not None:
        return False
    return ctypes.CFUNCTYPE(ctypes.c_bool)(library.address_of("fusedacc_multiplies_mixed"))()


@functools.cache
def _has_bfloat16() -> bool:
    asked = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in asked)
