"""The cross-entropy of a language model's head, by slices of the vocabulary.

A slice of the logits is multiplied, used and overwritten by the next one. The forward keeps one number for
each token, the logarithm of the sum of e^logit. The backward multiplies each slice again, turns it into its
gradient in one pass, and uses that for the input's gradient and for the slice's rows of the weight's.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import checks, matmul, matmul_eager, registry, selftest
from .dtypes import Number
from .rounding import Noise

#: The backends that have a kernel for the softmax of a slice.
_NAMES = ("cuda", "triton", "cpu", "eager")
_KIND = "slices of logits"
#: All temporary memory is at most this share of the logits, or so many bytes where that is more.
LOGITS_SHARE, LEAST_BYTES = 16, 2**20
#: The bytes of a slice of the logits, which is read again while a cache holds it; on a GPU it need not be.
CACHED_BYTES, GPU_BYTES = 2**22, 2**28
#: The slice's classes are a multiple of this.
_STEP = 16
#: Numbers of the arithmetic's dtype that are held for each token beside its logits.
_TOKEN_NUMBERS = 12

#: `(first class, the slice's gradient (tokens, classes), input (tokens, width), whether these are the first
#: tokens)`: adds the product of the last two to the slice's rows of the weight's gradient.
AddRows = Callable[[int, Tensor, Tensor, bool], None]


Pass = Callable[[Tensor, Tensor, Tensor, int, Tensor | None], None]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic, and of the loss."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def backend_for(device: torch.device, operand: torch.dtype, backend: str = "auto") -> str:
    """The backend that runs the softmax of a slice; arguments as for `matmul.select`.

    The first call for a GPU checks the results (`selftest`).
    """
    return selftest.now_or_deferred(_tested, _untested, *registry.requested(backend), device, operand)


@selftest.remembered
def _tested(name: str, source: str, device: torch.device, operand: torch.dtype) -> str:
    while True:  # until none fails: then it is an obstacle
        chosen = _untested(name, source, device, operand)
        who, check = f"{chosen}, {_KIND}", selftest.checks().softmax
        check = functools.partial(check, *passes_of(chosen), device, operand)
        if chosen == "eager" or selftest.problem_of(who, str(operand), device, check) is None:
            break
    for passed in _NAMES[: _NAMES.index(chosen)] if name == "auto" else ():
        selftest.warn_once(f"{passed}, {_KIND}", device, f"Backend {chosen!r}")
    return chosen


@selftest.remembered
def _untested(name: str, source: str, device: torch.device, operand: torch.dtype) -> str:
    # Triton's kernels have no float64.
    names = tuple(each for each in _NAMES if each != "triton" or operand != torch.float64)
    types = compute_dtype(operand), operand
    return registry.select_for_products(name, source, _KIND, names, device, *types)[0]


def passes_of(backend: str) -> tuple[Pass, Pass]:
    """What joins a slice of the logits to the statistics, and what turns it into its gradient.

    Both take `(statistics, logits)` or `(logits, factors)`, and then `(target, first class, class weights)`.
    """
    if backend == "eager":
        return _statistics_eagerly, _gradient_eagerly
    if backend == "triton":  # imported where it is needed: it takes a second, and may not be there
        own = importlib.import_module(".triton.softmax", __package__)
        return own.statistics, own.gradient
    operators = torch.ops.fusedacc
    return operators.softmax_statistics_.default, operators.softmax_gradient_.default


@dataclass(frozen=True)
class Head:
    """A head's operands.

    Attributes:
        input: (tokens, width), contiguous.
        weight: (classes, width); its slices are cast to the input's dtype where it has another.
        bias: (classes), or None.
        target: int64 (tokens); what is no class is passed over.
        class_weights: (classes) of the arithmetic's dtype, or None; read where `smooths`.
        smooths: whether the labels are smoothed.
        slice_size: classes in a slice; None: as `block_sizes` has it.
        backend: as `backend_for` returns it.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weights: Tensor | None
    smooths: bool
    slice_size: int | None
    backend: str

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.input.dtype)

    def statistics(self) -> Tensor:
        """Of each token's logits: the largest, the sum of e^(logit - largest), the target's, and the weighted
        sum where `smooths`: (3 or 4, tokens)."""
        tokens = self.input.shape[0]
        found = self.input.new_zeros(4 if self.smooths else 3, tokens, dtype=self.compute_dtype)
        found[0] = -torch.inf
        join, _ = passes_of(self.backend)
        _, classes = block_sizes(self, forward=True)
        for first, _, logits, class_weights in self._slices(self.input, classes):
            join(found, logits, self.target, first, class_weights)
        return found

    def gradients(
        self, factors: Tensor, of_input: Tensor | None, of_bias: Tensor | None, add_rows: AddRows | None
    ) -> None:
        """Write the gradients of input and bias, and hand on what the weight's is made of.

        Args:
            factors: (4, tokens), as csrc/common/softmax.h has them.
            of_input: (tokens, width) of the arithmetic's dtype, uninitialised; None: not wanted.
            of_bias: (classes) likewise.
            add_rows: called for each slice, and block of tokens.
        """
        _, turn = passes_of(self.backend)
        tokens_at_once, classes = block_sizes(self)
        multiply = None
        if of_input is not None and self.input.dtype != of_input.dtype:
            select = matmul.select(of_input.device, of_input.dtype, self.input.dtype, tokens=classes)
            multiply = select.run
        for start in range(0, max(1, len(self.input)), tokens_at_once):
            block = slice(start, start + tokens_at_once)
            input, target = self.input[block], self.target[block]
            numbers = factors if len(input) == len(self.input) else factors[:, block].contiguous()
            for first, weight, logits, class_weights in self._slices(input, classes):
                turn(logits, numbers, target, first, class_weights)
                if of_input is not None:
                    keep = 1.0 if first else 0.0
                    if multiply is None:
                        of_input[block].addmm_(logits, weight, beta=keep)
                    else:
                        multiply(of_input[block], logits.t(), weight, 1.0, keep, None)
                if of_bias is not None:
                    part = logits.sum(0, dtype=of_bias.dtype)
                    rows = of_bias[first : first + len(part)]
                    rows.add_(part) if start else rows.copy_(part)
                if add_rows is not None:
                    add_rows(first, logits, input, start == 0)

    def _slices(self, input: Tensor, classes: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
        """The first class of each slice, its weight in the input's dtype, its logits, and class weights."""
        tokens = len(input)
        memory = input.new_empty(tokens * classes)
        for first in range(0, len(self.weight), classes):
            weight = self.weight[first : first + classes].to(input.dtype)
            logits = memory[: tokens * len(weight)].view(tokens, len(weight))
            if self.bias is None:
                torch.mm(input, weight.t(), out=logits)
            else:
                bias = self.bias[first : first + classes].to(input.dtype)
                torch.addmm(bias, input, weight.t(), out=logits)
            weighs = self.smooths and self.class_weights is not None
            yield first, weight, logits, self.class_weights[first : first + classes] if weighs else None  # type: ignore[index]


def block_sizes(head: Head, forward: bool = False) -> tuple[int, int]:
    """Return how many tokens the backward takes at once, and how many classes a slice has.

    In the forward, which has no products of gradients, a slice takes all tokens.
    """
    tokens, width = head.input.shape
    classes, size = len(head.weight), head.input.itemsize
    compute = head.compute_dtype.itemsize
    if head.slice_size is not None:
        return max(1, tokens), min(head.slice_size, classes)
    room = max(tokens * classes * compute // LOGITS_SHARE, LEAST_BYTES)
    room = min(room, head.weight.numel() * head.weight.itemsize) - _TOKEN_NUMBERS * tokens * compute
    # Products of 16-bit operands are rounded in parts, or their operands are cast. The input's gradient is
    # summed in the arithmetic's dtype.
    narrow = head.input.dtype == torch.bfloat16 and matmul.multiplies_bfloat16()
    of_product = of_token = 0
    if size != compute and not forward:
        of_product = width * (size if narrow else compute)
        of_token = width * compute + of_product
    at_once = tokens
    most = max(1, room * 4 // 5)  # each further block reads and writes the weight's whole sum
    if of_token * tokens > most:
        at_once = max(_STEP, math.ceil(tokens / math.ceil(of_token * tokens / most)))
    of_cast = width * size if head.weight.dtype != head.input.dtype else 0
    of_logits = max(1, at_once) * size
    if narrow:  # oneDNN packs a transposed operand, which takes more with several threads
        of_logits += of_logits // 2 if torch.get_num_threads() == 1 else 2 * of_logits
    of_class = of_logits + of_product + of_cast
    cached = GPU_BYTES if head.input.device.type != "cpu" else CACHED_BYTES
    found = min((room - of_token * at_once) // of_class, cached // (max(1, at_once) * size))
    return max(1, at_once), min(classes, max(_STEP, found // _STEP * _STEP))


def _statistics_eagerly(
    found: Tensor, logits: Tensor, target: Tensor, first: int, class_weights: Tensor | None
) -> None:
    wide = logits.to(found.dtype)
    if len(found) == 4:
        found[3] += (wide if class_weights is None else wide * class_weights).sum(1)
    place, inside = _places(target, first, wide.shape[1])
    found[2] = torch.where(inside, wide.gather(1, place)[:, 0], found[2])
    most = torch.maximum(found[0], wide.amax(1))
    # Of a token whose logits are all -inf so far the sum is still that of nothing.
    base = torch.where(most == -torch.inf, 0, most)
    found[1] *= (found[0] - base).exp()
    found[1] += (wide - base[:, None]).exp_().sum(1)
    found[0] = most


def _gradient_eagerly(
    logits: Tensor, factors: Tensor, target: Tensor, first: int, class_weights: Tensor | None
) -> None:
    log_sum, by, hit, spread = factors[:, :, None]
    wide = (logits.to(factors.dtype) - log_sum).exp_().mul_(by)
    wide -= spread if class_weights is None else spread * class_weights
    place, inside = _places(target, first, wide.shape[1])
    wide.scatter_add_(1, place, torch.where(inside[:, None], -hit, 0))
    logits.copy_(wide)


def _places(target: Tensor, first: int, classes: int) -> tuple[Tensor, Tensor]:
    """Where the targets are in the slice, (tokens, 1), and whether they are there."""
    place = target - first
    inside = (place >= 0) & (place < classes)
    return torch.where(inside, place, 0)[:, None], inside


def adder(multiply: matmul.Run, total: Tensor, scale: Number, keep: Number, noise: Noise | None) -> AddRows:
    """What adds to the slices of a sum: total <- keep * total + scale * the product.

    With `noise` elements take the random bits of their places in the whole sum.
    """

    def add(first: int, gradient: Tensor, input: Tensor, fresh: bool) -> None:
        rows = total[first : first + gradient.shape[1]]
        if noise is None:
            multiply(rows, gradient, input, scale, keep if fresh else 1.0, None)
        else:
            place = first * total.stride(0)
            matmul_eager.accumulate_(rows, gradient, input, scale, keep if fresh else 1.0, noise, place)

    return add


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors on one device, with memory."""
    own = [tensor for tensor in tensors if tensor is not None]
    return all(checks.is_plain(tensor) and tensor.device == own[0].device for tensor in own)
