"""One parameter's place in the accumulation: its sum, its dtypes, and what became of p.grad."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from .checks import PAIRS

#: (device, gradient dtype, accumulate dtype): what one launch may hold.
Lane = tuple[torch.device, torch.dtype, torch.dtype]
_lane_keys: dict[Lane, int] = {}

#: References to the C++ tensor, of which all of Python's together are one.
tensor_references: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]


def default_accumulate_dtype(param: Tensor) -> torch.dtype:
    """float32 for bfloat16 and float16 parameters, else the parameter's own dtype."""
    return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype


class Segment:
    """Memory that the buffers of several parameters share."""

    def __init__(self, memory: Tensor, buffers: int) -> None:
        self.memory = memory
        #: Views of it that are some slot's buffer.
        self.buffers = buffers

    def is_shared(self) -> bool:
        """Whether anybody else has a view of it: a user may still hold what was p.grad, or part of it."""
        return storage_users(self.memory) > self.buffers + 1


class Slot:
    """One parameter of the wrapped optimizer; a record that the arena and the capture keep."""

    __slots__ = (
        "aside",
        "buffer",
        "cast",
        "delivered",
        "former_grad_dtype",
        "group",
        "ignored",
        "lane",
        "lane_key",
        "name",
        "nbytes",
        "odd",
        "param",
        "requested_dtype",
        "segment",
        "shown",
        "shown_version",
        "signature",
        "strides",
        "sum",
        "widened",
    )

    def __init__(self, param: Tensor, group: int, name: str, accumulate_dtype: torch.dtype | None) -> None:
        self.param = param
        self.group = group
        self.name = name
        #: The sum while it is private; None before its first gradient and while p.grad is the truth.
        self.sum: Tensor | None = None
        #: Memory kept from window to window, where gradient and sum differ in dtype.
        self.buffer: Tensor | None = None
        self.segment: Segment | None = None
        #: Whether p.grad is the sum, and the truth, in a counted loop; what was put there then.
        self.delivered = False
        self.shown: Callable[[], Tensor | None] = _nothing
        self.shown_version = 0
        #: Whether, in a manual loop, autograd is to store in p.grad while the sum waits here.
        self.aside = False
        #: The sum in the parameter's dtype, while it stands in p.grad for an update.
        self.cast: Tensor | None = None
        #: What a backward inside `ignore()` left in p.grad.
        self.ignored: Tensor | None = None
        #: Whether no kernel takes the gradients: complex dtypes, and once a sparse one or a subclass came.
        self.odd: bool
        #: What `grad_dtype` was before it was set to None, if it was.
        self.widened = False
        self.former_grad_dtype: torch.dtype | None = None
        #: The accumulate dtype that was asked for; None for the default.
        self.requested_dtype = accumulate_dtype
        self.describe()

    def forget(self) -> None:
        """No sum, and nothing of ours in p.grad."""
        self.sum = self.cast = self.ignored = None
        self.shown = _nothing
        self.delivered = self.aside = False

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
        self.lane: Lane = (param.device, param.dtype, dtype)
        #: A small number that stands for the lane where a hash of it would cost too much.
        self.lane_key = _lane_keys.setdefault(self.lane, len(_lane_keys) + 1)
        self.odd = (param.dtype, dtype) not in PAIRS
        self.nbytes = param.numel() * param.element_size()
        kept = torch.empty_like(param, device="meta").stride()
        # AccumulateGrad's layout contract: a dense parameter's own strides, else row-major
        # (ATen grad_layout_contract.h). empty_like keeps strides only where they are dense.
        dense = kept == param.stride()
        self.strides = kept if dense else torch.empty(param.shape, device="meta").stride()
        self.signature = self.current_signature()

    def current_signature(self) -> tuple:
        """What must not have changed since `describe`, for the node to be the same and the sum to fit.

        A change of device or layout comes with other memory.
        """
        param = self.param
        return param.data_ptr(), param.dtype, param.requires_grad

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return self.lane[2]

    def shows_sum(self) -> bool:
        """Whether autograd allows the sum to stand in p.grad."""
        return self.accumulate_dtype == self.param.dtype or self.param.grad_dtype is None

    def is_foreign(self, gradient: Tensor) -> bool:
        """Whether what stands in p.grad was put there by somebody else, and counts."""
        return not (self.delivered or gradient is self.cast or gradient is self.ignored)

    def obeys_layout(self, gradient: Tensor) -> bool:
        """Whether a gradient's strides let it become p.grad as it is; dimensions of size 1 do not count."""
        strides = gradient.stride()
        return strides == self.strides or all(
            size == 1 or have == want
            for size, have, want in zip(gradient.shape, strides, self.strides, strict=True)
        )


def _nothing() -> None:
    """A weak reference to nothing."""


def storage_users(tensor: Tensor) -> int:
    """How many tensors share the memory of this one, itself included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # less the object just made


def owns_memory(tensor: Tensor) -> bool:
    """Whether nothing but the tensor, and the base that it is a view of, has its memory."""
    return storage_users(tensor) == (1 if tensor._base is None else 2)


def _count_references(tensors: list[Tensor], index: int) -> int:
    tensor = tensors[index]
    return sys.getrefcount(tensor)


#: References to a list's entry that a function has picked: the list's, the variable's, the argument's.
_PICKED = _count_references([torch.empty(0)], 0)


def is_sole(gradients: list[Tensor], index: int) -> bool:
    """Whether nothing but the list refers to a gradient or its memory, so that it may be kept and written.

    Stricter than AccumulateGrad, which counts the tensor's references only and can hand one memory to two
    parameters (two views of one gradient). A view keeps its base alive, which must have no other user then.
    """
    gradient = gradients[index]
    if sys.getrefcount(gradient) > _PICKED or tensor_references(gradient) != 1:
        return False
    base = gradient._base
    # The base is the view's and this variable's.
    sole = base is None or (sys.getrefcount(base) < _PICKED and tensor_references(base) == 2)
    return sole and owns_memory(gradient)
