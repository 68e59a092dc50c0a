"""A Linear whose backward adds its weight gradient to the sum inside the matrix product."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..accumulators import Lane, Slot
from ..accumulators.param import nothing
from ..autograd.capture import Capture
from ..kernels import matmul, native_module
from ..kernels.checks import ORDINARY_TYPES
from ..kernels.cpu_rules import class_of
from ..kernels.dtypes import PAIRS
from ..kernels.local_parts import is_distributed, local
from ..kernels.torch_private import frame_compiler
from . import compiled
from .patched_forward import PATCHED, TRACED, PatchedForward, WeightSum

#: The native functions. Without them no module is patched.
_native: Any = native_module.loaded()
#: Why PyTorch computes a call, for `explain()`.
OTHER_BIAS = (
    "a forward has read a bias of another dtype or shape, or of a subclass, and PyTorch computed that call"
)


class LatestProduct(NamedTuple):
    """The arguments and the result of the last call of `ProductSum.product`, and the parameter's lane."""

    lane: Lane | None
    operand: torch.dtype | None
    tokens: int
    run: matmul.Run | None


class LatestCast(NamedTuple):
    """The last cast of a weight, which it does not keep alive, and the weight's state at that time."""

    reference: Callable[[], Tensor | None]
    state: tuple


_NO_PRODUCT = LatestProduct(None, None, -1, None)


class ProductSum(WeightSum):
    """The sum of the weight (out, in) of a linear function, to which products are added."""

    #: Whether the weight is (in, out).
    transposed = False
    #: The types of biases whose gradients the backward can return.
    biases = ORDINARY_TYPES | {type(None)}

    def __init__(self, slot: Slot, capture: Capture) -> None:
        super().__init__(slot, capture)
        self._products: dict[tuple, matmul.Selection] = {}
        self._latest_product = _NO_PRODUCT
        self._latest_cast = LatestCast(nothing, ())

    def product(self, operand: torch.dtype, tokens: int) -> matmul.Run | None:
        """Return the function that adds a product of operands of this dtype to the sum; None if there is
        none.
        """
        lane = self.slot.lane
        latest = self._latest_product
        if latest.lane is lane and latest.operand is operand and latest.tokens == tokens:
            return latest.run
        key = lane, operand, class_of(tokens)
        chosen = self._products.get(key)
        capture = self._capture()
        device, _, accumulate_dtype = lane
        if (
            chosen is None
            and capture is not None
            and (operand, accumulate_dtype) in PAIRS
            and not capture.accumulators.noise.rounds(accumulate_dtype)
        ):
            backend = capture.accumulators.backend
            chosen = matmul.select(device, accumulate_dtype, operand, backend, tokens=tokens)
            self._products[key] = chosen
        run = None
        if chosen is not None:
            run = chosen.run
            # Native code does not know lanes: the weight may have been on another device before.
            self._native.set_product_method(operand, accumulate_dtype, tokens, chosen.product_method)
        self._latest_product = LatestProduct(lane, operand, tokens, run)
        return run

    def select_again(self) -> None:
        """Forget which products were selected."""
        self._products.clear()
        self._latest_product = _NO_PRODUCT
        self._native.forget_product_methods()

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in another dtype: the window's cast with `keep_casts`, else a valid last cast.

        The last cast is valid while a graph refers to it and the weight has not changed. Like the cache of
        autocast, it does not notice writes through `.data`.
        """
        if self.kept is not None:
            kept = self.kept.of(self.slot, weight, dtype)
            if kept is not None:
                return kept
        state = dtype, weight._version, weight.data_ptr(), self.updates
        latest = self._latest_cast  # read once, because other threads cast too
        cast = latest.reference()
        if cast is None or latest.state != state:
            cast = weight.detach().to(dtype)
            self._latest_cast = LatestCast(weakref.ref(cast), state)
        return cast

    def add_product(self, node: Any, left: Tensor, right: Tensor) -> bool:
        """Try to add left^T right to the sum, and return whether the gradient needs no further work.

        node: as in `Capture.take_in_place`. Under tensor parallelism left and right are DTensors, and each
        rank adds its part of the product to its own shard.
        """
        if not is_distributed(self.slot.param):
            return self._add_product(node, left, right, may_wait=True)
        shard = local(self.slot.param)
        if not _fits(self.slot.param, left, right):
            self.slot.left_to = PARTIAL
            return False
        left = _part(left)
        right = _part(right)
        if shard.shape != (left.shape[1], right.shape[1]):
            self.slot.left_to = PARTIAL
            return False
        return bool(left.numel() and right.numel()) and self._add_product(node, left, right, may_wait=False)

    def _add_product(self, node: Any, left: Tensor, right: Tensor, may_wait: bool) -> bool:
        multiply = self.product(left.dtype, left.shape[0])
        if multiply is None:
            return False
        return self.accumulate_in_place(
            node,
            lambda total, scale, beta: multiply(total, left, right, scale, beta),
            (left, right),
            may_wait=may_wait,
        )

    def output(self, input: Tensor, weight: Any, bias: Any) -> Tensor | None:
        """Return the function's output for these values.

        Returns None if PyTorch must compute it, or raise.
        """
        if self.left_to_torch(weight, input):
            return _linear_of_shards(self, input, weight, bias)
        if type(bias) not in self.biases or not _bias_fits(bias, weight):
            self.note(OTHER_BIAS)
            return None
        operand = _native.operand_of(input, weight, bias, self.transposed)
        if operand is None:
            return None
        self.product(operand.dtype, operand.shape[:-1].numel())  # select it now, not in the backward
        used = None if operand.dtype is weight.dtype else self.cast(weight, operand.dtype)
        return _native.linear(operand, weight, bias, used, self.ticket, self.transposed)


class PatchedLinear(PatchedForward, ProductSum):
    """Replaces the forward of an `nn.Linear` with weight (out, in)."""

    path = "gemm"
    keeps_cast = True

    @staticmethod
    def forward(module: Any, input: Tensor) -> Tensor:
        if is_compiling():  # check this first: the compiler makes guards of all values read before
            traced = getattr(module, TRACED)
            if not compiled.replaces(traced, module):
                return type(module).forward(module, input)
            weight = module.weight
            bias = module.bias
            output = _compiled(traced, input, weight, bias)
            return F.linear(input, weight, bias) if output is None else output
        patched = module.__dict__.get(PATCHED)
        if patched is None or type(module).forward is not patched.stock:
            return type(module).forward(module, input)
        weight = patched.read(module, "weight")
        bias = patched.read(module, "bias")
        # Try the function for ordinary calls first, with as few calls as possible.
        if (
            weight is patched.slot.param
            and type(bias) in patched.biases
            and forward_ad._current_level < 0
            and type(input) in ORDINARY_TYPES
        ):
            output = _native.try_linear(input, weight, bias, patched.ticket, patched.transposed)
            if output is not None:
                return output
        output = patched.output(input, weight, bias)
        return patched.plain(module, input, weight, bias) if output is None else output

    @staticmethod
    def plain(module: Any, input: Tensor, weight: Any, bias: Any) -> Tensor:
        """Compute what the module's own forward computes with these values."""
        return F.linear(input, weight, bias)


class PatchedConv1D(PatchedLinear):
    """Replaces the forward of Transformers' `Conv1D`, a Linear with weight (in, out)."""

    transposed = True
    compiled_by_itself = True
    biases = ORDINARY_TYPES

    @staticmethod
    def forward(module: Any, x: Tensor) -> Tensor:
        if is_compiling():
            traced = getattr(module, TRACED)
            if not compiled.replaces(traced, module):
                return type(module).forward(module, x)
            columns = module.nf
            bias = module.bias
            weight = module.weight
            fits = bias is not None and columns == weight.shape[-1]
            output = _compiled(traced, x, weight, bias, transposed=True) if fits else None
            return _conv1d(x, columns, bias, weight) if output is None else output
        patched = module.__dict__.get(PATCHED)
        if patched is None or frame_compiler() is not None or module.nf != patched.slot.param.shape[-1]:
            return type(module).forward(module, x)
        return PatchedLinear.forward(module, x)

    @staticmethod
    def plain(module: Any, input: Tensor, weight: Any, bias: Any) -> Tensor:
        return _conv1d(input, module.nf, bias, weight)


def _conv1d(x: Tensor, columns: int, bias: Any, weight: Any) -> Tensor:
    """Compute what the forward of Transformers' `Conv1D` computes."""
    return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view((*x.size()[:-1], columns))


def _compiled(traced: Any, input: Tensor, weight: Any, bias: Any, transposed: bool = False) -> Tensor | None:
    """Return the output in a graph of torch.compile; None if PyTorch must compute it, or raise."""
    if not compiled.accumulates(traced, weight) or not (bias is None or type(bias) in ORDINARY_TYPES):
        return None
    return compiled.linear(input, weight, bias, traced.ticket, transposed, traced.keeps_cast)


def _bias_fits(bias: Tensor | None, weight: Tensor) -> bool:
    """Whether the backward of a Linear can return the gradient of this bias."""
    return bias is None or (bias.dtype == weight.dtype and bias.dim() == 1)


PARTIAL = (
    "tensor parallel, and its gradient is a partial sum over the device mesh, or in another layout than "
    "the weight"
)


def _linear_of_shards(patched: Any, input: Any, weight: Any, bias: Any) -> Tensor | None:
    """Return the output for DTensors; None in all other cases.

    torch's DTensor operators compute everything but the weight's gradient, so layouts and communication are
    PyTorch's.
    """
    if (
        not (is_distributed(weight) and is_distributed(input) and weight.requires_grad)
        or weight is not patched.slot.param
        or not (bias is None or (is_distributed(bias) and _bias_fits(bias, weight)))
        or patched.transposed
        or not patched.may_record()
        or input.dtype != weight.dtype
        or torch.is_autocast_enabled(input.device.type)
    ):
        return None
    return _native.linear(input, weight, bias, None, patched.ticket, False)


def _fits(weight: Any, rows: Any, inputs: Any) -> bool:
    """Whether rows^T inputs needs no communication and has the weight's placements."""
    if not (is_distributed(rows) and rows.device_mesh == inputs.device_mesh == weight.device_mesh):
        return False
    for placed, row, column in zip(weight.placements, rows.placements, inputs.placements, strict=True):
        if not (
            (placed.is_replicate() and row.is_replicate() and column.is_replicate())
            or (placed.is_shard(0) and row.is_shard(1) and column.is_replicate())
            or (placed.is_shard(1) and row.is_replicate() and column.is_shard(1))
        ):
            return False
    return True


def _part(tensor: Any) -> Tensor:
    """Return this rank's part, after waiting for pending communication."""
    part: Any = local(tensor)
    return part.wait() if hasattr(part, "wait") else part
