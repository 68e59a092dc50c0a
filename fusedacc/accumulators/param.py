"""The record of one parameter: its accumulator, its dtypes, and what stands in its p.grad."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.dtypes import PAIRS
from .buffers import Segment

#: (device, gradient dtype, accumulate dtype): what one launch may hold.
Lane = tuple[torch.device, torch.dtype, torch.dtype]
#: Every lane there was, itself and its key: slots of a lane share the tuple.
_lanes: dict[Lane, tuple[Lane, int]] = {}


class GradState(enum.Enum):
    """What stands in `p.grad`, and so where the accumulator is. `p_grad.py` alone changes it."""

    #: Nothing, or what autograd or the user has put there. Counted loop: a gradient that is yet to be
    #: collected; the accumulator is private. Manual loop: the accumulator, whoever has made it.
    NOT_OURS = enum.auto()
    #: The accumulator itself. What the user puts in its place is taken for it until the window's end.
    PUBLISHED = enum.auto()
    #: A copy of the accumulator in the parameter's dtype, for an update. The accumulator is private, or was
    #: given up for the copy.
    CAST = enum.auto()
    #: Manual loop: nothing, or what autograd has stored of the micro-batch at hand, which is to be scaled
    #: before it is added. The accumulator waits in private.
    STOCK = enum.auto()
    #: What counts for nothing: left by a backward inside `ignore()`. The accumulator is private in a counted
    #: loop, and in a manual one there is none. What the user puts in its place is as in NOT_OURS.
    IGNORED = enum.auto()


def default_accumulate_dtype(param: Tensor) -> torch.dtype:
    """float32 for bfloat16 and float16 parameters, else the parameter's own dtype."""
    return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype


class Slot:
    """One parameter of the wrapped optimizer."""

    __slots__ = (
        "accumulator",
        "addition",
        "at_once",
        "buffer",
        "cleared_grad_dtype",
        "compiled",
        "grad_state",
        "group",
        "in_bucket",
        "keeps_cast",
        "lane",
        "lane_key",
        "left_to",
        "name",
        "native",
        "nbytes",
        "needs_eager",
        "number",
        "on_cuda",
        "param",
        "paths",
        "placed",
        "placed_version",
        "requested_dtype",
        "seen",
        "segment",
        "shape",
        "sharded",
        "stream",
        "strides",
        "widened",
    )

    def __init__(
        self, param: Tensor, group: int, name: str, accumulate_dtype: torch.dtype | None, number: int = 0
    ) -> None:
        self.param = param
        #: Among the wrapper's parameters; and of the last addition, as Note [Streams] has them.
        self.number, self.addition = number, -1
        self.group = group
        self.name = name
        #: The accumulator while it is private; None before its first gradient, and where p.grad is it.
        self.accumulator: Tensor | None = None
        #: Memory kept from window to window, where gradient and accumulator differ in dtype.
        self.buffer: Tensor | None = None
        self.segment: Segment | None = None
        #: Whether the accumulator is to be made in the buffer whatever its dtype: it is reduced with others.
        self.in_bucket = False
        #: What stands in p.grad; a weak reference to what was last put or noted there, and its version then.
        self.grad_state = GradState.NOT_OURS
        self.placed: Callable[[], Tensor | None] = nothing
        self.placed_version = 0
        #: Whether no kernel takes the gradients: complex dtypes, and once a sparse one or a subclass came.
        self.needs_eager: bool
        #: What `grad_dtype` was before it was set to None, if it was.
        self.widened = False
        self.cleared_grad_dtype: torch.dtype | None = None
        #: The accumulate dtype that was asked for; None for the default.
        self.requested_dtype = accumulate_dtype
        #: How modules of the model add to the accumulator by themselves, and why not where they might.
        self.paths: tuple[str, ...] = ()
        self.left_to = ""
        #: Whether the backward of a compiled graph has delivered a gradient by an operator of ours.
        self.compiled = False
        #: Whether a module of the model keeps its cast under autocast over a window.
        self.keeps_cast = False
        #: What the registry of hooks has last seen of the parameter: as long as that is so, its node is the
        #: same and the accumulator fits.
        self.seen: tuple | None = None
        #: Whether a gradient is added as soon as it comes, unless it may become the accumulator.
        self.at_once = False
        #: The native hook on the parameter's node, where there is one.
        self.native: Any = None
        #: Whether FSDP2 puts the gradients into p.grad, and autograd none.
        self.sharded = False
        #: The stream on which a module has added last, until the backward's end; 0 for the default one.
        self.stream: int | None = None
        self.describe()

    def drop_buffer(self) -> None:
        """Let the buffer go; its segment knows."""
        if self.segment is not None:
            self.segment.buffers -= 1
        self.buffer = self.segment = None

    def describe(self) -> None:
        """Take the parameter's present dtype, device and layout."""
        param, dtype = self.param, self.requested_dtype
        if dtype is None or (param.dtype, dtype) not in PAIRS:
            dtype = default_accumulate_dtype(param)
        lane = param.device, param.dtype, dtype
        #: The key is a small number that stands for the lane where a hash of it would cost too much.
        self.lane, self.lane_key = _lanes.setdefault(lane, (lane, len(_lanes) + 1))
        self.on_cuda = param.is_cuda
        self.set_needs_eager((param.dtype, dtype) not in PAIRS)
        self.nbytes = param.numel() * param.element_size()
        self.shape, self.strides = param.shape, _gradient_strides(param)

    def set_needs_eager(self, needs_eager: bool) -> None:
        """Note whether no kernel takes the gradients; the native hook knows then too."""
        self.needs_eager = needs_eager
        if self.native is not None:
            self.native.needs_eager = needs_eager

    def widen(self) -> None:
        """Let p.grad be of any dtype, where the accumulator has another than the parameter."""
        if self.accumulate_dtype != self.param.dtype and not self.widened:
            self.cleared_grad_dtype, self.widened = self.param.grad_dtype, True
            self.param.grad_dtype = None

    def narrow(self) -> None:
        """Give the parameter its `grad_dtype` back, and p.grad in it."""
        if self.widened:
            param, self.widened = self.param, False
            gradient, param.grad = param.grad, None
            param.grad_dtype = self.cleared_grad_dtype
            if gradient is not None:
                param.grad = gradient.to(self.cleared_grad_dtype or gradient.dtype)

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return self.lane[2]

    def may_publish(self) -> bool:
        """Whether autograd allows the accumulator to stand in p.grad."""
        return self.accumulate_dtype == self.param.dtype or self.param.grad_dtype is None

    def is_foreign(self, gradient: Tensor) -> bool:
        """Whether what stands in p.grad was put there by somebody else, and counts."""
        state = self.grad_state
        if state is GradState.NOT_OURS or state is GradState.STOCK:
            return True
        return state is not GradState.PUBLISHED and gradient is not self.placed()

    def is_ignored(self) -> bool:
        """Whether what stands in p.grad counts for nothing."""
        return self.grad_state is GradState.IGNORED and self.param.grad is self.placed()

    def obeys_layout(self, gradient: Tensor) -> bool:
        """Whether a gradient's strides let it become p.grad as it is; dimensions of size 1 do not count."""
        strides = gradient.stride()
        return strides == self.strides or all(
            size == 1 or have == want
            for size, have, want in zip(gradient.shape, strides, self.strides, strict=True)
        )


def _gradient_strides(param: Tensor) -> tuple[int, ...]:
    """AccumulateGrad's layout contract: a dense parameter's own strides, else row-major.

    See ATen grad_layout_contract.h.
    """
    if param.layout is torch.strided and param.is_contiguous():
        return param.stride()
    kept = torch.empty_like(param, device="meta").stride()  # which keeps strides only where they are dense
    return kept if kept == param.stride() else torch.empty(param.shape, device="meta").stride()


def nothing() -> None:
    """A weak reference to nothing."""
