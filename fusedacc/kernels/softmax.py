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
from typing import NamedTuple

import torch
from torch import Tensor

from . import cpu_rules, matmul, registry, selftest
from .dtypes import Number

#: The backends that have a kernel for the softmax of a slice.
_NAMES = ("cuda", "triton", "cpu", "eager")
#: All temporary memory is at most this share of the logits, or so many bytes where that is more.
LOGITS_SHARE, LEAST_BYTES = 16, 2**20
#: The bytes of a slice of the logits, which is read again while a cache holds it; on a GPU it need not be.
CACHED_BYTES, GPU_BYTES = 2**22, 2**28
#: The slice's classes are a multiple of this.
_STEP = 16
#: oneDNN's product packs at most so many rows of the weight for each thread.
_ONEDNN_ROWS = 192
#: Numbers of the arithmetic's dtype that are held for each token beside its logits.
_TOKEN_NUMBERS = 12

#: `(rows of a sum, left, right, keep)`: rows <- keep * rows + left^T right.
Add = Callable[[Tensor, Tensor, Tensor, Number], None]
Pass = Callable[[Tensor, Tensor, Tensor, int, Tensor | None], None]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic, and of the loss."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def backend_for(device: torch.device, operand: torch.dtype, backend: str = "auto") -> str:
    """The backend that runs the softmax of a slice; arguments as for `matmul.select`.

    The first call for a GPU checks the results (`selftest`).
    """
    # Triton's kernels have no float64.
    names = tuple(each for each in _NAMES if each != "triton" or operand != torch.float64)
    pair = compute_dtype(operand), operand
    return registry.select_checked(_check, backend, "slices of logits", names, device, *pair)[0]


def _check(name: str, device: torch.device, operand: torch.dtype, _: torch.dtype) -> str | None:
    return selftest.checks().softmax(*passes_of(name), device, operand)


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


def _blas(input: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor) -> Tensor:
    logits = memory[: len(input) * len(weight)].view(len(input), len(weight))
    if bias is None:
        return torch.mm(input, weight.t(), out=logits)
    return torch.addmm(bias, input, weight.t(), out=logits)


def _onednn(input: Tensor, weight: Tensor, bias: Tensor | None, _: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


class Options(NamedTuple):
    """The options of the loss, as in `linear_cross_entropy`."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    slice_size: int | None


@dataclass(frozen=True)
class Head:
    """A head's operands, the options of its loss, and the backend of its passes (`backend_for`).

    `input` (tokens, width) is contiguous. Slices of `weight` (classes, width) and `bias` (classes) are cast
    to its dtype. `target` (tokens) is int64, and `class_weights` (classes) has the arithmetic's dtype.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weights: Tensor | None
    options: Options
    backend: str

    def loss(self) -> tuple[Tensor, Tensor]:
        """Return the loss, and each token's log-sum-exp. Raises IndexError as `_check_targets`."""
        _check_targets(self.target, self.options.ignore_index, len(self.weight))
        rows = 4 if self.options.label_smoothing > 0 else 3  # as in csrc/common/softmax.h
        found = self.input.new_zeros(rows, len(self.input), dtype=compute_dtype(self.input.dtype))
        found[0] = -torch.inf
        join, _ = passes_of(self.backend)
        for first, _, logits, class_weights in self.slices(self.input, block_sizes(self, True, True)[1]):
            join(found, logits, self.target, first, class_weights)
            del logits  # before the next slice is allocated
        top, total, own, *weighted = found
        log_sum = top + total.log()
        hits, spread, whole, divisor = self._shares()
        parts = [hits * (log_sum - own)]
        if weighted:
            parts.append(spread * (whole * log_sum - weighted[0]))
        parts = [torch.where(self._ignored, 0, part) for part in parts]
        if self.options.reduction != "none":
            # Divide each sum, as PyTorch does: with a divisor of 0 the loss is nan if only one sum is 0 too.
            parts = [part.sum() / divisor for part in parts]
        return sum(parts[1:], parts[0]), log_sum

    def factors(self, gradient: Tensor, log_sum: Tensor) -> Tensor:
        """Return the factors (4, tokens) that csrc/common/softmax.h describes. `gradient`: the loss's."""
        hits, spread, whole, divisor = self._shares()
        by = torch.where(self._ignored, 0, gradient / divisor)
        hit = by * hits
        if not spread:  # `by` and the weight of all classes may be infinite, and 0 times infinity is nan
            return torch.stack([log_sum, hit, hit, torch.zeros_like(hit)])
        return torch.stack([log_sum, hit + by * spread * whole, hit, by * spread])

    @property
    def _ignored(self) -> Tensor:
        return self.target == self.options.ignore_index

    def _shares(self) -> tuple[Tensor, float, Number, Number]:
        """Return the factor of each token's own loss, that of each class's loss under label smoothing, the
        weight of all classes, and the divisor of the mean, which is 0 if all tokens are ignored.
        """
        ignored, weights, smoothing = self._ignored, self.class_weights, self.options.label_smoothing
        by_token = (~ignored).to(compute_dtype(self.input.dtype))
        whole: Number = len(self.weight)
        if weights is not None:
            by_token = torch.where(ignored, 0, weights[torch.where(ignored, 0, self.target)])
            whole = weights.sum()
        divisor = by_token.sum() if self.options.reduction == "mean" else 1.0
        return by_token * (1 - smoothing), smoothing / len(self.weight), whole, divisor

    def slices(self, input: Tensor, classes: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
        """Yield each slice's first class, weight in the input's dtype, logits, and class weights."""
        class_weights = self.class_weights if self.options.label_smoothing > 0 else None
        cast, multiply = None, _onednn if self.onednn_bytes else _blas
        memory = input.new_empty(0 if self.onednn_bytes else len(input) * classes)
        if self.weight.dtype != input.dtype:
            cast = input.new_empty(classes, input.shape[1])
        for first in range(0, len(self.weight), classes):
            part = slice(first, first + classes)
            weight = self.weight[part]
            if cast is not None:
                weight = cast[: len(weight)].copy_(weight)
            bias = None if self.bias is None else self.bias[part].to(input.dtype)
            by_class = None if class_weights is None else class_weights[part]
            yield first, weight, multiply(input, weight, bias, memory), by_class

    @functools.cached_property
    def onednn_bytes(self) -> int:
        """Return the most bytes that oneDNN's buffers take if it multiplies the logits; 0 if it does not."""
        given, most = self.input, _ONEDNN_ROWS * torch.get_num_threads() * self.input[:1].nbytes
        if given.device.type != "cpu" or given.dtype != torch.float32 or not 0 < most <= _room(self) // 4:
            return 0
        return most if cpu_rules.onednn_multiplies_logits() and self.weight.is_contiguous() else 0


def _check_targets(target: Tensor, ignore_index: int, classes: int) -> None:
    """Raise IndexError for targets that are no class. On a GPU, assert without waiting for it."""
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if target.device.type != "cpu":
        torch._assert_async(
            ~wrong.any(), f"a target is no class and not ignored: allowed are 0 to {classes - 1}"
        )
    elif type(target) is Tensor and wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds; allowed: 0 to {classes - 1}")


@dataclass
class Gradients:
    """The gradients of a head, made in one pass over its slices by the first method that is called.

    `factors` are those of the head. The next fields say whether input and bias need a gradient.
    """

    head: Head
    factors: Tensor
    wants_input: bool
    wants_bias: bool
    _made: tuple[Tensor | None, Tensor | None] | None = None

    def run(
        self, total: Tensor | None = None, add: Add | None = None, keep: Number = 0.0, in_place: bool = True
    ) -> None:
        """Make the gradients of input and bias, and let `add` add the weight's to keep * total.

        in_place: whether `add` needs no temporary memory.
        """
        head, own, compute = self.head, self.head.input, compute_dtype(self.head.input.dtype)
        of_input = torch.empty_like(own) if self.wants_input else None
        bias = head.bias if self.wants_bias else None
        of_bias = None if bias is None else torch.empty_like(bias, dtype=compute)
        _, turn = passes_of(head.backend)
        to_input = matmul.select(
            own.device, compute, own.dtype, head.backend, tokens=len(head.weight), in_slices=True
        )
        in_place = in_place and (to_input.in_place or not self.wants_input)
        tokens_at_once, classes = block_sizes(head, False, in_place)

        def run_block(start: int) -> None:  # when it returns, the block's memory is free
            block = slice(start, start + tokens_at_once)
            input, factors = own[block], self.factors[:, block].contiguous()
            sums = None if of_input is None else of_input[block].to(compute)
            for first, weight, logits, class_weights in head.slices(input, classes):
                turn(logits, factors, head.target[block], first, class_weights)
                part = slice(first, first + len(weight))
                if sums is not None:
                    to_input.run(sums, logits.t(), weight, 1.0, 1.0 if first else 0.0, None)
                if of_bias is not None:
                    of_bias[part] = logits.sum(0, dtype=compute) + (of_bias[part] if start else 0)
                if total is not None and add is not None:
                    add(total[part], logits, input, 1.0 if start else keep)
                del logits  # before the next slice is allocated
            if of_input is not None and sums is not None and of_input.dtype != compute:
                of_input[block] = sums

        for start in range(0, max(1, len(own)), tokens_at_once):
            run_block(start)
        self._made = of_input, None if bias is None or of_bias is None else of_bias.to(bias.dtype)

    def of_weight(self, like: Tensor) -> Tensor:
        """Return the weight's gradient as a new tensor, rounded as in autograd."""
        made, in_place = torch.empty_like(like), like.dtype == self.head.input.dtype

        def add(rows: Tensor, left: Tensor, right: Tensor, keep: Number) -> None:
            if in_place:
                rows.addmm_(left.t(), right, beta=float(keep))
            else:
                product = torch.mm(left.t(), right)
                rows.copy_(product) if keep == 0 else rows.add_(product)

        self.run(made, add, in_place=in_place)
        return made

    def all(self, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias, in the operands' dtypes; None if not wanted.

        weight: the weight, if its gradient is wanted.
        """
        of_weight = None if weight is None else self.of_weight(weight)
        if self._made is None and (self.wants_input or self.wants_bias):
            self.run()
        of_input, of_bias = self._made or (None, None)
        return of_input, of_weight, of_bias


def _room(head: Head) -> int:
    """Return the bytes that slices of logits and the memory of products may take."""
    tokens, classes = len(head.input), len(head.weight)
    compute = compute_dtype(head.input.dtype).itemsize
    room = max(tokens * classes * compute // LOGITS_SHARE, LEAST_BYTES)
    return min(room, head.weight.numel() * head.weight.itemsize) - _TOKEN_NUMBERS * tokens * compute


def block_sizes(head: Head, forward: bool, in_place: bool) -> tuple[int, int]:
    """Return how many tokens are taken at once, and how many classes a slice has.

    In the forward, which has no products of gradients, a slice takes all tokens. in_place: whether products
    need no temporary memory.
    """
    (tokens, width), options = head.input.shape, head.options
    classes, size = len(head.weight), head.input.itemsize
    compute = compute_dtype(head.input.dtype).itemsize
    if options.slice_size is not None:
        return max(1, tokens), min(options.slice_size, classes)
    room = _room(head) - head.onednn_bytes
    on_cpu = head.input.device.type == "cpu"
    narrow = head.input.dtype == torch.bfloat16 and cpu_rules.multiplies_bfloat16()
    # The operands of products of 16 bits are cast.
    of_product = 0 if in_place or size == compute else width * compute
    # The gradient of a 16-bit input is summed in the arithmetic's dtype.
    of_token = 0 if forward or size == compute else width * compute + of_product
    at_once = max(1, tokens)
    most = max(1, room * 4 // 5)  # each further block reads and writes the weight's whole sum
    if of_token * tokens > most:
        at_once = max(_STEP, math.ceil(tokens / math.ceil(of_token * tokens / most)))
    of_cast = width * size if head.weight.dtype != head.input.dtype else 0
    of_logits = at_once * size
    if on_cpu and head.input.dtype == torch.bfloat16:
        # oneDNN packs a transposed operand, which takes more with several threads. Without bfloat16
        # instructions it multiplies into a float32 copy.
        of_logits += of_logits // 2 if narrow and torch.get_num_threads() == 1 else 2 * of_logits
    found = (room - of_token * at_once) // (of_logits + of_product + of_cast)
    found = min(found, (CACHED_BYTES if on_cpu else GPU_BYTES) // (at_once * size))
    return at_once, min(classes, max(_STEP, found // _STEP * _STEP))


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
