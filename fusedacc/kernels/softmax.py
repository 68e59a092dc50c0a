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

from . import cpu_rules, matmul, registry, selftest, torch_private
from .dtypes import Number

#: The backends that have a kernel for the softmax of a slice.
_NAMES = ("triton", "cpu", "eager")
#: All temporary memory is at most this share of the logits, or so many bytes where that is more.
LOGITS_SHARE = 16
LEAST_BYTES = 2**20
#: The bytes of a slice of the logits, which is read again while a cache holds it; on a GPU it need not be.
CACHED_BYTES = 2**22
GPU_BYTES = 2**28
#: The slice's classes are a multiple of this.
_STEP = 16
#: oneDNN's product packs at most so many rows of the weight for each thread.
_ONEDNN_ROWS = 192
#: Numbers of the arithmetic's dtype that are held for each token beside its logits.
_TOKEN_NUMBERS = 12

#: `(rows of a sum, left, right, beta)`: rows <- beta * rows + left^T right.
Add = Callable[[Tensor, Tensor, Tensor, Number], None]
Pass = Callable[[Tensor, Tensor, Tensor, int, Tensor | None], None]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic, and of the loss."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def select(device: torch.device, operand: torch.dtype, backend: str = "auto") -> tuple[str, str]:
    """Return the backend that runs the softmax of a slice, and why; arguments as for `matmul.select`.

    The first call for a GPU checks the results (`selftest`).
    """
    # Triton's kernels have no float64.
    names = tuple(name for name in _NAMES if name != "triton" or operand != torch.float64)
    work = registry.Work("slices of logits", names, device, compute_dtype(operand), operand)
    return registry.select_checked(_check, backend, work)


def _check(name: str, device: torch.device, operand: torch.dtype, _: torch.dtype) -> str | None:
    return selftest.checks().softmax(*passes_of(name), device, operand)


def passes_of(backend: str) -> tuple[Pass, Pass]:
    """What joins a slice of the logits to the statistics, and what turns it into its gradient.

    Both take `(statistics, logits)` or `(logits, factors)`, and then `(target, first class, class weights)`.
    """
    if backend == "eager":
        return _statistics_eagerly, _gradient_eagerly
    if backend == "triton":  # imported where it is needed: it takes a second, and may not be there
        module = importlib.import_module(".triton.softmax", __package__)
        return module.statistics, module.gradient
    operators = torch.ops.fusedacc
    return operators.softmax_statistics_.default, operators.softmax_gradient_.default


def _blas(input: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor) -> Tensor:
    logits = memory[: len(input) * len(weight)].view(len(input), len(weight))
    if bias is None:
        return torch.mm(input, weight.t(), out=logits)
    return torch.addmm(bias, input, weight.t(), out=logits)


def _onednn(input: Tensor, weight: Tensor, bias: Tensor | None, _: Tensor) -> Tensor:
    return torch_private.onednn_linear(input, weight, bias)


class Slice(NamedTuple):
    """A slice of the vocabulary, for some tokens."""

    #: The number of its first class.
    first: int
    #: Its classes, in the index of the head's tensors.
    classes: slice
    #: Its rows of the weight, in the input's dtype.
    weight: Tensor
    logits: Tensor
    #: None without label smoothing or class weights.
    class_weights: Tensor | None


class LossFactors(NamedTuple):
    """What the loss is made of."""

    #: The factor of each token's own loss.
    of_target: Tensor
    #: The factor of each class's loss, under label smoothing.
    of_each_class: float
    #: The weight of all classes.
    all_classes: Number
    #: The divisor of the mean, which is 0 if all tokens are ignored.
    divisor: Number


class BlockSizes(NamedTuple):
    """How many tokens are taken at once, and how many classes a slice has."""

    tokens: int
    classes: int


class Options(NamedTuple):
    """The options of the loss, as in `linear_cross_entropy`."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    slice_size: int | None


@dataclass(frozen=True)
class Head:
    """A head's operands, the options of its loss, and the backend of its passes (`select`).

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
        statistics = self.input.new_zeros(rows, len(self.input), dtype=compute_dtype(self.input.dtype))
        statistics[0] = -torch.inf
        add_slice, _ = passes_of(self.backend)
        sizes = block_sizes(self, forward=True, in_place=True)
        for part in self.slices(self.input, sizes.classes):
            add_slice(statistics, part.logits, self.target, part.first, part.class_weights)
            del part  # before the next slice is allocated
        largest, total, of_target, *weighted = statistics
        log_sum = largest + total.log()
        factors = self._loss_factors()
        terms = [factors.of_target * (log_sum - of_target)]
        if weighted:
            terms.append(factors.of_each_class * (factors.all_classes * log_sum - weighted[0]))
        terms = [torch.where(self._ignored, 0, term) for term in terms]
        if self.options.reduction != "none":
            # Divide each sum, as PyTorch does: with a divisor of 0 the loss is nan if only one sum is 0 too.
            terms = [term.sum() / factors.divisor for term in terms]
        return sum(terms[1:], terms[0]), log_sum

    def factors(self, gradient: Tensor, log_sum: Tensor) -> Tensor:
        """Return the factors (4, tokens) that csrc/common/softmax.h describes. `gradient`: the loss's."""
        factors = self._loss_factors()
        by = torch.where(self._ignored, 0, gradient / factors.divisor)
        hit = by * factors.of_target
        spread = factors.of_each_class
        if not spread:  # `by` and the weight of all classes may be infinite, and 0 times infinity is nan
            return torch.stack([log_sum, hit, hit, torch.zeros_like(hit)])
        return torch.stack([log_sum, hit + by * spread * factors.all_classes, hit, by * spread])

    @property
    def _ignored(self) -> Tensor:
        return self.target == self.options.ignore_index

    def _loss_factors(self) -> LossFactors:
        ignored = self._ignored
        weights = self.class_weights
        smoothing = self.options.label_smoothing
        by_token = (~ignored).to(compute_dtype(self.input.dtype))
        all_classes: Number = len(self.weight)
        if weights is not None:
            by_token = torch.where(ignored, 0, weights[torch.where(ignored, 0, self.target)])
            all_classes = weights.sum()
        return LossFactors(
            of_target=by_token * (1 - smoothing),
            of_each_class=smoothing / len(self.weight),
            all_classes=all_classes,
            divisor=by_token.sum() if self.options.reduction == "mean" else 1.0,
        )

    def slices(self, input: Tensor, classes: int) -> Iterator[Slice]:
        """Yield all slices of `classes` classes, with the logits of `input`.

        Drop a slice before the next one: its memory is used again.
        """
        class_weights = self.class_weights if self.options.label_smoothing > 0 else None
        multiply = _onednn if self.onednn_bytes else _blas
        memory = input.new_empty(0 if self.onednn_bytes else len(input) * classes)
        cast = None
        if self.weight.dtype != input.dtype:
            cast = input.new_empty(classes, input.shape[1])
        for first in range(0, len(self.weight), classes):
            part = slice(first, first + classes)
            weight = self.weight[part]
            if cast is not None:
                weight = cast[: len(weight)].copy_(weight)
            bias = None if self.bias is None else self.bias[part].to(input.dtype)
            yield Slice(
                first=first,
                classes=part,
                weight=weight,
                logits=multiply(input, weight, bias, memory),
                class_weights=None if class_weights is None else class_weights[part],
            )

    @functools.cached_property
    def onednn_bytes(self) -> int:
        """Return the most bytes that oneDNN's buffers take if it multiplies the logits; 0 if it does not."""
        if self.input.device.type != "cpu" or self.input.dtype != torch.float32:
            return 0
        if not (cpu_rules.onednn_multiplies_logits() and self.weight.is_contiguous()):
            return 0
        most = _ONEDNN_ROWS * torch.get_num_threads() * self.input[:1].nbytes
        return most if most <= _room(self) // 4 else 0


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
        self, total: Tensor | None = None, add: Add | None = None, beta: Number = 0.0, in_place: bool = True
    ) -> None:
        """Make the gradients of input and bias, and let `add` add the weight's to beta * total.

        in_place: whether `add` needs no temporary memory.
        """
        head = self.head
        compute = compute_dtype(self.head.input.dtype)
        of_input = torch.empty_like(head.input) if self.wants_input else None
        bias = head.bias if self.wants_bias else None
        of_bias = None if bias is None else torch.empty_like(bias, dtype=compute)
        _, to_gradient = passes_of(head.backend)
        to_input = matmul.select(
            head.input.device,
            compute,
            head.input.dtype,
            head.backend,
            tokens=len(head.weight),
            in_slices=True,
        )
        in_place = in_place and (to_input.in_place or not self.wants_input)
        sizes = block_sizes(head, forward=False, in_place=in_place)

        def run_block(start: int) -> None:  # when it returns, the block's memory is free
            block = slice(start, start + sizes.tokens)
            input = head.input[block]
            factors = self.factors[:, block].contiguous()
            sums = None if of_input is None else of_input[block].to(compute)
            for part in head.slices(input, sizes.classes):
                logits = part.logits
                first = part.first
                to_gradient(logits, factors, head.target[block], first, part.class_weights)
                if sums is not None:
                    to_input.run(sums, logits.t(), part.weight, 1.0, 1.0 if first else 0.0)
                if of_bias is not None:
                    before = of_bias[part.classes] if start else 0
                    of_bias[part.classes] = logits.sum(0, dtype=compute) + before
                if total is not None and add is not None:
                    add(total[part.classes], logits, input, 1.0 if start else beta)
                del logits, part  # before the next slice is allocated
            if of_input is not None and sums is not None and of_input.dtype != compute:
                of_input[block] = sums

        for start in range(0, max(1, len(head.input)), sizes.tokens):
            run_block(start)
        self._made = of_input, None if bias is None or of_bias is None else of_bias.to(bias.dtype)

    def of_weight(self, like: Tensor) -> Tensor:
        """Return the weight's gradient as a new tensor, rounded as in autograd."""
        made = torch.empty_like(like)
        in_place = like.dtype == self.head.input.dtype

        def add(rows: Tensor, left: Tensor, right: Tensor, beta: Number) -> None:
            if in_place:
                rows.addmm_(left.t(), right, beta=float(beta))
            else:
                product = torch.mm(left.t(), right)
                rows.copy_(product) if beta == 0 else rows.add_(product)

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
    tokens = len(head.input)
    classes = len(head.weight)
    compute = compute_dtype(head.input.dtype).itemsize
    room = max(tokens * classes * compute // LOGITS_SHARE, LEAST_BYTES)
    return min(room, head.weight.numel() * head.weight.itemsize) - _TOKEN_NUMBERS * tokens * compute


def block_sizes(head: Head, *, forward: bool, in_place: bool) -> BlockSizes:
    """Return the sizes of blocks and slices.

    In the forward, which has no products of gradients, a slice takes all tokens. in_place: whether products
    need no temporary memory.
    """
    tokens, width = head.input.shape
    classes = len(head.weight)
    size = head.input.itemsize
    compute = compute_dtype(head.input.dtype).itemsize
    if head.options.slice_size is not None:
        return BlockSizes(max(1, tokens), min(head.options.slice_size, classes))
    room = _room(head) - head.onednn_bytes
    on_cpu = head.input.device.type == "cpu"
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
        if cpu_rules.multiplies_bfloat16() and torch.get_num_threads() == 1:
            of_logits += of_logits // 2
        else:
            of_logits += 2 * of_logits
    fitting = (room - of_token * at_once) // (of_logits + of_product + of_cast)
    fitting = min(fitting, (CACHED_BYTES if on_cpu else GPU_BYTES) // (at_once * size))
    return BlockSizes(at_once, min(classes, max(_STEP, fitting // _STEP * _STEP)))


def _statistics_eagerly(
    statistics: Tensor, logits: Tensor, target: Tensor, first: int, class_weights: Tensor | None
) -> None:
    wide = logits.to(statistics.dtype)
    if len(statistics) == 4:
        statistics[3] += (wide if class_weights is None else wide * class_weights).sum(1)
    place, inside = _places(target, first, wide.shape[1])
    statistics[2] = torch.where(inside, wide.gather(1, place)[:, 0], statistics[2])
    largest = torch.maximum(statistics[0], wide.amax(1))
    # Of a token whose logits are all -inf so far the sum is still that of nothing.
    base = torch.where(largest == -torch.inf, 0, largest)
    statistics[1] *= (statistics[0] - base).exp()
    statistics[1] += (wide - base[:, None]).exp_().sum(1)
    statistics[0] = largest


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
