"""Which of several correct methods multiplies on a CPU: a fixed rule for each case, in one table.

The processor's instruction set, the dtypes and the number of tokens decide. Methods differ in speed and in
the last bits of their results, so the same program on the same machine gives the same bits.

Each rule's comment names the measurements that it rests on, in benchmarks/NOTES.md. Two more rules are
constants of csrc/cpu: how many elements a thread gets at least (`kGrain`), and how far ahead norms prefetch
(`kAheadBytes`).
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from . import library, torch_private
from .constants import TOKEN_CLASSES, GemmMethod


class InstructionSet(enum.IntEnum):
    """What the loops, oneDNN and MKL may all use. Each one includes those before it."""

    BASELINE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


@dataclass(frozen=True)
class ProductRule:
    """How products of one dtype are added to sums of another, with one instruction set.

    Attributes:
        methods: the method for each class of tokens (`TOKEN_CLASSES`).
        few_tokens: experts with at most so many tokens are added by `GemmMethod.RANK_K`.
        experts: the method for experts with more tokens.
    """

    methods: tuple[GemmMethod, GemmMethod, GemmMethod, GemmMethod]
    few_tokens: int = 8
    experts: GemmMethod = GemmMethod.WHOLE

    def method(self, tokens: int) -> GemmMethod:
        return self.methods[class_of(tokens)]


_F32 = torch.float32
_BF16 = torch.bfloat16
_WHOLE, _ONEDNN, _RANK_K, _MKL = GemmMethod

#: For all cases that the table does not have. Without AVX-512, BLAS is the fastest for float32 sums or within
#: 5 % ("Products by method", AVX2).
DEFAULT = ProductRule((_WHOLE, _WHOLE, _WHOLE, _WHOLE))

#: By instruction set, and dtypes of operands and sum. The methods are those for up to 16 tokens, up to 47, up
#: to 100, and more.
PRODUCT_RULES = {
    # "Products by method", AVX2: our loops take 0.64 and 0.91 of BLAS's time, which casts parts of the sum.
    (InstructionSet.AVX2, _BF16, _BF16): ProductRule((_RANK_K, _RANK_K, _WHOLE, _WHOLE)),
    # "Products by method", AVX-512 and AMX: 0.78 to 0.81 from 48 tokens on; experts with 16 tokens 0.86 to
    # 0.90.
    (InstructionSet.AVX512, _F32, _F32): ProductRule((_WHOLE, _WHOLE, _RANK_K, _WHOLE), few_tokens=16),
    (InstructionSet.AMX, _F32, _F32): ProductRule((_WHOLE, _WHOLE, _RANK_K, _WHOLE), few_tokens=16),
    # "float32", AMD EPYC: 0.67 with 32 tokens, 0.82 to 0.86 with 64, and slower with 16.
    (InstructionSet.AVX512_BF16, _F32, _F32): ProductRule((_WHOLE, _RANK_K, _RANK_K, _WHOLE)),
    # "Products by method", AVX-512: 0.86, 1.04 and 0.74; experts with 32 tokens 0.93.
    (InstructionSet.AVX512, _BF16, _F32): ProductRule((_RANK_K, _RANK_K, _RANK_K, _WHOLE), few_tokens=32),
    # "Products by method", AVX-512: 0.41 and 0.60; experts with 32 tokens 0.79.
    (InstructionSet.AVX512, _BF16, _BF16): ProductRule((_RANK_K, _RANK_K, _WHOLE, _WHOLE), few_tokens=32),
    # The rows of `linear` for an AMD EPYC: with 64 tokens 1.10 to 1.23 times as fast as a product and an
    # addition, and as fast with 1024. There is no temporary memory.
    (InstructionSet.AVX512_BF16, _BF16, _F32): ProductRule(
        (_RANK_K, _RANK_K, _RANK_K, _RANK_K), experts=_RANK_K
    ),
    # "Products by method", AMX: oneDNN and MKL multiply by AMX.
    (InstructionSet.AVX512_BF16, _BF16, _BF16): ProductRule(
        (_RANK_K, _ONEDNN, _ONEDNN, _ONEDNN), experts=_ONEDNN
    ),
    (InstructionSet.AMX, _BF16, _F32): ProductRule((_RANK_K, _MKL, _MKL, _MKL), experts=_MKL),
    (InstructionSet.AMX, _BF16, _BF16): ProductRule((_RANK_K, _ONEDNN, _ONEDNN, _ONEDNN), experts=_ONEDNN),
}


def product_rule(accumulator: torch.dtype, operand: torch.dtype) -> ProductRule:
    """Return the rule of this machine. If torch has no MKL, BLAS replaces MKL's bfloat16 product."""
    return _product_rule(instruction_set(), accumulator, operand, _has_mkl_bfloat16())


@functools.cache
def _product_rule(
    instructions: InstructionSet, accumulator: torch.dtype, operand: torch.dtype, has_mkl: bool
) -> ProductRule:
    rule = PRODUCT_RULES.get((instructions, operand, accumulator), DEFAULT)
    if has_mkl:
        return rule
    first, second, third, last = (_WHOLE if method is _MKL else method for method in rule.methods)
    experts = _WHOLE if rule.experts is _MKL else rule.experts
    return replace(rule, methods=(first, second, third, last), experts=experts)


def loops_multiply_slices(accumulator: torch.dtype, operand: torch.dtype) -> bool:
    """Return whether `GemmMethod.RANK_K` multiplies the slices of a head, whatever the number of tokens.

    Other methods need temporary memory for casts. Without it slices are larger, which saves more time unless
    there is AMX.
    """
    is_narrow = accumulator == torch.float32 and operand.itemsize == 2
    return is_narrow and instruction_set() < InstructionSet.AMX


def onednn_multiplies_logits() -> bool:
    """Return whether oneDNN, not BLAS, multiplies the float32 logits of a head.

    "Heads": on an AMD EPYC oneDNN takes 0.78 to 0.93 of BLAS's time, on an Intel Xeon 1.01 to 1.07.
    """
    return instruction_set() == InstructionSet.AVX512_BF16


def class_of(tokens: int) -> int:
    """Return the number of a class of tokens. Products with tokens of one class use one method."""
    return bisect_left(TOKEN_CLASSES, tokens)


def in_words(method: Callable[[int], str]) -> str:
    """Return the methods of all numbers of tokens in one text. method: returns that of one number."""
    parts: list[tuple[str, str]] = []
    for most in (*TOKEN_CLASSES, None):
        name = method(TOKEN_CLASSES[-1] + 1 if most is None else most)
        if parts and parts[-1][0] == name:
            parts.pop()
        parts.append((name, "for more tokens" if most is None else f"for up to {most} tokens"))
    if len(parts) == 1:
        return parts[0][0]
    return ", ".join(f"{name} {tokens}" for name, tokens in parts)


#: By the values of ONEDNN_MAX_CPU_ISA, the instruction set to which it limits oneDNN's bfloat16 products.
_ONEDNN_LIMITS = {
    "SSE41": InstructionSet.BASELINE,
    "AVX": InstructionSet.BASELINE,
    "AVX2": InstructionSet.AVX2,
    "AVX2_VNNI": InstructionSet.AVX2,
    "AVX2_VNNI_2": InstructionSet.AVX2,
    "AVX512_CORE": InstructionSet.AVX512,
    "AVX512_CORE_VNNI": InstructionSet.AVX512,
    "AVX512_CORE_BF16": InstructionSet.AVX512_BF16,
    "AVX512_CORE_FP16": InstructionSet.AVX512_BF16,
}


def instruction_set() -> InstructionSet:
    """Return the processor's instruction set, or the smaller one to which a library is limited.

    Without oneDNN, and where it is switched off, bfloat16 is multiplied by float32 instructions.
    """
    of_processor = _of_processor()
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return min(of_processor, InstructionSet.AVX512)
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return min(of_processor, _ONEDNN_LIMITS.get(limit, InstructionSet.AMX))


def multiplies_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 by bfloat16 instructions."""
    return instruction_set() >= InstructionSet.AVX512_BF16


@functools.cache
def _of_processor() -> InstructionSet:
    """Return what fusedacc's loops use, or AMX."""
    if library.load_error() is not None:
        return InstructionSet.BASELINE
    of_loops = InstructionSet[library.built_with()["cpu_capability"].upper()]
    if of_loops is InstructionSet.AVX512_BF16 and torch_private.has_amx():
        return InstructionSet.AMX
    return of_loops


@functools.cache
def _has_mkl_bfloat16() -> bool:
    """Return whether torch's BLAS is an MKL that multiplies bfloat16 into float32."""
    if library.load_error() is not None:
        return False
    return ctypes.CFUNCTYPE(ctypes.c_bool)(library.address_of("fusedacc_has_mkl_bfloat16"))()
