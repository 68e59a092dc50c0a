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
from ..kernels import matmul
from ..kernels.checks import ORDINARY_TYPES
from ..kernels.cpu_rules import class_of
from ..kernels.dtypes import PAIRS
from ..kernels.local_parts import is_distributed, local
from ..kernels.torch_state import frame_compiler, runs_as_written
from . import compiled
from .kept_cast import CastFunction
from .patched_forward import PATCHED, TRACED, PatchedForward

#: Why PyTorch computes a call, for `explain()`.
OTHER_BIAS = (
    "a forward has read a bias of another dtype or shape, or of a subclass, and PyTorch computed that call"
)


class LatestProduct(NamedTuple):
    """The arguments and the result of the last call of `PatchedLinear.product`, and the parameter's lane."""

    lane: Lane | None
    operand: torch.dtype | None
    tokens: int
    run: matmul.Run | None


class LatestCast(NamedTuple):
    """The last cast of a weight, which it does not keep alive, and the weight's state at that time."""

    reference: Callable[[], Tensor | None]
    state: tuple


_NO_PRODUCT = LatestProduct(None, None, -1, None)


class PatchedLinear(PatchedForward):
    """Replaces the forward of an `nn.Linear` with weight (out, in)."""

    path = "gemm"
    native_function = "product"
    keeps_cast = True
    #: The types of biases whose gradients the backward can return.
    biases = ORDINARY_TYPES | {type(None)}

    def __init__(self, module: torch.nn.Module, slot: Slot, capture: Capture) -> None:
        super().__init__(module, slot, capture)
        self._products: dict[tuple, matmul.Run] = {}
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
        run = self._products.get(key)
        capture = self._capture()
        device, _, accumulate_dtype = lane
        if (
            run is None
            and capture is not None
            and (operand, accumulate_dtype) in PAIRS
            and not capture.accumulators.noise.rounds(accumulate_dtype)
        ):
            backend = capture.accumulators.backend
            chosen = matmul.select(device, accumulate_dtype, operand, backend, tokens=tokens)
            run = chosen.run
            self._products[key] = run
            if self._native is not None:
                self._native.set_product_method(operand, accumulate_dtype, tokens, chosen.product_method)
        self._latest_product = LatestProduct(lane, operand, tokens, run)
        return run

    def select_again(self) -> None:
        """Forget which products were selected."""
        self._products.clear()
        self._latest_product = _NO_PRODUCT
        if self._native is not None:
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

    def try_add(self, left: Tensor, right: Tensor, armed: bool) -> bool:
        """Try to add left^T right to the sum, and return whether the gradient needs no further work. The
        native function calls this in its backward. armed: whether the graph ends in the node that carries the
        weight's hook.
        """
        return armed and self.add_product(self.node, left, right)

    def add_product(self, node: Any, left: Tensor, right: Tensor, may_wait: bool = True) -> bool:
        """Try to add left^T right to the sum. node, may_wait: as in `Capture.take_in_place`."""
        multiply = self.product(left.dtype, left.shape[0])
        if multiply is None:
            return False
        return self.accumulate_in_place(
            node,
            lambda total, scale, beta: multiply(total, left, right, scale, beta),
            (left, right),
            may_wait=may_wait,
        )

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
        slot = patched.slot
        hook = slot.native_hook  # try the native function first, with as few calls as possible
        if (
            hook is not None
            and weight is slot.param
            and patched._recorded is not None
            and type(bias) in patched.biases
            and forward_ad._current_level < 0
            and type(input) in ORDINARY_TYPES
        ):
            output = patched._recorded(patched._native, hook, input, weight, bias, None)
            if output is not None:
                return output
        output = patched.output(input, weight, bias)
        return patched.plain(module, input, weight, bias) if output is None else output

    def output(self, input: Tensor, weight: Any, bias: Any) -> Tensor | None:
        """Return the module's output for the weight and bias that it has now.

        Returns None if PyTorch must compute it, or raise.
        """
        if self.left_to_torch(weight, input):
            return _linear_of_shards(self, input, weight, bias)
        if type(bias) not in self.biases or not compiled.bias_fits(bias, weight):
            self.note(OTHER_BIAS)
            return None
        operand = compiled.operand_of(input, weight, bias, self.transposed)
        if operand is None:
            return None
        dtype = operand.dtype
        hook = self.slot.native_hook
        multiply = self.product(dtype, operand.shape[:-1].numel())
        if multiply is not None and hook is not None and self._recorded is not None:
            used = None if dtype is weight.dtype else self.cast(weight, dtype)
            output = self._recorded(self._native, hook, operand, weight, bias, used)
            if output is not None:
                return output
        return _apply_linear(operand, weight, bias, self, dtype)

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


class LinearFunction(torch.autograd.Function):
    """Compute input @ weight.T + bias, or input @ weight + bias if the module's weight is transposed.

    Used where the C++ class with the same name (csrc/autograd/module_call.cpp) is missing or declines.

    The input (..., in) has dtype `dtype`. Weight and bias are cast to it, as under autocast, but without its
    cache. That cache would keep a cast that autograd does not know.

    Under tensor parallelism input, weight and output are DTensors, and each rank adds its part of the weight
    gradient to its own shard. torch's DTensor operators compute everything else, so layouts and communication
    are PyTorch's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        patched: PatchedLinear,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.patched = patched
        ctx.set_materialize_grads(False)
        if weight.dtype is dtype:
            used = weight.detach()  # not the parameter itself, because its `.data` may be replaced
        else:
            used = patched.cast(weight, dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(input, used if ctx.needs_input_grad[0] else None)
        return compiled.no_view(F.linear(input, used.t() if patched.transposed else used, bias))

    @staticmethod
    @runs_as_written
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None
        input, used = ctx.saved_tensors
        patched = ctx.patched
        weight = patched.slot.param
        wants_input, wants_weight, wants_bias, _, _ = ctx.needs_input_grad
        if input.dim() == 2:
            rows = gradient
            inputs = input
        else:
            count = input.shape[:-1].numel()
            rows = gradient.reshape(count, gradient.shape[-1])
            inputs = input.reshape(count, input.shape[-1])
        of_input = of_weight = of_bias = None
        if wants_input:
            if torch.is_grad_enabled():  # double backward needs it as a function of the weight
                used = CastFunction.apply(weight, used)
            of_input = torch.mm(rows, used.t() if patched.transposed else used)
            if rows is not gradient:
                of_input = of_input.view(input.shape)
        left, right = (inputs, rows) if patched.transposed else (rows, inputs)
        add = _add_to_shard if is_distributed(weight) else PatchedLinear.add_product
        if wants_weight and not add(patched, ctx.next_functions[1][0], left, right):
            of_weight = torch.mm(left.t(), right).to(weight.dtype)
        if wants_bias:
            of_bias = rows.sum(0).to(weight.dtype)
        return of_input, of_weight, of_bias, None, None


#: `LinearFunction.apply` without its check for active function transforms, which was made before.
_apply_linear = super(torch.autograd.Function, LinearFunction).apply


PARTIAL = (
    "tensor parallel, and its gradient is a partial sum over the device mesh, or in another layout than "
    "the weight"
)


def _linear_of_shards(patched: Any, input: Any, weight: Any, bias: Any) -> Tensor | None:
    """Return the output for DTensors; None in all other cases."""
    if (
        not (is_distributed(weight) and is_distributed(input) and weight.requires_grad)
        or weight is not patched.slot.param
        or not (bias is None or (is_distributed(bias) and compiled.bias_fits(bias, weight)))
        or patched.transposed
        or not patched.may_record()
        or input.dtype != weight.dtype
        or torch.is_autocast_enabled(input.device.type)
    ):
        return None
    return LinearFunction.apply(input, weight, bias, patched, weight.dtype)


def _add_to_shard(patched: PatchedLinear, node: Any, rows: Any, inputs: Any) -> bool:
    """Try to add this rank's part of rows^T inputs to its shard of the sum. Return whether it was added."""
    slot = patched.slot
    left = _part(rows)
    right = _part(inputs)
    shard = local(slot.param)
    if not _fits(slot.param, rows, inputs) or shard.shape != (left.shape[1], right.shape[1]):
        slot.left_to = PARTIAL
        return False
    return bool(left.numel() and right.numel()) and patched.add_product(node, left, right, may_wait=False)


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
