"""The record of one parameter: its accumulator, its dtypes, and what stands in its p.grad."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kernels import checks, registry
from ..kernels.dtypes import PAIRS, default_accumulate_dtype
from .memory import Segment, cut, tensor_references

#: (device, gradient dtype, accumulate dtype): what one launch may hold.
Lane = tuple[torch.device, torch.dtype, torch.dtype]
#: Every lane there was, itself and its key: slots of a lane share the tuple.
_lanes: dict[Lane, tuple[Lane, int]] = {}


def nothing() -> None:
    """A weak reference to nothing."""


class GradState(enum.Enum):
    """What stands in `p.grad`, and so where the accumulator is. `p_grad.py` alone changes it."""

    #: Nothing, or what autograd or the user has put there. Counted loop: a gradient that is yet to be
    #: collected; the accumulator is private. Manual loop: the accumulator, whoever has made it.
    FOREIGN = enum.auto()
    #: The accumulator itself. What the user puts in its place is taken for it until the window's end.
    PUBLISHED = enum.auto()
    #: A copy of the accumulator in the parameter's dtype, for an update. The accumulator is private, or was
    #: given up for the copy.
    DTYPE_COPY = enum.auto()
    #: Manual loop: nothing, or what autograd has stored of the micro-batch at hand, which is to be scaled
    #: before it is added. The accumulator waits in private.
    AUTOGRAD_PENDING = enum.auto()
    #: What counts for nothing: left by a backward inside `ignore()`. The accumulator is private in a counted
    #: loop, and in a manual one there is none. What the user puts in its place is as in FOREIGN.
    IGNORED = enum.auto()


class Path(str, enum.Enum):
    """How a parameter's gradient reaches its accumulator; `explain()` has a table with an entry for each."""

    #: A module adds inside its backward: a Linear's product, experts' products, the rows that were looked up,
    #: and the slices of a language model's head.
    GEMM = "gemm"
    GROUPED = "grouped"
    EMBEDDING = "embedding"
    HEAD = "head"
    #: One launch for many gradients, and the same of FSDP2's shards.
    MULTI_TENSOR = "multi_tensor"
    FSDP2 = "fsdp2"
    #: autograd or plain torch adds.
    EAGER = "eager"
    #: There is no gradient.
    NONE = "none"


#: The paths by which modules add, and those by which they write all of an accumulator.
MODULE_PATHS = (Path.GEMM, Path.GROUPED, Path.EMBEDDING, Path.HEAD)
PRODUCT_PATHS = ((Path.GEMM,), (Path.GROUPED,))


def check_backend(lane: Lane, backend: str) -> None:
    """Raise RuntimeError unless a backend runs all passes over a lane's tensors, its self-test included."""
    device, gradient, accumulator = lane
    # Into the sum, in place to scale it, and from the sum into p.grad.
    for source, target in ((gradient, accumulator), (accumulator, accumulator), (accumulator, gradient)):
        if (source, target) in PAIRS:
            registry.select(device, target, source, backend)


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter of the wrapped optimizer."""

    param: Tensor
    group: int
    name: str
    #: The accumulate dtype that was asked for; None for the default.
    requested_dtype: torch.dtype | None
    #: Among the wrapper's parameters; and of the last addition, as Note [Streams] has them.
    number: int = 0
    addition: int = -1
    #: The accumulator while it is private; None before its first gradient, and where p.grad is it.
    accumulator: Tensor | None = None
    #: Memory kept from window to window, where gradient and accumulator differ in dtype.
    buffer: Tensor | None = None
    segment: Segment | None = None
    #: Whether the accumulator is to be made in the buffer whatever its dtype: it is reduced with others.
    in_bucket: bool = False
    #: Whether a reducer outside the wrapper reads p.grad within a backward.
    reduced_outside: bool = False
    #: What stands in p.grad; a weak reference to what was last put or noted there, and its version then.
    grad_state: GradState = GradState.FOREIGN
    placed: Callable[[], Tensor | None] = nothing
    placed_version: int = 0
    #: Of a sparse sum, when a gradient was last joined to it: the next window's is likely to get as many.
    num_rows: int = 0
    #: What `grad_dtype` was before it was set to None, if it was.
    widened: bool = False
    cleared_grad_dtype: torch.dtype | None = None
    #: The `MODULE_PATHS` by which modules of the model add by themselves, and why not where they might.
    paths: tuple[str, ...] = ()
    left_to: str = ""
    #: Whether the backward of a compiled graph has delivered a gradient by an operator of ours.
    compiled: bool = False
    #: Why a compiled graph has PyTorch's own gradient of it; "" where it has an operator of ours.
    left_to_compiler: str = ""
    #: Whether a module of the model keeps its cast under autocast over a window.
    keeps_cast: bool = False
    #: What the registry of hooks has last seen of the parameter: as long as that is so, its node is the same
    #: and the accumulator fits.
    seen: tuple | None = None
    #: Whether a gradient is added as soon as it comes, unless it may become the accumulator.
    at_once: bool = False
    #: The native hook on the parameter's node, where there is one.
    native: Any = None
    #: Whether FSDP2 puts the gradients into p.grad, and autograd none.
    sharded: bool = False
    #: The stream on which a module has added last, until the backward's end; 0 for the default one.
    stream: int | None = None
    #: Whether no kernel takes the gradients: complex dtypes, and once a sparse one or a subclass came.
    needs_eager: bool = field(init=False)
    #: Of the parameter as it is now. The key is a small number that stands for the lane where a hash of it
    #: would cost too much.
    lane: Lane = field(init=False)
    lane_key: int = field(init=False)
    on_cuda: bool = field(init=False)
    nbytes: int = field(init=False)
    shape: torch.Size = field(init=False)
    strides: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
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
        return self.lane[2] == self.param.dtype or self.param.grad_dtype is None

    def is_foreign(self, gradient: Tensor) -> bool:
        """Whether what stands in p.grad was put there by somebody else, and counts."""
        state = self.grad_state
        if state is GradState.FOREIGN or state is GradState.AUTOGRAD_PENDING:
            return True
        return state is not GradState.PUBLISHED and gradient is not self.placed()

    def is_ignored(self) -> bool:
        """Whether what stands in p.grad counts for nothing."""
        return self.grad_state is GradState.IGNORED and self.param.grad is self.placed()

    def fits(self, accumulator: Tensor | None) -> bool:
        """Whether there is an accumulator that the kernel takes; users may put another into p.grad."""
        if accumulator is None or not checks.is_plain(accumulator):
            return False
        device, _, dtype = self.lane
        return accumulator.dtype == dtype and accumulator.device == device

    def obeys_layout(self, gradient: Tensor) -> bool:
        """Whether a gradient's strides let it become p.grad as it is; dimensions of size 1 do not count."""
        strides = gradient.stride()
        return strides == self.strides or all(
            size == 1 or have == want
            for size, have, want in zip(gradient.shape, strides, self.strides, strict=True)
        )


def buffers(slots: Sequence[Slot], lacks_sum: Sequence[bool]) -> list[Any]:
    """The buffers of slots of one lane; where a slot lacks a sum, one to which no other object refers.

    Slots that have none, or whose buffer a user still sees as an old p.grad, get a new segment together.
    """
    segments = {slot.segment for slot in slots if slot.segment is not None}
    free = {segment for segment in segments if not segment.is_shared()}
    lacking = []
    for slot, lacks in zip(slots, lacks_sum, strict=True):
        # Two references to a buffer that only the slot knows: the slot's and the argument's.
        held = slot.segment not in free or sys.getrefcount(slot.buffer) > 2
        # A segment that is free has the slot's buffer, so there is one.
        if lacks and (held or tensor_references(slot.buffer) > 1):  # type: ignore[arg-type]
            lacking.append(slot)
    if lacking:
        device, _, dtype = slots[0].lane
        memory, views = cut([(slot.param.shape, slot.strides) for slot in lacking], dtype, device)
        segment = Segment(memory, len(views))
        for slot, view in zip(lacking, views, strict=True):
            slot.drop_buffer()
            slot.buffer, slot.segment = view, segment
    return [slot.buffer for slot in slots]


def _gradient_strides(param: Tensor) -> tuple[int, ...]:
    """The layout that autograd gives a gradient: a dense parameter's own (ATen grad_layout_contract.h)."""
    if param.layout is torch.strided and param.is_contiguous():
        return param.stride()
    kept = torch.empty_like(param, device="meta").stride()  # which keeps strides only where they are dense
    return kept if kept == param.stride() else torch.empty(param.shape, device="meta").stride()
